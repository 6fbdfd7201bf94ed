"""What ``placer.verify`` compares, and its errors if the plain model itself cannot run."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import placer
from placer.verification import Seen, observation, situations, verdict

X = torch.randn(8, 4)
HALVES = {"devices": ["cpu:0", "cpu:1"], "microbatches": 2}


@dataclass
class Output:
    logits: Tensor
    score: Tensor


class ReturnsObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Output:
        hidden = self.first(x).tanh()
        return Output(self.last(hidden), hidden.mean())


def test_tensors_of_an_object_are_outputs() -> None:
    result = placer.verify(ReturnsObject(), HALVES, X)
    assert result.ok
    found = {c.name for c in result.comparisons if c.kind == "output"}
    assert {"logits", "score"} <= found
    assert all(c.relative_error < 1 for c in result.comparisons if c.kind == "gradient")


class DropsLayers(nn.Module):
    """Stochastic depth with random numbers from Python and numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() < 0.5 and np.random.rand() < 0.8:
                x = x + layer(x)
        return x


def test_random_numbers_of_python_and_numpy_are_the_same_for_both() -> None:
    for seed in range(2):
        assert placer.verify(DropsLayers(), HALVES, X, seed=seed).ok


def test_the_callers_random_numbers_are_left_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout())

    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), np.random.rand()

    def seed() -> None:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)

    seed()
    wanted = draw()
    seed()
    placer.verify(model, {"devices": ["cpu:0"]}, X)
    assert draw() == wanted


class Pairs(nn.Module):
    """Its rows read each other, so it cannot run on a slice of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, partner: Tensor) -> Tensor:
        return self.layer(x + x[partner])


def test_a_plain_model_that_cannot_run_on_a_slice_is_said() -> None:
    inputs = X, torch.arange(8).flip(0)
    assert placer.verify(Pairs(), {"devices": ["cpu:0", "cpu:1"]}, inputs).ok
    said = {"x": {"batch_dim": 0}, "partner": {"batch_dim": 0}}
    with pytest.raises(placer.PlacerError, match=r"fails on slice 1 of 2 .*out of bounds") as error:
        placer.verify(Pairs(), {**HALVES, "inputs": said}, inputs)
    assert "1 micro-batch" in str(error.value)


def test_both_run_under_the_same_autocast() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 4))
    result = placer.verify(model, {**HALVES, "precision": "bf16"}, X)
    assert result.ok, result
    # Gradients of slices are rounded to bf16 before they are summed, outputs are not.
    first = result.outcomes[0].comparisons
    assert all(c.relative_error < 1e-4 for c in first if c.kind == "output")
    # In full precision the plain model would be further off than that.
    plain, cast = model(X), placer.compile(model, {"devices": ["cpu"], "precision": "bf16"}, X)(X)
    assert (plain - cast.float()).abs().max() > 1e-4 * plain.abs().max()


class Transforms(nn.Module):
    """It has a Fourier transform, which torch does not have in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(self.layer(x)).abs()


def test_a_precision_that_the_model_cannot_do_is_said() -> None:
    spec = {"devices": ["cuda:0"], "precision": "bf16"}  # a CPU's autocast transforms in fp32
    with pytest.raises(placer.PlacerError, match=r"(?s)BFloat16.*run with precision 'bf16'"):
        placer.verify(Transforms(), spec, X, run_on="cpu")


def _switches() -> dict[str, object]:
    """What every switch for the precision of fp32 says."""
    backends, found = torch.backends, {}
    for name, switch in {
        "all": backends, "cuDNN": backends.cudnn, "convolutions": backends.cudnn.conv,
        "RNNs": backends.cudnn.rnn, "products": backends.cuda.matmul, "oneDNN": backends.mkldnn.matmul,
    }.items():  # fmt: skip
        found[name] = switch.fp32_precision
    for name, read in {
        "cuDNN's older": lambda: backends.cudnn.allow_tf32,
        "older": torch.get_float32_matmul_precision,
    }.items():
        try:
            found[name] = read()
        except RuntimeError:
            found[name] = "refused"
    return found


def _followed() -> dict[str, object]:
    """The switches after the one for everything is set: those that are "none" follow it."""
    before, torch.backends.fp32_precision = torch.backends.fp32_precision, "ieee"
    found, torch.backends.fp32_precision = _switches(), before
    return found


SETTINGS = {
    "torch's own": lambda: None,
    "older": lambda: torch.set_float32_matmul_precision("high"),
    "bf16 on a CPU": lambda: torch.set_float32_matmul_precision("medium"),
    "cuDNN's older": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "newer": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    "products": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "inherited": lambda: (
        setattr(torch.backends.cudnn.rnn, "fp32_precision", "none"),
        setattr(torch.backends, "fp32_precision", "tf32"),
    ),
}


def _set_defaults() -> None:
    torch.backends.fp32_precision = torch.backends.cudnn.fp32_precision = "none"
    with warnings.catch_warnings(action="ignore"):
        torch.backends.cudnn.allow_tf32 = True
        torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.mkldnn.matmul.fp32_precision = "none"


@pytest.fixture
def default_switches() -> Iterator[None]:
    """Also before the test, because what was never set cannot be put back: it would follow the others."""
    _set_defaults()
    yield
    _set_defaults()


@pytest.mark.matrix(1)
@pytest.mark.usefixtures("default_switches")
@pytest.mark.parametrize("setting", SETTINGS)
def test_fp32_is_fp32_while_it_is_compared(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, torch computes convolutions in TF32 on CUDA, which is off by more than the tolerance."""
    SETTINGS[setting]()
    before, follows, during = _switches(), _followed(), []
    for name in ("run_plain", "run_placed"):
        run = getattr(verdict, name)
        monkeypatch.setattr(
            verdict, name, lambda *a, run=run, **k: (during.append(_switches()), run(*a, **k))[1]
        )
    assert placer.verify(nn.Linear(4, 4), {"devices": ["cpu"]}, X).ok
    assert len(during) == 2 * len(situations.SITUATIONS)
    for seen in during:
        assert [seen[name] for name in ("convolutions", "RNNs", "products", "oneDNN")] == [
            "ieee"
        ] * 4
        assert (seen["cuDNN's older"], seen["older"]) == (False, "highest")
    assert _switches() == before
    assert _followed() == follows


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 64), nn.Linear(64, 4)
        self.drop, self.off = nn.Dropout(0.3), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.off(self.drop(self.first(x))))


def test_what_draws_other_numbers_on_a_gpu_is_not_compared_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verdict, "draws_alike", lambda plain, placed: False)
    result = placer.verify(Noisy(), HALVES, X)
    assert result.ok
    assert [bool(outcome.comparisons) for outcome in result.outcomes] == [False] * 5 + [True] * 2
    assert result.random_layers == ("drop",)
    (remark,) = result.remarks
    assert "not compared: drop drew random numbers" in remark and "--run-on cpu" in remark
    still = placer.verify(nn.Linear(4, 4), HALVES, X)
    assert still.ok and still.random_layers == still.remarks == ()


def test_on_one_device_random_numbers_are_no_excuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observation, "relative_error", lambda *_: 1.0)
    result = placer.verify(Noisy(), {"devices": ["cpu:0", "cpu:1"]}, X)
    assert not result.ok
    assert result.remarks == ()


class BiasBeforeANorm(nn.Module):
    """The gradient of ``conv.bias`` is zero but for rounding, which depends on the order of sums."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4)
        self.a, self.b, self.d = (nn.Conv3d(4, 4, 3, padding=1) for _ in range(3))
        self.c = nn.Conv3d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        a, b = self.a(y), self.b(y)
        result: Tensor = self.c(torch.cat([a * y, b], 1)) + self.d(y)
        return result


@pytest.mark.matrix(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_that_is_zero_but_for_rounding_may_differ(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    spec = {
        "devices": ["cpu:0", "cpu:1"],
        "layers": {"*": "cpu:0", "d": "cpu:1"},
    }
    found = placer.verify(
        BiasBeforeANorm().to(dtype), spec, torch.randn(2, 1, 8, 8, 8, dtype=dtype)
    )
    assert found.ok, found


def test_a_small_gradient_that_is_wrong_differs() -> None:
    """It is a thousandth of the largest."""
    small, large = Seen("gradient", "0.weight"), Seen("gradient", "1.weight")
    gradients = {small: torch.full((4,), 1e-3), large: torch.ones(4)}
    wrong = {**gradients, small: torch.full((4,), 1.01e-3)}
    found = {c.name: c.ok for c in observation.compare(wrong, gradients, 1e-4)}
    assert found == {"0.weight": False, "1.weight": True}


@pytest.mark.parametrize(
    ("found", "expected", "equal"),
    [
        (
            torch.tensor([1.0, torch.nan, torch.inf]),
            torch.tensor([1.0, torch.nan, torch.inf]),
            True,
        ),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]), False),
        (torch.ones(2), torch.ones(2, requires_grad=True), False),
        (torch.ones(2, device="meta"), torch.ones(2), False),
        (1, True, False),
        (0.1 + 0.2, 0.3, True),
        ("train", "eval", False),
        (None, torch.ones(2), False),
    ],
)
def test_what_is_equal(found: Any, expected: Any, equal: bool) -> None:
    (comparison,) = observation.compare(
        {Seen("output", "y"): found}, {Seen("output", "y"): expected}, 1e-10
    )
    assert comparison.ok is equal, comparison
    assert equal or comparison.detail


def test_what_only_one_model_has_differs() -> None:
    one, none = {Seen("attribute", "enc.loss"): torch.ones(2, 3)}, dict[Seen, Any]()
    (missing,) = observation.compare(none, one, 1e-10)
    assert (
        str(missing)
        == "attribute of enc.loss: is missing; the plain model has a tensor 2x3:float32"
    )
    (more,) = observation.compare(one, none, 1e-10)
    assert str(more).endswith("is a tensor 2x3:float32, which the plain model does not have")


class Loads(nn.Module):
    """Its rows are as many as it was made for, and it has no other mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            raise ValueError("it has no eval mode")
        return self.layer(x.reshape(8, 4))


def test_what_cannot_be_compared_is_said() -> None:
    result = placer.verify(Loads(), {"devices": ["cpu:0"]}, X)
    assert result.ok
    size, modes = result.remarks
    assert size.startswith(
        "train: another batch size: not compared: the plain model fails on the batch: "
    )
    assert modes.startswith("eval: other values; eval, no_grad: other values: not compared: ")
    assert "it has no eval mode" in modes
    assert " in 4 of 7 situations" in result.summary


def test_a_plain_model_that_fails_is_told_with_the_line() -> None:
    model, ids = nn.Sequential(nn.Embedding(4, 4)), torch.tensor([[1, 9]])
    with pytest.raises(placer.PlacerError, match=r"check the inputs: .* values"):
        placer.verify(model, {"devices": ["cpu:0"]}, ids)

    class Fails(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return nn.functional.embedding(ids, torch.ones(4, 4))

    with pytest.raises(placer.PlacerError, match=r"out of range.*test_verification\.py:\d+"):
        placer.verify(Fails(), {"devices": ["cpu:0"]}, ids)


def test_the_model_and_what_its_hooks_hold_are_left_as_they_were() -> None:
    seen: list[Tensor] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].register_forward_hook(lambda *call: seen.append(call[2]))
    model.register_buffer("calls", torch.zeros(()))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = placer.verify(model, {"devices": ["cpu:0", "cpu:1"]}, X)
    assert result.ok, result
    assert {"calls", "hook"} <= {c.kind for c in result.comparisons}
    assert seen == [] and model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize(
    "target", [placer.Whole(torch.ones(4)), placer.Batched(torch.ones(4, 8), 1)]
)
def test_a_target_is_split_in_a_step_as_its_mark_says(target: object) -> None:
    def loss(output: Tensor, part: Tensor) -> Tensor:
        weights = part if part.dim() == 1 else part.t()
        return (output * weights).square().mean()

    x = torch.randn(8, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    result = placer.verify(model, HALVES, x, loss_fn=loss, target=target)
    (step,) = (each for each in result.outcomes if "step" in each.situation)
    assert step.comparisons and step.ok, step.note


def over_rows(result: Output) -> Tensor:
    """A loss that is neither a mean nor a sum over rows."""
    return (result.logits @ result.logits.T).logsumexp(0).mean()


def test_a_loss_over_the_whole_batch_is_called_so_in_a_step() -> None:
    spec = {**HALVES, "loss": {"function": f"{__file__}:over_rows", "whole_batch": True}}
    result = placer.verify(ReturnsRows(), spec, X)
    (step,) = [outcome for outcome in result.outcomes if "step" in outcome.situation]
    assert result.ok and step.comparisons


class ReturnsRows(ReturnsObject):
    def forward(self, x: Tensor) -> Output:
        hidden = self.first(x).tanh()
        return Output(self.last(hidden), hidden)


class DeeplySupervised(nn.Module):
    """Returns several results in train mode, and one in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        inner = self.enc(x)
        return [self.head(inner), inner] if self.training else self.head(inner)


def test_a_loss_of_what_train_mode_returns_is_not_asked_of_eval_mode() -> None:
    def deep(results: Any) -> Tensor:
        return results[0].square().mean() + results[1].square().mean()

    result = placer.verify(DeeplySupervised(), HALVES, torch.randn(4, 4), loss_fn=deep)
    assert result.ok and all(outcome.comparisons for outcome in result.outcomes)
