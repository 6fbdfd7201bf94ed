"""Two stages do no more than the same stages written by hand on ``torch.distributed.pipelining``."""

from __future__ import annotations

from collections.abc import Callable

import pipeline_cases as cases
from jobs import Job


def test_inputs_that_the_model_writes_to(job_of: Callable[[int], Job]) -> None:
    """The caller's tensor has the new values on every rank; all others are read where they are."""
    assert job_of(2).run(cases.step_with_written_inputs) == [True, True]
