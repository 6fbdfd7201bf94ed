"""What is measured on a GPU, and compared with a CPU: `make gpu` runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import placer
from placer.machine.kindfile import find_kind
from placer.profiling.calibration import _Timer
from placer.profiling.clocks import CudaClock, time_call

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device here; `make gpu` where there is one"
)


def _convolutions() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(8, 64)) for _ in range(6)]
    return nn.Sequential(nn.Conv2d(3, 64, 3), *layers, nn.Conv2d(64, 8, 1))


def test_fp32_is_equal_without_tf32() -> None:
    assert placer.verify(_convolutions(), {"devices": ["cuda:0"]}, torch.randn(2, 3, 32, 32)).ok


def test_dropout_is_named() -> None:
    model = nn.Sequential(_convolutions(), nn.Dropout(0.5))
    found = placer.verify(model, {"devices": ["cuda:0"]}, torch.randn(2, 3, 32, 32))
    assert found.ok and "train: the example" in found.remarks[0]
    assert found.random_layers == ("1",)


def test_a_small_kernel_is_not_its_launch() -> None:
    x = torch.zeros(16, device="cuda:0")
    clock = CudaClock(torch.device("cuda:0"))
    alone, launched = min(_Timer(clock, 0.02)(lambda: x * 2.0)), time_call(clock, lambda: x * 2.0)
    assert 0 < alone < 6e-6
    assert alone < launched.device


def test_a_report_has_the_seconds_and_bytes_of_a_step() -> None:
    model, x = _convolutions(), torch.randn(8, 3, 64, 64)
    spec = {"devices": ["cuda:0", "cuda:1"], "microbatches": 2}
    placed = placer.compile(model, spec, x, run_on="cuda:0")
    target = torch.zeros(8, 8, 62, 62)
    for _ in range(2):
        placed.step(x, target=target, loss_fn=nn.functional.mse_loss, profile=True)
    report = placed.report()
    busy = sum(s.seconds.forward + s.seconds.backward for s in report.stages)
    assert 0 < busy <= report.step_seconds
    assert all(s.peak is not None and 0 < s.peak <= (s.reserved or 0) for s in report.stages)


def test_a_profile_adds_up_and_has_memory(tmp_path: Path) -> None:
    path, model, x = tmp_path / "net.json", _convolutions(), torch.randn(2, 3, 32, 32)
    found = placer.profile(model, x, device="cuda:0", output=path)
    plan = placer.make_plan(model, {"devices": [{"name": "cuda:0", "kind": str(path)}]}, (x,))
    assert plan.step_seconds == pytest.approx(found.times.step, rel=0.15)
    profile = find_kind(str(path)).profile
    assert profile is not None
    assert profile.memory is not None
    small = 4 * 2**20  # free room in segments that were reserved before
    assert profile.memory.allocated <= profile.memory.reserved + small
    assert found.memory is not None
    predicted = found.memory.predicted
    assert profile.memory.allocated == pytest.approx(
        predicted.peak + predicted.workspaces, rel=0.25
    )
