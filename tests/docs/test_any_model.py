"""The table of docs/any-model.md: for every row, a model for which it is tried."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
import pages
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import placer
from placer import CaptureError
from placer.program import lower

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated")

Case = Callable[["Inner", Tensor], Tensor]
SCALE = torch.ones(8)
HELD: list[nn.Module] = []
SETTINGS = {"scale": 2.0}
FACTOR = ContextVar("factor", default=2.0)


class Inner(nn.Module):
    """``case`` is what its forward does."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.linear, self.tied, self.rnn = nn.Linear(8, 8), nn.Linear(8, 8), nn.GRU(8, 8)
        self.tied.weight = self.linear.weight
        self.linear.weight.factor = SETTINGS["scale"]
        HELD[:] = [self.linear]
        self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.drop, self.case = nn.Dropout(), case
        forward = self.tied.forward
        self.tied.forward = lambda x: -forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.case(self, x)


class Negated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return -module(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return None, torch.autograd.grad(ctx.module(x), x, gradient)[0] * -3


def padded(net: Inner, x: Tensor) -> Tensor:
    lengths = (x.flatten(1).amax(1) > 0).long() + 1
    steps = torch.stack([x, x, x])
    packed = pack_padded_sequence(steps, lengths, enforce_sorted=False)
    return pad_packed_sequence(net.rnn(packed)[0])[0]


def longest(net: Inner, x: Tensor) -> Tensor:
    states = padded(net, x)
    total = states[0]
    for step in range(1, states.size(0)):
        total = total + states[step]
    return total


def modes(net: Inner, x: Tensor) -> Tensor:
    net.drop.eval()
    x = net.drop(net.linear(x))
    net.drop.train()
    return net.tied(x)


def differentiated(net: Inner, x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        return x + torch.autograd.grad(net.linear(y).tanh().sum(), y)[0]


def seeded(net: Inner, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return net.linear(x + torch.rand_like(x))


def asserting(net: Inner, x: Tensor) -> Tensor:
    assert torch.isfinite(x).all() and not torch.isnan(x).any()
    return net.linear(x)


def through_numpy(net: Inner, x: Tensor) -> Tensor:
    return net.linear(x) * torch.from_numpy(x.detach().numpy() * 2)


def called_with(net: Inner, x: Tensor) -> Tensor:
    state = {name: 1.5 * value for name, value in net.linear.named_parameters()}
    return torch.func.functional_call(net.linear, state, (x,))


def retaining(net: Inner, x: Tensor) -> Tensor:
    hidden = net.linear(x)
    hidden.retain_grad()
    return hidden * 2


def retaining_its_result(net: Inner, x: Tensor) -> Tensor:
    hidden = net.block(x)
    hidden.retain_grad()
    return hidden


def perturbed(net: Inner, x: Tensor) -> Tensor:
    net.noise = torch.zeros(8, requires_grad=True)
    return net.linear(x + net.noise)


def enabling(net: Inner, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return net.linear(x)


def with_a_new_global(net: Inner, x: Tensor) -> Tensor:
    globals()["LAST"] = x
    return net.linear(x)


def with_a_new_attribute(net: Inner, x: Tensor) -> Tensor:
    type(net).last = x
    return net.linear(x)


def scripted(net: Inner, x: Tensor) -> Tensor:
    return net.linear(_tripled(x))


def _script(x: Tensor) -> Tensor:
    if x.size(0) > 4:
        return x * 3
    return x


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TorchScript is deprecated
    _tripled = torch.jit.script(_script)


def without_gradients(net: Inner, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = net.linear(x)
    return x * scale


def under_settings(net: Inner, x: Tensor) -> Tensor:
    with (
        torch.autocast("cpu", torch.bfloat16),
        sdpa_kernel(SDPBackend.MATH),
        torch.backends.cudnn.flags(enabled=False),
    ):
        return net.linear(x).float()


def without_dropout(net: Inner, x: Tensor) -> Tensor:
    before, net.drop.p = net.drop.p, 0.0
    x = net.drop(net.linear(x))
    net.drop.p = before
    return x


def in_double(net: Inner, x: Tensor) -> Tensor:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    x = net.linear(x) * torch.full((8,), 0.1).float()
    torch.set_default_dtype(before)
    return x


# What is tried for each row: a part of the model's forward. By the row's outcome, see `OUTCOMES`.
ROWS: dict[str, list[Case]] = {
    "`if`, `for` over shapes, flags and constants": [
        lambda net, x: net.linear(x) if x.size(1) == 8 and net.training else x,
        lambda net, x: sum((net.linear(x[:, :8]) for _ in range(x.dim())), x),
    ],
    "`if` or `assert` on the value of a tensor, `.item()`, numpy on tensors": [
        lambda net, x: net.linear(x) if x.sum() > 0 else net.linear(-x),
        asserting,
        lambda net, x: net.linear(x) * x.amax().item(),
        through_numpy,
    ],
    "`torch.distributions`": [lambda net, x: Normal(net.linear(x), x.exp()).log_prob(x)],
    "seeding, or differentiating, inside `forward`": [seeded, differentiated],
    "`retain_grad()`, or a tensor of its own with a gradient that it keeps or returns": [
        retaining,
        perturbed,
    ],
    "`retain_grad()` on an input, or on a tensor that a submodule makes and the model returns": [
        retaining_its_result
    ],
    "`torch.enable_grad()`, `if torch.is_grad_enabled()`, `torch.is_autocast_enabled()`, "
    "`x.requires_grad`": [
        enabling,
        lambda net, x: net.linear(x) if torch.is_grad_enabled() else x,
        lambda net, x: net.linear(x).to(x.dtype) if torch.is_autocast_enabled("cpu") else x,
        lambda net, x: net.linear(x) if x.requires_grad else x,
    ],
    "`torch.no_grad()`, `torch.autocast(…)`, `sdpa_kernel(…)`, `cudnn.flags(…)` around operations": [
        without_gradients,
        under_settings,
    ],
    "constants made from numpy or lists": [
        lambda net, x: net.linear(x) * torch.from_numpy(np.arange(8.0, dtype=np.float32)),
        lambda net, x: net.linear(x) * torch.tensor([1.0, 2.0] * 4),
    ],
    "tensors, numbers and flags in global variables, `ContextVar`s, closures or objects": [
        lambda net, x: net.linear(x) * SCALE,
        lambda net, x: net.linear(x) * SETTINGS["scale"],
        lambda net, x: net.linear(x) * FACTOR.get(),
    ],
    "layers of the model in global variables, closures or objects": [
        lambda net, x: HELD[0](x) * HELD[0].weight.sum()
    ],
    "the same in a module that stays whole": [
        lambda net, x: HELD[0](x) if x.sum() > 0 else x,
    ],
    "attributes of parameters and buffers (`weight.is_expert`)": [
        lambda net, x: net.linear(x) * net.linear.weight.factor
    ],
    "the gradient of a weight (`weight.grad`), or how often it was changed (`weight._version`)": [
        lambda net, x: x if net.linear.weight.grad is None else -x,
        lambda net, x: net.linear(x) * net.linear.weight._version,
    ],
    "setting an attribute that a `torch.nn` layer, or one that stays whole, then reads "
    "(`self.drop.p = p`)": [without_dropout],
    "`x.stride()`, `if x.is_contiguous()`": [
        lambda net, x: net.linear(x) if x.is_contiguous() else x,
        lambda net, x: net.linear(x) * x.stride(1),
    ],
    "another default dtype in a part of `forward`": [in_double],
    "a new global variable or attribute of a class, or one set by `globals()`": [
        with_a_new_global,
        with_a_new_attribute,
    ],
    "packed sequences, tied parameters, `functional_call`": [
        padded,
        lambda net, x: net.linear(x) * net.tied(x),
        called_with,
    ],
    "`if`, `for` over the length of the longest packed sequence": [longest],
    "`train()` and `eval()` on submodules, a wrapped `forward`": [modes],
    "a custom `autograd.Function`, also one that calls a module in its backward": [
        lambda net, x: Negated.apply(net.linear, x)
    ],
    "recomputation with `torch.utils.checkpoint`": [
        lambda net, x: checkpoint(net.linear, x, use_reentrant=False),
        lambda net, x: net.tied(checkpoint(net.block, x, use_reentrant=False)),
    ],
    "functions of TorchScript": [scripted],
    "TorchScript modules": [lambda net, x: net.scripted(x)],
    "nested tensors": [
        lambda net, x: torch.nested.as_nested_tensor([x, x[:1]]).to_padded_tensor(0.0)[0]
    ],
    '`x.to("cuda:1")`': [lambda net, x: net.linear(x.to("cuda:1"))],
}


def table() -> dict[str, str]:
    """The rows of the page's table."""
    text = (pages.ROOT / "docs" / "any-model.md").read_text(encoding="utf-8")
    rows = text.partition("| in `forward` | what happens |\n| --- | --- |\n")[2].partition("\n\n")[
        0
    ]
    return {
        cells[1].strip(): cells[2].strip() for row in rows.splitlines() if (cells := row.split("|"))
    }


def model(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Inner(case), nn.Linear(8, 8))


def assert_equal(placed: nn.Module, case: Case, rows: int = 4) -> None:
    """Compare with the plain model on new inputs: results and gradients."""
    plain, x = model(case), torch.randn(rows, 8)
    results = []
    for module in (placed, plain):
        module.zero_grad()
        torch.manual_seed(1)
        results.append(module(x))
        if results[-1].requires_grad:
            results[-1].square().sum().backward()
    assert torch.allclose(*results, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(placed.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.allclose(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3)


def compiled(case: Case) -> placer.PlacedModule:
    spec = {"devices": ["cuda:0", "cuda:1"], "layers": {"0": "cuda:0", "2": "cuda:1"}}
    return placer.compile(model(case), spec, torch.randn(4, 8), run_on="cpu")


def whole_layers(case: Case) -> list[str]:
    program = lower(model(case), (torch.randn(4, 8),))
    return [each.layer for each in program.captured.whole_modules]


def is_recorded(case: Case) -> None:
    assert not whole_layers(case)
    placed = compiled(case)
    for rows in (4, 4, 6):
        assert_equal(placed, case, rows)


def uses_the_present(case: Case) -> None:
    assert not whole_layers(case)
    placed = compiled(case)
    for _ in range(2):
        SCALE.add_(1)
        SETTINGS["scale"] += 1
        FACTOR.set(FACTOR.get() + 1)
        placed.get_parameter("1.linear.weight").factor = SETTINGS["scale"]
        assert_equal(placed, case)


def uses_its_own(case: Case) -> None:
    assert not whole_layers(case)
    placed = compiled(case)
    (given,) = HELD
    for rows in (4, 6):
        plain, x = model(case), torch.randn(rows, 8)
        expected, HELD[:] = plain(x), [given]
        torch.testing.assert_close(placed(x), expected)
        placed(x).sum().backward()
        assert placed.get_parameter("1.linear.weight").grad is not None


def stays_whole(case: Case) -> None:
    assert whole_layers(case) == ["1"]
    placed = compiled(case)
    for _ in range(2):
        assert_equal(placed, case)


def part_stays_whole(case: Case) -> None:
    (layer,) = whole_layers(case)
    assert layer in ("1", "1.block")
    placed = compiled(case)
    for _ in range(2):
        assert_equal(placed, case)


def for_each_answer(case: Case) -> None:
    placed = compiled(case)
    assert_equal(placed, case)
    with torch.no_grad():
        assert_equal(placed, case)
    with torch.autocast("cpu"):
        assert_equal(placed, case)
    assert_equal(placed, case)


def is_an_error(case: Case) -> None:
    given = model(case)
    if case is retaining_its_result:
        given = nn.Sequential(nn.Linear(8, 8), given[1])
    if "scripted" in case.__code__.co_names:
        given[1].scripted = torch.jit.script(nn.Linear(8, 8))
    with pytest.raises(CaptureError, match=r"TorchScript|any_model.py:|does not exist before"):
        placer.compile(given, {"devices": ["cpu"]}, torch.randn(4, 8))


OUTCOMES: dict[str, Callable[[Case], None]] = {
    "recorded": is_recorded,
    "recorded as constants": is_recorded,
    "recorded as one operation": is_recorded,
    "recorded, with its backward": is_recorded,
    "recorded, with its checks": is_recorded,
    "recorded; each call uses the present ones": uses_the_present,
    "recorded; a placed model uses its own": uses_its_own,
    "recorded for each answer": for_each_answer,
    "that module stays whole": stays_whole,
    "what is recomputed stays whole": part_stays_whole,
    "an error": is_an_error,
    "an error that names the line; see below": is_an_error,
}


def test_every_row_is_tried() -> None:
    assert list(table()) == list(ROWS)
    assert set(table().values()) <= set(OUTCOMES)


@pytest.mark.matrix(8)
@pytest.mark.parametrize(
    ("row", "index"),
    [(row, i) for row, cases in ROWS.items() for i in range(len(cases))],
    ids=lambda part: re.sub(r"\W+", " ", str(part)).strip(),
)
def test_what_happens_is_what_the_row_says(row: str, index: int) -> None:
    OUTCOMES[table()[row]](ROWS[row][index])
