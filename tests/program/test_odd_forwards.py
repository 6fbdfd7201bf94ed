"""Unusual things in forward that a recording must handle: each model computes the same when placed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import placer
from placer.program import lower
from placer.program.fake import converter

SPEC = {"devices": ["cuda:0", "cuda:1", "cuda:2"], "objective": "memory", "reserve": 0}


class Net(nn.Module):
    """Three layers; ``middle`` is what each case does between the first and the last."""

    def __init__(self, middle: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self, self.first(x)))


def second_try(net: Net, x: Tensor) -> Tensor:
    try:
        return net.inner(x[:, :5])
    except RuntimeError:
        return net.inner(x)


def caught_read(net: Net, x: Tensor) -> Tensor:
    try:
        return net.inner(x) if x.sum() > -1e9 else x
    except Exception:  # a recording that goes this way would be another program
        return x * 100


def transformed(net: Net, x: Tensor) -> Tensor:
    return x + torch.func.grad(lambda y: net.inner(y).tanh().sum())(x)


def other_default_dtype(net: Net, x: Tensor) -> Tensor:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    rounded = torch.full((8,), 0.1)
    torch.set_default_dtype(before)
    return net.inner(x) * rounded


def view_written_without_gradients(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        x[:, 0] *= 0.5
    return net.inner(x)


CASES = {
    second_try: True,
    view_written_without_gradients: True,
    other_default_dtype: False,
    caught_read: False,
    transformed: False,
}


@pytest.mark.parametrize("middle", CASES, ids=lambda middle: middle.__name__)
def test_equal_when_placed(middle: Callable[[Net, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Net(middle).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    result = placer.verify(model, SPEC, (x,), run_on="cpu")
    assert result.ok, result.summary
    placed = placer.compile(model, SPEC, (x,), run_on="cpu")
    assert (len(placed.plan.stages) > 1) == CASES[middle]
    with torch.no_grad():  # also where the forward differentiates
        torch.manual_seed(1)
        expected = model(x)
        for training in (True, False):
            torch.manual_seed(1)
            assert torch.equal(placed.train(training)(x), expected)


def attention_twice_differentiable(net: Net, x: Tensor) -> Tensor:
    x = net.inner(x).view(-1, 2, 1, 4)
    with sdpa_kernel(SDPBackend.MATH):
        return nn.functional.scaled_dot_product_attention(x, x, x).flatten(1)


def test_kernels_that_forward_chooses_run_when_placed() -> None:
    torch.manual_seed(0)
    model = Net(attention_twice_differentiable).double()
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    placed = placer.compile(copy.deepcopy(model), SPEC, (x,), run_on="cpu")
    assert len(placed.plan.stages) > 1
    found = []
    for module in (model, placed):
        (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), x)[0])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
    assert torch.backends.cuda.flash_sdp_enabled()


class KeepsFeatures(nn.Module):
    """A hook stores a layer's result for forward; ``hold`` makes the hook, which refers to its target."""

    def __init__(self, hold: Callable[[KeepsFeatures], Callable[..., None]]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.kept: list[Tensor] = []
        self.first.register_forward_hook(hold(self))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh() + self.kept.pop())


def in_a_closure(net: KeepsFeatures) -> Callable[..., None]:
    return lambda module, args, result: net.kept.append(result)


def in_a_closure_of_a_closure(net: KeepsFeatures) -> Callable[..., None]:
    def keep(result: Tensor) -> None:
        kept.append(result)

    kept = net.kept
    return lambda module, args, result: keep(result)


def in_a_default(net: KeepsFeatures) -> Callable[..., None]:
    def keep(
        module: nn.Module, args: Any, result: Tensor, kept: Any = net.kept, *, other: Any = net
    ) -> None:
        assert other.kept is kept
        kept.append(result)

    return keep


@pytest.mark.matrix(2)
@pytest.mark.parametrize("hold", [in_a_closure, in_a_closure_of_a_closure, in_a_default])
@pytest.mark.parametrize("called_before", [False, True])
def test_hooks_that_hold_the_model(hold: Any, called_before: bool) -> None:
    torch.manual_seed(0)
    model = KeepsFeatures(hold)
    before = torch.randn(4, 8)
    if called_before:
        model.kept.append(before)
    placed = placer.compile(model, SPEC, torch.randn(4, 8), run_on="cpu")
    assert model.kept == ([before] if called_before else [])
    x = torch.randn(4, 8)
    assert torch.equal(placed(x), model(x))


class Counts(nn.Module):
    """Counts labels, and has a loss that depends on the lengths of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, labels: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x) * torch.bincount(labels.flatten(), minlength=8)
        scores = self.last(y).log_softmax(-1).transpose(0, 1)
        steps = torch.full_like(lengths, x.shape[1])
        return y, nn.functional.ctc_loss(scores, labels, steps, lengths, reduction="none")


def test_bins_and_sequence_losses() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(4, 6, 8), torch.randint(1, 8, (4, 2)), torch.tensor([2, 1, 2, 2])
    result = placer.verify(Counts().double(), SPEC, (inputs[0].double(), *inputs[1:]), run_on="cpu")
    assert result.ok, result.summary


class Compressed(nn.Linear):
    """Has a graph's edges in a layout that torch cannot copy."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the layout is in beta state
            self.edges = torch.eye(8).to_sparse_csr()


def sparse(net: Net, x: Tensor) -> Tensor:
    return torch.sparse.mm(torch.eye(len(x)).to_sparse(), net.inner(x))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: Net(sparse), "makes a tensor of layout torch.sparse_coo"),
        (lambda: nn.Sequential(torch.jit.script(nn.Linear(8, 8))), "0: is TorchScript"),
        (lambda: nn.Sequential(Compressed()), "0.edges: is a sparse tensor in the layout torch.s"),
    ],
    ids=["sparse", "script", "compressed"],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_what_cannot_be_planned_says_so(model: Any, message: str) -> None:
    with pytest.raises(placer.CaptureError, match=message):
        placer.make_plan(model(), SPEC, (torch.randn(4, 8),))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((torch.ones(4, 8), torch.ones(4, 8)), r"write several inputs as one tuple: \(x, y\)"),
        (({"input": torch.ones(4, 8)},), r"kwargs=\{\.\.\.\} if its keys are arguments of forward"),
        ((3,), r"args: is a int, not a tuple of inputs\n  -> write \(x,\)"),
    ],
    ids=["two tensors", "a dict", "a number"],
)
def test_inputs_given_in_another_form_are_told_how(inputs: tuple[Any, ...], message: str) -> None:
    with pytest.raises(placer.CaptureError, match=message):
        placer.make_plan(nn.Linear(8, 8), SPEC, *inputs)


def test_one_tensor_stands_for_itself() -> None:
    assert placer.verify(nn.Linear(8, 8), SPEC, torch.randn(4, 8), run_on="cpu").ok


class RowByRow(nn.Module):
    """Like a detector: each row is resized to its own anchors, whose tensors are kept in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)
        self.anchors = [torch.ones(8), torch.zeros(8)]

    def forward(self, x: Tensor) -> Tensor:
        rows = [self.first(x[i]) + self.anchors[0] for i in range(len(x))]
        return self.last(torch.stack(rows).tanh())


def test_a_model_that_goes_row_by_row_is_not_cut_and_says_why() -> None:
    x = torch.randn(4, 8)
    assert placer.verify(RowByRow(), SPEC, x, run_on="cpu").ok
    with pytest.raises(placer.CaptureError, match="something else for another batch size") as error:
        placer.make_plan(RowByRow(), {**SPEC, "microbatches": 2}, x)
    assert "test_odd_forwards.py:" in str(error.value)


class Token(nn.Module):
    """Puts a learned row before the others, as many times as there are samples."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(len(x), -1, -1), x], 1)


def test_a_module_that_stays_whole_for_its_len_says_what_to_write() -> None:
    notes = placer.make_plan(
        nn.Sequential(Token(), nn.Linear(8, 2)), SPEC, torch.randn(4, 3, 8)
    ).notes
    assert any("len(x) is a plain number, x.shape[0] is recorded" in note for note in notes)


class UntilDone(nn.Module):
    """As many steps as the values need: guesses never end the first loop, or never enter the second."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.first, self.last, self.least = nn.Linear(8, 8), nn.Linear(8, 2), least

    def forward(self, x: Tensor) -> Tensor:
        done = x.new_zeros(len(x))
        while done.min() < self.least if self.least > 0 else not done.min() >= 1:
            x = torch.tanh(self.first(x))
            done = done + 0.4 + x.mean(-1).abs()
        return self.last(x)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("least", [1.0, 0.0])
def test_a_loop_until_a_value_is_reached_ends_in_a_capture(
    least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(converter._MOST_READS, 1, 20)
    assert placer.verify(UntilDone(least), {"devices": ["cpu:0"]}, torch.randn(4, 8)).ok


class Endless(UntilDone):
    """A loop that ends with neither guess of a value."""

    def forward(self, x: Tensor) -> Tensor:
        while (x.max() > x.min()).item() in (True, False):
            x = self.first(x)
        return x


def test_a_loop_that_no_guess_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converter, "_MOST_READS", {1: 20, 0: 40})
    with pytest.raises(placer.CaptureError, match="a loop that waits for another value") as error:
        placer.make_plan(Endless(0.0), {"devices": ["cpu:0"]}, torch.randn(4, 8))
    assert "reads values of tensors" in str(error.value)


class ReadsEveryRow(nn.Module):
    """It reads a value of every row, as a detector does for every box; no value is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        flags = [bool(value > 0) for value in y[:, 0]]
        if all(flags):
            raise ValueError("this model needs a row whose first value is not positive")
        return y * (sum(flags) + 1)


def test_many_reads_are_no_endless_loop() -> None:
    assert lower(ReadsEveryRow(), [torch.randn(1_200, 8)]).captured.conditions.guess.value == 0


class Changes(nn.Module):
    """Changes something in code that it checkpoints; ``inside`` a layer's forward, which stays whole."""

    def __init__(self, change: Callable[[Any], object], *, inside: bool, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.change, self.inside, self.reentrant = change, inside, reentrant
        self.calls, self.log = 0, list[int]()
        self.register_buffer("count", torch.zeros(()))
        self.part = _ChangesInside(self)

    def run(self, x: Tensor) -> Tensor:
        self.change(self)
        return torch.as_tensor(self.last(x))

    def forward(self, x: Tensor) -> Any:
        run = self.part if self.inside else self.run
        return checkpoint(run, self.first(x), use_reentrant=self.reentrant)


class _ChangesInside(nn.Module):
    def __init__(self, owner: Changes) -> None:
        super().__init__()
        self.change, self.layer, self.calls, self.log = (
            owner.change,
            nn.Linear(8, 8),
            0,
            list[int](),
        )
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.change(self)
        return self.layer(x)


CHANGES: dict[str, Callable[[Any], object]] = {
    "number": lambda net: setattr(net, "calls", net.calls + 1),
    "list": lambda net: net.log.append(1),
    "buffer in place": lambda net: net.count.add_(1),
    "buffer": lambda net: setattr(net, "count", net.count + 1),
}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_what_checkpointed_code_changes_twice(change: str, *, reentrant: bool) -> None:
    x = torch.randn(4, 8, dtype=torch.float64)
    model = Changes(CHANGES[change], inside=False, reentrant=reentrant).double()
    with pytest.raises(placer.CaptureError, match="in code that it checkpoints"):
        placer.compile(model, SPEC, x, run_on="cpu")
    plain = Changes(CHANGES[change], inside=True, reentrant=reentrant).double()
    placed: Any = placer.compile(copy.deepcopy(plain), SPEC, x, run_on="cpu")
    for _ in range(2):
        for net in (plain, placed):
            net(x).sum().backward()
        for name in ("calls", "log", "count"):
            assert getattr(placed.part, name) == getattr(plain.part, name)


class Gives(nn.Module):
    """Gives a dict to a layer that stays whole and adds to it."""

    def __init__(self) -> None:
        super().__init__()
        self.adds, self.last = Adds(), nn.Linear(8, 8)

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        given = {} if given is None else given
        return torch.as_tensor(self.last(self.adds(x, given) + given["new"]))


class Adds(nn.Module):
    def forward(self, x: Tensor, given: dict[str, Tensor]) -> Tensor:
        given["new"] = x * 2 if x.sum() > 0 else x * 3
        return x


def test_a_whole_layer_adds_to_a_dict_that_it_is_given() -> None:
    model = Gives().double()
    x = torch.randn(4, 8, dtype=torch.float64)
    placed = placer.compile(model, SPEC, x, run_on="cpu")
    torch.testing.assert_close(placed(-x), model(-x), rtol=1e-10, atol=1e-12)
    with pytest.raises(placer.CaptureError, match=r"it sets given\.new"):
        placer.compile(model, SPEC, (x, {"old": x}), run_on="cpu")


def test_code_of_a_string_decides_by_values() -> None:
    space: dict[str, Any] = {"nn": nn}
    exec(
        "class Chooser(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x * 2 if x.sum() > 0 else x\n",
        space,
    )
    model = nn.Sequential(nn.Linear(8, 8), space["Chooser"]())
    with pytest.raises(placer.CaptureError, match="it decides by values"):
        placer.compile(model, {**SPEC, "microbatches": 2}, torch.randn(4, 8), run_on="cpu")
