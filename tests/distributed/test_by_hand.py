"""Two stages do no more than the same stages written by hand on ``torch.distributed.pipelining``."""

from __future__ import annotations

from collections.abc import Callable

import pipeline_cases as cases
import pytest
from jobs import Job


@pytest.mark.matrix(0)
@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_a_step_sends_and_makes_no_more_than_by_hand(
    job_of: Callable[[int], Job], schedule: str
) -> None:
    """Counters, not clocks: messages, their bytes, bytes of new memory, operators."""
    microbatches = 4
    for found in job_of(2).run(cases.count_work, schedule, microbatches):
        ours, theirs = found["placer"], found["by hand"]
        assert ours["c10d::send"] == theirs["c10d::send"] == microbatches
        assert ours["sent bytes"] == theirs["sent bytes"] > 0
        assert ours["c10d::recv_"] == theirs["c10d::recv_"]
        # What is received is in new memory (torch's stage keeps its own from step to step). Else scalars:
        # the loss, its weight, its sum on every rank. No row of a tensor is copied.
        assert ours["new bytes"] <= theirs["new bytes"] + ours["sent bytes"] + 1024
        assert (
            ours["operators"] <= theirs["operators"] + 12 * microbatches + 16
        )  # of no bytes, mostly


def test_inputs_that_the_model_writes_to(job_of: Callable[[int], Job]) -> None:
    """The caller's tensor has the new values on every rank; all others are read where they are."""
    assert job_of(2).run(cases.step_with_written_inputs) == [True, True]
