"""The largest size that plans allow is found without a GPU; only training needs one."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from benchmarks import fits_gpu
from benchmarks.gpu_cases import GPUCase
from placer.program import capture_model
from placer.simulation.judge import JudgingPlanner

MIB = 2**20


def _network() -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*layers), torch.empty(8, 16, 128, 128)


def test_an_edge_is_found_by_bisection() -> None:
    asked = []

    def fits(budget: int) -> bool:
        asked.append(budget)
        return budget >= 777_777

    enough, too_little = fits_gpu.edge_of(fits, 0, 2**20)
    assert too_little < 777_777 <= enough <= too_little / 0.99
    assert len(asked) < 12


@pytest.mark.parametrize("allocator", fits_gpu.ALLOCATORS)
def test_plans_change_their_verdict_at_the_edge(allocator: str) -> None:
    case = GPUCase(family="", build=_network, fields={"context": 0})
    fits, too_little = fits_gpu.edge(case, allocator)
    assert too_little < fits <= too_little / 0.985
    model, x = _network()
    planner = JudgingPlanner(capture_model(model, (x,)), [x])
    verdicts = [planner(fits_gpu.case_spec(case, b, allocator)).fits for b in (fits, too_little)]
    assert verdicts == [True, False]
    kept = 4 * 8 * 16 * 128 * 128 * 4  # what the convolutions save
    assert kept < fits < 4 * kept


def test_the_table_marks_what_is_wrong() -> None:
    trained = {"trained": True, "seconds": 0.5, "reserved": 0}
    failed = {"trained": False, "reserved": 0}
    row = {"case": "a", "allocator": "default", "fits": 2**30, "too_little": 2**30}
    right = {**row, "at_fits": trained, "with_spare": failed}
    wrong = {**row, "at_fits": failed, "with_spare": trained}
    first, second = fits_gpu.lines_of([right, wrong])[2:4]
    assert "**" not in first
    assert "**no**" in second and "**yes**" in second
    assert "1 ran out of memory; 1 were refused" in fits_gpu.lines_of([right, wrong])[-2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fits_gpu"])
    with pytest.raises(SystemExit, match="needs a CUDA device, and this machine has none"):
        fits_gpu.main()
