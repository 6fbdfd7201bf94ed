"""What ``placer.verify`` compares, and its errors if the plain model itself cannot run."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import placer

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


@pytest.mark.parametrize("spec", [{"devices": ["cpu:0", "cpu:1"]}, HALVES])
def test_tensors_of_an_object_are_outputs(spec: dict[str, object]) -> None:
    result = placer.verify(ReturnsObject(), spec, X)
    assert result.ok
    assert sum(c.kind == "output" for c in result.comparisons) == 2
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


@pytest.mark.parametrize("spec", [{"devices": ["cpu:0"]}, HALVES])
def test_random_numbers_of_python_and_numpy_are_the_same_for_both(spec: dict[str, object]) -> None:
    for seed in range(3):
        assert placer.verify(DropsLayers(), spec, X, seed=seed).ok


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
    with pytest.raises(placer.PlacerError, match=r"fails on slice 1 of 2 .*out of bounds") as error:
        placer.verify(Pairs(), HALVES, inputs)
    assert "1 micro-batch" in str(error.value)


@pytest.mark.parametrize("spec", [{"devices": ["cpu:0", "cpu:1"]}, HALVES])
def test_both_run_under_the_same_autocast(spec: dict[str, object]) -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 4))
    result = placer.verify(model, {**spec, "precision": "bf16"}, X, tolerance=1e-4)
    assert result.ok, result
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
