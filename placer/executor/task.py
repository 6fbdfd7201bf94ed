"""What this process does at the moment: an action of a schedule, or the optimizer's step in a dry run.

So a dry run (`placer.simulation`) knows at which moment of a step each tensor is allocated and freed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from placer.timeline import Task

_tasks: list[Task] = []


def current_task() -> Task | None:
    """The task of the innermost `doing` block; None outside of all."""
    return _tasks[-1] if _tasks else None


@contextmanager
def doing(task: Task) -> Iterator[None]:
    """This process does ``task`` in this block."""
    _tasks.append(task)
    try:
        yield
    finally:
        _tasks.pop()
