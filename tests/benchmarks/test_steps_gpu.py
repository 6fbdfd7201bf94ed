"""Step times, measured and predicted: the script's logic, with small models on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import steps_gpu
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
