"""Every test here runs with the simulated accelerator in the place of CUDA, and must wait where it has to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from gpu.simulated import accelerator


@pytest.fixture(scope="session")
def extension() -> Iterator[Any]:
    """The built accelerator, with its ``take_problems`` and ``take_counts``."""
    reason = accelerator.missing()
    if reason is not None:
        pytest.skip(reason)
    with accelerator.taken_for_cuda():
        yield accelerator.load()


@pytest.fixture(autouse=True)
def nothing_is_used_without_waiting(extension: Any) -> Iterator[None]:
    extension.take_problems()
    yield
    assert extension.take_problems() == []
