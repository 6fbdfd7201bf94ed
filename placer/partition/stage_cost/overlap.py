"""Seconds of a pass whose copies to and from the host run beside its computations.

As `placer.executor.offload` has them: one copy at a time. In forward the next one begins when the one
before has ended, and computation waits for that, too. In backward one tensor is fetched ahead.
"""

from __future__ import annotations

from collections.abc import Sequence


def overlapped_forward(compute: Sequence[float], copies: Sequence[float]) -> float:
    """Seconds until the last node is computed, and the last copy has ended.

    Per node, in the order in which they run, its own seconds and those of the copy that it leaves.

    >>> overlapped_forward([1, 1, 1], [0.5, 2, 0])  # the second copy runs from 2 to 4
    4.0
    """
    now = copied = 0.0
    for seconds, copy in zip(compute, copies, strict=True):
        now += seconds
        if copy:
            now = max(now, copied)
            copied = now + copy
    return max(now, copied)


def overlapped_backward(compute: Sequence[float], copies: Sequence[float]) -> float:
    """Seconds of the backward: a node waits for its copy, which begins when the one before has come.

    Per node, in the order of forward, the seconds of its backward and of the copy that it needs.

    >>> overlapped_backward([1, 3, 1], [0.5, 2, 0])  # 1 computed, 2 copied, 3 beside a copy, 1
    7.0
    """
    now = 0.0
    ahead: float | None = None  # when the copy that was begun ahead has come
    waiting = [copy for copy in copies if copy]
    for seconds, copy in zip(reversed(compute), reversed(copies), strict=True):
        if copy:
            waiting.pop()
            now = now + copy if ahead is None else max(now, ahead)
            ahead = now + waiting[-1] if waiting else None
        now += seconds
    return now
