"""The GPU benchmark as far as a machine without a GPU can run it."""

from __future__ import annotations

import pytest
import torch
from fake_cuda import FakeCuda
from torch import nn

import placer
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


def test_measured_bytes_are_the_most_of_three_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(gpu: FakeCuda, call: int) -> None:
        if call == 2:  # in the first step; flushed in the second
            gpu.take(500, 900)
            gpu.take(100, 300)
        if call == 4:
            gpu.take(600, 700)
            gpu.take(100, 700)

    gpu = FakeCuda(total=10_000, context=50, step=step)
    gpu.patch(monkeypatch)
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    plan = placer.make_plan(model, {"devices": ["cuda:0"]}, (x,))
    found = memory_gpu.measured_bytes(model, plan, x, run_on="cpu")
    assert found == {"allocated": 600, "reserved": 900, "context": 50}


def test_whole_models_run_in_both_modes_of_the_allocator() -> None:
    name = "SwinUNETR 96^3"
    found = [*memory_gpu.jobs([name], memory_gpu.CASES, "cuda")]
    assert [(job.values["part"], job.allocator) for job in found] == [
        ("all", "default"),
        ("all", "expandable"),
        ("first half", "expandable"),
        ("second half", "expandable"),
    ]
    assert len({job.key for job in found}) == len(found)
