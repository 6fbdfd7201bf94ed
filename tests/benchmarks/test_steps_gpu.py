"""Step times, measured and predicted: the script's logic, with small models on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import overhead, steps_gpu
from benchmarks.memory_gpu import Step


def test_the_median_of_the_third_and_later_steps_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = [9.0, 8.0, *(1.0, 2.0, 3.0, 4.0, 5.0) * 2]
    monkeypatch.setattr(
        steps_gpu, "trained_steps", lambda *_, **__: (Step(seconds) for seconds in taken)
    )
    row = steps_gpu.compare(
        lambda: (nn.Linear(8, 8), torch.empty(4, 8)), "fp32", device="cpu", kind="cpu"
    )
    assert row["measured"] == 3.0
    assert row["catalogue"] > 0 and row["profiled"] > 0
    assert row["profiled"] != row["catalogue"]
    assert "calibrated" not in row


def test_the_page_has_the_shares_that_are_near() -> None:
    row = {"case": "a", "family": "U-Net", "kind": "h100", "measured": 1.0, "catalogue": 1.2,
           "profiled": 1.05}  # fmt: skip
    other = {**row, "family": "Swin", "catalogue": 0.7, "profiled": 0.8}
    text = "\n".join(steps_gpu.lines_of([{"case": "calibration"}, row, other]))
    assert "| a | yes | 1000.0 | 1200.0 (1.20) | 1050.0 (1.05) |" in text
    assert "All, within 25 % and within 10 %: catalogue 1 of 2 and 0 of 2; " in text
    assert "profiled 2 of 2 and 1 of 2." in text
    assert "not in the fit, within 25 % and within 10 %: catalogue 0 of 1 and 0 of 1" in text


def test_no_step_is_one_of_the_fit() -> None:
    names = steps_gpu.names_of(steps_gpu.MODELS)
    assert "U-Net 128³, fp32" in names and "U-Net 128³, bf16" not in names
    assert len(names) >= 20


def test_the_calibration_comes_first() -> None:
    first, second = steps_gpu.jobs(["a"], "cuda", Path("kind.json"))
    assert first.key == "calibration" and second.values["calibrated"] == "kind.json"
    assert first.allocator == second.allocator == "expandable"


def test_overhead_is_a_ratio_of_medians() -> None:
    seconds = {"plain": 0.1, "placed(x)": 0.102, "placed.step": 0.107}
    lines = overhead.lines_of([{"case": "a", "repeats": 60, "seconds": seconds}])
    assert "| a | 100.0 | 102.0 (1.020) | 107.0 (1.070) |" in lines
    assert any("r3d_18" in name for name in overhead.LARGE)
    assert any("r3d_18" in name for name in overhead.SMALL)
