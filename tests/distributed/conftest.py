"""One job of real processes per world size, for all tests of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from jobs import Job


@pytest.fixture(scope="session")
def job_of() -> Iterator[Callable[[int], Job]]:
    jobs: dict[int, Job] = {}

    def of(world_size: int) -> Job:
        if world_size not in jobs or jobs[world_size].closed:
            jobs[world_size] = Job(world_size)
        return jobs[world_size]

    yield of
    for job in jobs.values():
        job.close()
