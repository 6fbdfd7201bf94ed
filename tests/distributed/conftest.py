"""One job of real processes per world size, for all tests of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from jobs import Job


@pytest.hookimpl(tryfirst=True)  # before the hook of tests/conftest.py reads the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of them on one worker: every other would import and start the same processes again.

    What is not marked otherwise needs a process per stage; a ``shape`` is stages and replicas.
    """
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        item.add_marker(pytest.mark.xdist_group("jobs"))
        if item.get_closest_marker("needs") is None:
            stages, _ = getattr(item, "callspec", _NO_PARAMETERS).params.get("shape", (2, 1))
            one = stages == 1
            item.add_marker(
                pytest.mark.needs("a process per replica" if one else "a process per stage")
            )


_NO_PARAMETERS = SimpleNamespace(params={})


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
