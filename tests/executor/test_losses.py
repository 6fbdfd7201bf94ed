"""The loss of a batch that is cut is that of the whole batch, whatever the loss function is a mean of."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import loss_cases
import numpy as np
import pytest
import torch
from loss_cases import CLASSES, LENGTH, WEIGHTS, kept, labels
from oracle import assert_close, gradient_noise
from torch import Tensor, nn
from torch.nn import functional as F

import placer
from placer import PlacedModule, PlacerError
from placer.program import unmarked

D = torch.float64


class Tokens(nn.Module):
    """Classes per token; no row sees another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.embed(x))))  # type: ignore[no-any-return]


@functools.cache
def _placed(replicas: int, microbatches: int, schedule: str) -> tuple[PlacedModule, nn.Module]:
    torch.manual_seed(0)
    model = Tokens().double()
    spec = placer.PlacementSpec(
        devices=["cpu:0", "cpu:1"], replicas=replicas, microbatches=microbatches, schedule=schedule
    )
    return placer.compile(model, spec, _input(8)), model


def _pair(
    replicas: int = 2, microbatches: int = 2, schedule: str = "GPipe"
) -> tuple[PlacedModule, nn.Module]:
    placed, model = _placed(replicas, microbatches, schedule)
    placed, plain = copy.deepcopy(placed), copy.deepcopy(model)
    return placed, plain


def _input(rows: int) -> Tensor:
    return torch.randn(rows, LENGTH, 3, dtype=D, generator=torch.Generator().manual_seed(rows))


def _flat(output: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), **options)


def _masked_mean(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    wanted, mask = target
    return ((output - wanted).square().mean(-1) * mask).sum() / mask.sum()


def _assert_equal(
    placed: PlacedModule, plain: nn.Module, x: Tensor, target: Any, loss_fn: Any, **options: Any
) -> None:
    loss = placed.step(x, target=target, loss_fn=loss_fn, **options)
    expected = loss_fn(plain(x), target) if target is not None else loss_fn(plain(x))
    expected.backward()
    assert_close(loss, expected.detach(), "loss")
    floor = gradient_noise(plain)
    for (name, ours), theirs in zip(placed.named_parameters(), plain.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, name, floor=floor)


Case = tuple[Callable[..., Tensor], Callable[[int], Any], dict[str, Any]]


CASES: dict[str, Case] = {
    "mean": (F.mse_loss, lambda n: torch.randn(n, LENGTH, CLASSES, dtype=D), {}),
    "mean of labels": (_flat, lambda n: labels(n, 0), {}),
    "no target": (lambda output: output.square().mean(), lambda n: None, {}),
    "sum": (
        functools.partial(_flat, reduction="sum"),
        labels,
        {},
    ),
    "sum over a fixed number": (
        lambda output, target: _flat(output, target, reduction="sum") / 32,
        labels,
        {},
    ),
    "sum of a module": (
        nn.MSELoss(reduction="sum"),
        lambda n: torch.randn(n, LENGTH, CLASSES, dtype=D),
        {},
    ),
    "kept labels": (_flat, labels, {"normalizer": kept}),
    "said to be a mean": (
        lambda output: output.square().mean(),
        lambda n: None,
        {"reduction": "mean"},
    ),
}


@pytest.mark.matrix(2)
@pytest.mark.parametrize("rows", [8, 5])
@pytest.mark.parametrize(
    ("replicas", "microbatches"),
    [(r, m) for r in (1, 2, 3) for m in (1, 2, 3, 4)],
)
def test_step_equals_the_loss_of_the_whole_batch(
    replicas: int, microbatches: int, rows: int
) -> None:
    for loss_fn, make_target, options in CASES.values():
        pair = _pair(replicas, microbatches, "1F1B")
        _assert_equal(*pair, _input(rows), make_target(rows), loss_fn, **options)


class ByClass(nn.Module):
    """Classes along dim 1, as torch's losses want them."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(3, 5, 3, padding=1)
        self.norm = nn.GroupNorm(1, 5)
        self.head = nn.Conv1d(5, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.mix(x)))).log_softmax(1)  # type: ignore[no-any-return]


LABEL_LOSSES: dict[str, Callable[..., Tensor]] = {
    "module": nn.CrossEntropyLoss(),
    "module, weights": nn.CrossEntropyLoss(weight=WEIGHTS),
    "module, weights, smoothing": nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2),
    "nll": nn.NLLLoss(weight=WEIGHTS),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "function": F.cross_entropy,
    "partial": functools.partial(F.nll_loss, weight=WEIGHTS),
}


@pytest.mark.matrix(2)
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("name", LABEL_LOSSES)
def test_torchs_losses_of_labels_are_known(name: str, replicas: int) -> None:
    torch.manual_seed(0)
    model, x = ByClass().double(), torch.randn(5, 3, LENGTH, dtype=D)
    spec = {"devices": ["cpu:0", "cpu:1"], "replicas": replicas, "microbatches": 4}
    placed = placer.compile(model, spec, x)
    _assert_equal(placed, model, x, labels(5), LABEL_LOSSES[name])


def test_labels_ignored_under_another_number_and_probabilities_of_classes() -> None:
    torch.manual_seed(0)
    model, x = ByClass().double(), torch.randn(5, 3, LENGTH, dtype=D)
    placed = placer.compile(model, {"devices": ["cpu:0"], "microbatches": 4}, x)
    _assert_equal(placed, model, x, labels(5, 2), nn.CrossEntropyLoss(ignore_index=2))
    chances = torch.rand(5, CLASSES, LENGTH, dtype=D).softmax(1)
    placed.zero_grad()
    model.zero_grad()
    _assert_equal(placed, model, x, chances, nn.CrossEntropyLoss(weight=WEIGHTS))


def test_nothing_counts_in_the_whole_batch() -> None:
    """The mean over nothing is NaN, as it is uncut."""
    placed, plain = _pair()
    target = torch.full((8, LENGTH), -100)
    loss = placed.step(_input(8), target=target, loss_fn=_flat, normalizer=kept)
    _flat(plain(_input(8)), target).backward()
    assert loss.isnan()
    for ours, theirs in zip(placed.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


def _numbers(rows: int) -> Tensor:
    """Of which the first rows have some between 0.3 and 0.6: a trial is of these."""
    return torch.rand(rows, LENGTH, dtype=D, generator=torch.Generator().manual_seed(0))


REFUSED: dict[str, tuple[Callable[..., Tensor], Any]] = {
    "ignored labels": (_flat, labels(8)),
    "one ignored label": (_flat, torch.where(torch.arange(48).view(8, 6) == 40, -100, 1)),
    "an ignored label, and a first token that the loss leaves out": (
        lambda output, target: _flat(output[:, :-1], target[:, 1:]),
        torch.where(torch.arange(48).view(8, 6) < 8, -100, 1),
    ),
    "a rare label that is ignored, and a border that the loss leaves out": (
        lambda output, target: _flat(output[:, 2:-2] * 1e-2, target[:, 2:-2], ignore_index=0),
        torch.where(torch.arange(48).view(8, 6) == 45, 0, 2),
    ),
    "class weights": (functools.partial(_flat, weight=WEIGHTS), labels(8, 0)),
    "a mask": (
        _masked_mean,
        (torch.randn(8, LENGTH, CLASSES, dtype=D), torch.arange(48).view(8, LENGTH) % 5 > 1),
    ),
    "zeros that are missing": (
        lambda output, target: (output[..., 0] - target)[target > 0].square().mean(),
        _numbers(8).sub(0.1).clamp(min=0),
    ),
    "numbers in a range": (
        lambda output, target: (
            (output[..., 0] - target)[(target > 0.3) & (target < 0.6)].square().mean()
        ),
        _numbers(8),
    ),
    "all rows together": (
        lambda output, target: 1 - (output.sigmoid() * target).sum() / target.sum(),
        torch.rand(8, LENGTH, CLASSES, dtype=D),
    ),
    "the largest row": (lambda output: output.square().mean((1, 2)).max(), None),
    "the spread of rows": (lambda output: output.var(0).mean(), None),
    "a penalty for every cut": (lambda output: output.square().sum() + WEIGHTS.sum(), None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_mean_over_rows_is_refused_before_any_gradient(name: str) -> None:
    """Uncut, or computed over the whole batch, it is what it is for the plain model."""
    placed, _ = _pair()
    loss_fn, target = REFUSED[name]
    with pytest.raises(PlacerError, match=r"loss_fn: is neither a mean nor a sum") as error:
        placed.step(_input(8), target=target, loss_fn=loss_fn)
    assert "normalizer=" in str(error.value) and "reduction='sum'" in str(error.value)
    assert all(p.grad is None for p in placed.parameters())
    assert "pass whole_batch=True" in str(error.value)
    _assert_equal(*_pair(1, 1), _input(8), target, loss_fn)
    _assert_equal(*_pair(2, 2), _input(8), target, loss_fn, whole_batch=True)


@pytest.mark.parametrize("seed", range(4))
def test_ignored_labels_of_a_model_that_was_not_trained_yet(seed: int) -> None:
    """All its losses are almost alike, so those of two groups show little."""
    torch.manual_seed(seed)
    model, x = nn.Linear(6, 500, bias=False), torch.randn(8, 16, 6)
    nn.init.normal_(model.weight, std=1e-3)
    target = torch.randint(0, 200, (8, 16))
    for row, start in zip(target, torch.randint(0, 15, (8,)), strict=True):
        row[:start] = -100
    placed = placer.compile(model, {"devices": ["cpu:0"], "microbatches": 2}, x)
    with pytest.raises(PlacerError, match="is neither a mean nor a sum"):
        placed.step(x, target=target, loss_fn=lambda y, t: _flat(y[:, :-1], t[:, 1:]))


def test_a_loss_that_large_numbers_make_infinite_is_tried_with_small_ones() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh()).double()
    x, plain = torch.randn(8, 6, dtype=D), copy.deepcopy(model)
    placed = placer.compile(model, {"devices": ["cpu:0"], "microbatches": 2}, x)
    _assert_equal(placed, plain, x, None, lambda output: output.acos().square().mean())


def test_a_loss_that_is_nothing_on_a_few_rows_is_refused() -> None:
    """A trial has four rows, slices have eight."""
    placed, _ = _pair(1, 2)
    with pytest.raises(PlacerError, match=r"is 0 on a few rows(.|\n)*reduction='sum'"):
        placed.step(_input(16), loss_fn=lambda output: output[6:].square().sum())
    with pytest.raises(PlacerError, match=r"is nan \(as the mean of nothing is\) on a few rows"):
        placed.step(_input(16), loss_fn=lambda output: output[6:].square().mean())


def test_a_label_that_comes_later_is_tried_when_it_comes() -> None:
    placed, plain = _pair()
    target = labels(8, 0)
    _assert_equal(placed, plain, _input(8), target, _flat)
    target[3, 2] = -100
    with pytest.raises(PlacerError, match="is neither a mean nor a sum"):
        placed.step(_input(8), target=target, loss_fn=_flat)
    placed.step(_input(8), target=target, loss_fn=_flat, normalizer=kept)


@pytest.mark.parametrize("scale", [0.0, float("nan")])
def test_losses_that_show_nothing_are_tried_again(scale: float) -> None:
    placed, _ = _pair()
    factor = torch.tensor(scale, dtype=D)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return _flat(output, target, weight=WEIGHTS) * factor

    placed.step(_input(8), target=labels(8, 0), loss_fn=loss_fn)
    factor.fill_(1.0)
    with pytest.raises(PlacerError, match="neither a mean nor a sum"):
        placed.step(_input(8), target=labels(8, 0), loss_fn=loss_fn)


def test_weights_of_rows_that_are_all_alike_at_first() -> None:
    placed, plain = _pair()
    wanted = torch.randn(8, LENGTH, CLASSES, dtype=D)
    ones = torch.ones(8, LENGTH, dtype=D)
    _assert_equal(placed, plain, _input(8), (wanted, ones), _masked_mean)
    ones[2, 3] = 0.5
    with pytest.raises(PlacerError, match="is neither a mean nor a sum"):
        placed.step(_input(8), target=(wanted, ones), loss_fn=_masked_mean)


def test_more_labels_than_can_be_tried_are_refused() -> None:
    placed, _ = _pair()
    target = torch.arange(8 * LENGTH).view(8, LENGTH) * 100
    placed.step(_input(8), target=target, loss_fn=lambda output, t: output.square().mean())
    target = torch.arange(8 * 40).view(8, 40)
    with pytest.raises(PlacerError, match=r"more than 256 labels(.|\n)*normalizer="):
        placed.step(_input(8), target=target, loss_fn=lambda output, t: output.square().mean())


def _loss_of(sign: float) -> Callable[[Tensor], Tensor]:
    return lambda output: output.square().mean() if sign > 0 else output.square().sum()


def test_functions_of_the_same_code_that_hold_other_things_are_others() -> None:
    placed, plain = _pair()
    for sign in (1.0, -1.0, 1.0):
        placed.zero_grad()
        plain.zero_grad()
        _assert_equal(placed, plain, _input(8), None, _loss_of(sign))
        reduced = functools.partial(_flat, reduction="mean" if sign > 0 else "sum")
        placed.zero_grad()
        plain.zero_grad()
        _assert_equal(placed, plain, _input(8), labels(8, 0), reduced)


ELEMENTS: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "l1, sum": functools.partial(F.l1_loss, reduction="sum"),
    "Huber": nn.HuberLoss(delta=0.3),
    "smooth l1, sum": nn.SmoothL1Loss(reduction="sum"),
    "logits": nn.BCEWithLogitsLoss(),
    "logits, weights": nn.BCEWithLogitsLoss(pos_weight=WEIGHTS),
    "kl": nn.KLDivLoss(reduction="batchmean"),
    "Poisson": functools.partial(F.poisson_nll_loss, full=True),
    "multilabel": F.multilabel_soft_margin_loss,
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_torchs_losses_of_elements_are_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "weights" not in name:
        monkeypatch.setattr("placer.executor.loss.finder.try_rows", None)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, CLASSES)).double(), torch.randn(5, 3, dtype=D)
    placed = placer.compile(model, {"devices": ["cpu:0"], "replicas": 2, "microbatches": 2}, x)
    _assert_equal(placed, model, x, torch.rand(5, CLASSES, dtype=D), ELEMENTS[name])


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_target_that_torch_broadcasts_is_refused() -> None:
    """A mean over all pairs of rows."""
    x = torch.randn(6, 3)
    placed = placer.compile(nn.Linear(3, 1), {"devices": ["cpu:0"], "microbatches": 2}, x)
    with pytest.raises(PlacerError, match="is neither a mean nor a sum"):
        placed.step(x, target=torch.randn(6), loss_fn=F.mse_loss)


class Counting(nn.Module):
    """A loss with state: a buffer, a counter and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.seen: list[int] = []
        self.number = 0

    def forward(self, output: Tensor) -> Tensor:
        assert isinstance(self.calls, Tensor)
        self.calls += 1
        self.number += 1
        self.seen.append(len(output))
        torch.rand(3)
        return output.square().mean()


COUNTING, CALLS = Counting(), 0


def counting(output: Tensor) -> Tensor:
    """Reads and sets global variables."""
    global CALLS
    CALLS += 1
    np.random.rand()
    return COUNTING(output)


@pytest.mark.parametrize("way", ["itself", "in a closure", "in a variable"])
def test_trying_a_loss_leaves_no_trace(way: str) -> None:
    placed, _ = _pair()
    global COUNTING, CALLS
    CALLS = 0
    loss_fn = COUNTING = Counting()
    ways = {
        "itself": loss_fn,
        "in a closure": lambda output: loss_fn(output),
        "in a variable": counting,
    }
    torch.manual_seed(3), np.random.seed(3)
    placed.step(_input(8), loss_fn=ways[way])
    assert (int(loss_fn.calls), loss_fn.number, loss_fn.seen) == (4, 4, [2] * 4)
    assert (4 if way == "in a variable" else 0) == CALLS
    drawn = torch.get_rng_state(), np.random.rand()
    torch.manual_seed(3), np.random.seed(3)
    for _ in range(4):
        torch.rand(3)
    assert torch.equal(drawn[0], torch.get_rng_state())
    assert drawn[1] == np.random.rand(CALLS + 1)[-1]


class Flat(Tokens):
    """Tokens of all rows one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(0, 1)


def test_an_output_with_several_entries_for_every_row() -> None:
    torch.manual_seed(0)
    model, x = Flat().double(), _input(5)
    placed = placer.compile(model, {"devices": ["cpu:0"], "microbatches": 4}, x)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target.flatten())

    _assert_equal(placed, model, x, labels(5, 0), loss_fn)
    with pytest.raises(PlacerError, match="neither a mean nor a sum"):
        placed.step(x, target=labels(5), loss_fn=loss_fn)


@pytest.mark.parametrize("microbatches", [2, 4])
def test_losses_of_16_bit_outputs(microbatches: int) -> None:
    """They are tried in float32: 16 bits would not show what is to be seen."""
    torch.manual_seed(0)
    model, x = Tokens().bfloat16(), _input(4).bfloat16()
    placed = placer.compile(model, {"devices": ["cpu:0"], "microbatches": microbatches}, x)
    placed.step(x, target=labels(4, 0), loss_fn=_flat)
    with pytest.raises(PlacerError, match="neither a mean nor a sum"):
        placed.step(x, target=labels(4), loss_fn=_flat)


@pytest.mark.parametrize("rows", [7, 16, 48])
def test_a_target_with_other_rows_is_refused(rows: int) -> None:
    placed, _ = _pair()
    with pytest.raises(PlacerError, match=rf"target.*: has {rows} rows, the batch has 8") as error:
        placed.step(_input(8), target={"y": torch.zeros(rows)}, loss_fn=F.mse_loss)
    assert "'y'" in str(error.value) and "placer.Whole" in str(error.value)
    assert ("unflatten(0, (8, 6))" in str(error.value)) == (rows == 48)


def test_part_of_a_target_is_given_whole_to_every_cut() -> None:
    placed, plain = _pair(2, 3)
    scale = torch.arange(8.0, dtype=D)  # as many as rows, by chance

    def loss_fn(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        labels, scale = target
        assert len(scale) == 8
        return (output.mean(-1) - labels).square().mean() * scale.mean()

    labels = torch.randn(8, LENGTH, dtype=D)
    loss = placed.step(_input(8), target=(labels, placer.Whole(scale)), loss_fn=loss_fn)
    expected = loss_fn(plain(_input(8)), (labels, scale))
    expected.backward()
    assert_close(loss, expected.detach(), "loss")
    assert_close(placed.head.weight.grad, plain.head.weight.grad, "gradient")  # type: ignore[union-attr]


def _of_target(output: Tensor, target: Any) -> Tensor:
    return (output - target[0]).square().mean() + (output * target[1]).mean()


@pytest.mark.parametrize("cut", [(1, 1), (2, 2), (1, 3)])
def test_what_the_caller_computed_with_gradients(cut: tuple[int, int]) -> None:
    """Every slice runs its own backward, but the caller's graph can be run through only once."""
    found = []
    for module in _pair(*cut):
        torch.manual_seed(0)
        before, of_target, whole = (
            nn.Linear(3, 3).double(),
            nn.Linear(3, CLASSES).double(),
            torch.ones(4),
        )
        whole = whole.double().requires_grad_()
        x = torch.tanh(before(_input(8)))
        target = torch.tanh(of_target(_input(8))), whole.exp()
        if isinstance(module, PlacedModule):
            target = target[0], placer.Whole(target[1])
            module.step(x, target=target, loss_fn=_of_target)
        else:
            _of_target(module(x), target).backward()
        read = [*before.parameters(), *of_target.parameters(), whole, *module.parameters()]
        found.append([tensor.grad for tensor in read])
    for index, (a, b) in enumerate(zip(*found, strict=True)):
        assert_close(a, b, str(index))


def test_a_graph_that_slices_share_is_an_error_with_a_remedy() -> None:
    placed, _ = _pair()
    scale = torch.ones(CLASSES, dtype=D, requires_grad=True).exp()
    with pytest.raises(PlacerError, match=r"computed before the step(.|\n)*placer.Whole"):
        placed.step(_input(8), loss_fn=lambda output: (output * scale).mean(), reduction="mean")


def test_a_target_in_a_numpy_array_is_told_to_be_a_tensor() -> None:
    placed, _ = _pair()
    with pytest.raises(PlacerError, match=r"target\['y'\]: is a numpy array(.|\n)*from_numpy"):
        placed.step(_input(8), target={"y": labels(8).numpy()}, loss_fn=F.cross_entropy)


def test_a_scaled_loss_that_16_bits_cannot_hold() -> None:
    model = copy.deepcopy(_pair()[1]).float()
    spec = {"devices": ["cpu:0", "cpu:1"], "precision": "fp16", "microbatches": 2}
    placed = placer.compile(model, spec, _input(8).float())
    loss = placed.step(
        _input(8).float(),
        loss_fn=lambda output: (output - 2.0).square().mean(),
        scaler=placed.grad_scaler(init_scale=65536.0),
    )
    assert loss.dtype == torch.float16 and 1.0 < loss.item() < 10.0


class OwnLoss(Tokens):
    """It computes its loss itself, as language models of transformers do."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return {"loss": _flat(logits, labels), "logits": logits}


def test_a_loss_that_the_model_computes() -> None:
    torch.manual_seed(0)
    model, x, given = OwnLoss().double(), _input(8), labels(8)
    placed = placer.compile(model, {"devices": ["cpu:0"], "microbatches": 3}, (x, given))

    def loss_fn(output: dict[str, Tensor], *_: Any) -> Tensor:
        return output["loss"]

    with pytest.raises(PlacerError, match="a loss that the model computed") as error:
        placed.step(x, given, loss_fn=loss_fn)
    assert "normalizer=" in str(error.value)
    loss = placed.step(x, given, target=given, loss_fn=loss_fn, normalizer=kept)
    expected = model(x, given)["loss"]
    expected.backward()
    assert_close(loss, expected.detach(), "loss")
    assert_close(placed.head.weight.grad, model.head.weight.grad, "gradient")  # type: ignore[union-attr]
    placed.step(x, given, loss_fn=lambda output: output["logits"].square().sum(), reduction="sum")


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"reduction": "none"}, "use 'auto', 'mean' or 'sum'"),
    "both": ({"reduction": "sum", "normalizer": kept}, "leave one of them out"),
    "raises": ({"normalizer": lambda t: t["x"]}, "normalizer: raised"),
    "no count": ({"normalizer": lambda t: -1.0}, "normalizer: counts -1.0"),
    "a share": ({"normalizer": lambda t: (t != 0).double().mean()}, "normalizer: counts .* together"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_wrong_options_are_said(name: str) -> None:
    placed, _ = _pair()
    options, said = OPTIONS[name]
    with pytest.raises(PlacerError, match=said):
        placed.step(_input(8), target=labels(8, 0), loss_fn=_flat, **options)


def _clip_target(rows: int) -> dict[str, Any]:
    weights = torch.arange(1.0, rows + 1, dtype=D)
    return {"weights": weights, "smoothing": placer.Whole(torch.tensor([0.1]))}


@pytest.mark.matrix(2)
@pytest.mark.parametrize("rows", [8, 5, 1])
@pytest.mark.parametrize(("replicas", "microbatches"), [(1, 4), (2, 1), (2, 3), (3, 2)])
def test_a_loss_over_the_whole_batch(replicas: int, microbatches: int, rows: int) -> None:
    """A contrastive loss over two results and a parameter, with BatchNorm that sees the slices."""
    model, fields, *inputs = loss_cases.two_towers(devices=["cpu:0", "cpu:1"])
    spec = placer.PlacementSpec(replicas=replicas, microbatches=microbatches, **fields)
    placed, plain = placer.compile(model, spec, inputs), copy.deepcopy(model)
    ours = [x[:rows].clone().requires_grad_() for x in inputs]
    theirs = [x[:rows].clone().requires_grad_() for x in inputs]
    target = _clip_target(rows)
    sizes = loss_cases.slices_of(rows, replicas, microbatches)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    expected = loss_cases.clip_in_slices(plain, *theirs, unmarked(target), sizes)
    loss = placed.step(
        *ours, target=target, loss_fn=loss_cases.clip_loss, whole_batch=True, scaler=scaler
    )
    assert_close(loss, expected, "loss")
    for mine, wanted in zip(ours, theirs, strict=True):
        assert_close(mine.grad, 4 * wanted.grad, "input")
    for name, parameter in placed.named_parameters():
        assert parameter.grad is not None
        wanted = plain.get_parameter(name).grad
        assert_close(parameter.grad / 4, wanted, name, floor=gradient_noise(plain))


def test_a_target_of_a_loss_over_the_whole_batch_needs_no_rows() -> None:
    pairs = torch.ones(3, 2, dtype=torch.int64)

    def loss_fn(output: Tensor, target: dict[str, Any]) -> Tensor:
        first, second = output[target["pairs"]].unbind(1)
        return (first - second).square().mean() * target["weight"] + output.std(0).mean()

    target = {"pairs": pairs.cumsum(0), "weight": 2.0}
    _assert_equal(*_pair(2, 3), _input(8), target, loss_fn, whole_batch=True)


def test_hooks_and_stored_values_of_a_loss_over_the_whole_batch() -> None:
    """The loss reads what forward stored for all rows; a hook sees the whole batch's call and result."""

    class Storing(Tokens):
        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            self.latest = found.square()
            return found

    torch.manual_seed(0)
    model = Storing().double()
    spec = placer.PlacementSpec(devices=["cpu:0", "cpu:1"], replicas=2, microbatches=2)
    placed, plain = placer.compile(model, spec, _input(8)), copy.deepcopy(model)
    for module in (placed, plain):
        seen: list[int] = []

        def double(module: nn.Module, args: Any, output: Tensor, seen: list[int] = seen) -> Tensor:
            seen.append(len(args[0]) + len(output))
            return 2 * output

        module.register_forward_hook(double)

        def loss_fn(output: Tensor, module: nn.Module = module) -> Tensor:
            return output.max() + module.latest.var(0).sum()

        if module is placed:
            loss = placed.step(_input(8), loss_fn=loss_fn, whole_batch=True)
        else:
            expected = loss_fn(plain(_input(8)))
            expected.backward()
        assert seen == [16]
    assert_close(loss, expected.detach(), "loss")
    assert_close(placed.latest, plain.latest.detach(), "stored")
    for name, parameter in placed.named_parameters():
        assert_close(parameter.grad, plain.get_parameter(name).grad, name)


def test_what_a_loss_over_the_whole_batch_cannot_have() -> None:
    placed, _ = _pair(1, 2, "1F1B")
    with pytest.raises(PlacerError, match=r"1F1B begins with backwards(.|\n)*GPipe"):
        placed.step(_input(8), loss_fn=lambda output: output.max(), whole_batch=True)
    with pytest.raises(PlacerError, match="there is one loss"):
        placed.step(_input(8), loss_fn=F.mse_loss, normalizer=kept, whole_batch=True)


def test_a_failing_loss_says_what_it_was_called_with() -> None:
    model, x = nn.Linear(4, 2), torch.randn(8, 4)
    placed = placer.compile(model, {"devices": ["cpu:0"], "microbatches": 2}, x)
    with pytest.raises(KeyError, match="labels") as raised:
        placed.step(x, target={"label": torch.randn(8, 2)}, loss_fn=lambda y, t: y - t["labels"])
    (note,) = raised.value.__notes__
    assert note.endswith("for a slice of the batch: a result of 4x2 and a target of 4x2")
