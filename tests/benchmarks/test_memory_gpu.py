"""The GPU benchmark as far as a machine without a GPU can run it."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from benchmarks import memory_gpu


def test_the_instrument_agrees_on_the_cpu() -> None:
    case = memory_gpu.Case(
        build=lambda: (nn.Sequential(nn.Linear(64, 512), nn.Tanh()), torch.empty(256, 64)),
        fields={"optimizer": "sgd_momentum"},
    )
    (row,) = memory_gpu.measure(case, "cpu")
    assert row["simulated"] == pytest.approx(row["measured"], rel=0.02)
    assert row["predicted"] == pytest.approx(row["simulated"], rel=0.01)


def test_a_half_beside_the_cpu_is_simulated_as_the_gpu_keeps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(
        *(nn.Linear(64, 64), nn.Dropout(), nn.Tanh(), nn.Linear(64, 64), nn.Dropout())
    )
    case = memory_gpu.Case(build=lambda: (model, torch.empty(4096, 64)), fields={})
    monkeypatch.setattr(memory_gpu, "_cuda_peak", lambda *_: {"measured": 0})
    whole, *halves = memory_gpu.measure(case, "cuda")
    assert len(halves) == 2
    for row in (whole, *halves):
        assert row["predicted"] == pytest.approx(row["simulated"], rel=0.01)
    assert all(half["simulated"] < whole["simulated"] for half in halves)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["memory_gpu"])
    with pytest.raises(SystemExit, match="needs a CUDA device, and this machine has none"):
        memory_gpu.main()
