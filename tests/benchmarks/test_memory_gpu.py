"""The GPU benchmark as far as a machine without a GPU can run it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import memory_gpu


def test_the_instrument_agrees_on_the_cpu() -> None:
    case = memory_gpu.Case(
        build=lambda: (nn.Sequential(nn.Linear(64, 512), nn.Tanh()), torch.empty(256, 64)),
        fields={"optimizer": "sgd_momentum"},
    )
    row = memory_gpu.measure(case, "all", "cpu")
    assert row["tensors"] == pytest.approx(row["measured"]["tensors"], rel=0.02)
    assert row["estimated"] == pytest.approx(row["tensors"], rel=0.01)


def test_a_half_beside_the_cpu_is_simulated_as_the_gpu_keeps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(
        *(nn.Linear(64, 64), nn.Dropout(), nn.Tanh(), nn.Linear(64, 64), nn.Dropout())
    )
    case = memory_gpu.Case(build=lambda: (model, torch.empty(4096, 64)), fields={})
    monkeypatch.setattr(memory_gpu, "measured_bytes", lambda *_: {})
    whole, *halves = (
        memory_gpu.measure(case, part, "cuda", "default") for part in memory_gpu.PARTS
    )
    for row in (whole, *halves):
        assert row["estimated"] == pytest.approx(row["tensors"], rel=0.01)
        assert row["reserved"] >= row["tensors"] and row["context"] == 520 * 2**20
    assert all(half["tensors"] < whole["tensors"] for half in halves)
