"""One job of real processes per world size, for all tests of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs import Job


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of them on one worker: every other would import and start the same processes again."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("jobs"))


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
