"""The dry run of a rank says what the real rank holds."""

from __future__ import annotations

from collections.abc import Callable

import distributed_cases as cases
import pytest
import torch.distributed as dist
from jobs import Job
from oracle import mean_square

import placer


@pytest.mark.parametrize(
    ("schedule", "stages", "replicas"),
    [("GPipe", 4, 1), ("1F1B", 2, 2), ("InterleavedZeroBubble", 4, 1)],
)
def test_a_simulated_rank_peaks_where_the_real_one_does(
    job_of: Callable[[int], Job], schedule: str, stages: int, replicas: int
) -> None:
    model, x = cases.memory_case()
    plan = placer.make_plan(model, cases.make_spec(stages, replicas, 4, schedule), x)
    report = placer.simulate(model, plan, x, loss_fn=mean_square, processes=True)
    assert not dist.is_initialized()
    predicted = [device.peak for device in report.devices]
    counted = job_of(4).run(cases.count_bytes, plan)
    assert counted == pytest.approx(predicted * replicas, rel=0.03)
