"""Steps on an H100, predicted and measured (benchmarks/results/gpu_times.md has more of them)."""

from __future__ import annotations

import pytest
import torch
from unet3d import unet3d

import placer


@pytest.mark.matrix(1)
@pytest.mark.filterwarnings("ignore:Warning only once for all operators:UserWarning")  # torch 2.11
@pytest.mark.parametrize(
    ("edge", "precision", "measured"), [(96, "fp32", 26.43e-3), (128, "bf16", 51.96e-3)]
)
def test_a_step_of_a_unet_takes_what_was_measured(
    edge: int, precision: str, measured: float
) -> None:
    with torch.device("meta"):
        model, x = unet3d(width=32, depth=4), torch.empty(1, 1, edge, edge, edge)
    spec = {"devices": [{"name": "cuda:0", "kind": "h100"}], "precision": precision}
    assert placer.make_plan(model, spec, (x,)).step_seconds == pytest.approx(measured, rel=0.1)
