"""The largest size that plans allow is found without a GPU; only training needs one, which is faked here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda
from torch import nn

from benchmarks import fits_gpu
from benchmarks.fits_gpu import FitCase
from benchmarks.gpu_cases import GPUCase

MIB, GIB = 2**20, 2**30


def _network() -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*layers), torch.empty(8, 16, 128, 128)


CASE = FitCase(subject=GPUCase(family="", build=_network, fields={"context": 0}))
TIGHT = FitCase(
    subject=GPUCase(family="", build=_network, fields={"context": 0, "checkpoint": "auto"}),
    gib=0.07,
)


@pytest.mark.parametrize("allocator", fits_gpu.ALLOCATORS)
@pytest.mark.parametrize("free", [False, True])
def test_plans_change_their_verdict_at_the_edge(allocator: str, free: bool) -> None:
    (good, enough), (bad, too_little) = (
        fits_gpu.plan_at(CASE, side, allocator, kind="h100", free=free)
        for side in ("fits", "refused")
    )
    assert (good.fits, bad.fits) == (True, False)
    assert too_little < enough <= too_little / 0.985
    assert (good.devices[0].reserve > 0) == free
    kept = 4 * 8 * 16 * 128 * 128 * 4  # what the convolutions save
    assert kept < enough < 4 * kept


def _train(case: FitCase, side: str, **options: Any) -> dict[str, Any]:
    return fits_gpu.train(
        case, side, "expandable", context=MIB, kind="h100", run_on="cpu", **options
    )


@pytest.mark.matrix(0)
def test_steps_run_under_the_budget_without_the_measured_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = FakeCuda(total=GIB, context=3 * MIB, step=lambda gpu, call: gpu.take(MIB, call * MIB))
    gpu.patch(monkeypatch)
    row = _train(CASE, "fits")
    assert row["fits"] and row["trained"] and row["seconds"] > 0
    assert row["given"] == row["budget"]
    assert gpu.limit == pytest.approx((row["budget"] - MIB) / GIB)
    assert row["reserved"] == 6 * MIB  # twice a step
    assert row["context"] == 3 * MIB
    assert row["predicted"]["starved"] == 0 and row["predicted"]["reserved"] <= row["budget"]
    refused = _train(CASE, "refused")  # it runs although its plan does not fit
    assert not refused["fits"] and refused["trained"]
    assert refused["given"] == int(0.96 * refused["budget"])
    assert gpu.limit == pytest.approx((refused["given"] - MIB) / GIB)


def test_what_recomputes_is_planned_for_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(total=GIB, context=0).patch(monkeypatch)
    row = _train(TIGHT, "given")
    assert row["budget"] == int(0.07 * GIB)
    assert row["regions"] > 0


def test_out_of_memory_is_an_answer_and_other_errors_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = FakeCuda(total=GIB, context=0)
    error: Exception = torch.OutOfMemoryError("CUDA out of memory. Tried …\nmore")

    def step(gpu: FakeCuda, call: int) -> None:
        gpu.take(0, call * MIB)
        if call == 4:
            raise error

    gpu.step = step
    gpu.patch(monkeypatch)
    with monkeypatch.context() as quiet:
        quiet.setattr(fits_gpu, "process_context", lambda: 5)
        row = _train(CASE, "fits")
    assert not row["trained"] and row["seconds"] is None
    assert row["why"] == "CUDA out of memory. Tried …"
    assert row["reserved"] == 4 * MIB
    gpu.synchronized, error = 0, RuntimeError("cuDNN error")
    with pytest.raises(RuntimeError, match="cuDNN error"):
        _train(CASE, "fits")
