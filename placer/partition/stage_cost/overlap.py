"""Estimates the seconds of a pass whose copies to and from the host overlap with computation.

This models `placer.executor.stages.offload`, which makes one copy at a time. In forward, a copy starts when
the previous one has ended, and computation waits for that too. In backward, one tensor is fetched in advance.
"""

from __future__ import annotations

from collections.abc import Sequence


def overlapped_forward(compute: Sequence[float], copies: Sequence[float]) -> float:
    """Seconds until the last node has been computed and the last copy has ended.

    ``compute`` has the seconds of each node, in execution order, and ``copies`` the seconds of the copy that
    follows the node (0: no copy).

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
    """Seconds of a backward in which each node waits for the copy that it needs.

    ``compute`` has the seconds of each node's backward, in the order of forward, and ``copies`` the seconds
    of the copy that the node needs (0: no copy). A copy starts as soon as the previous one has been received.

    >>> overlapped_backward([1, 3, 1], [0.5, 2, 0])  # 1 computed, 2 copied, 3 beside a copy, 1
    7.0
    """
    now = 0.0
    ahead: float | None = None  # when the copy that was started in advance ends
    unfetched = [copy for copy in copies if copy]
    for seconds, copy in zip(reversed(compute), reversed(copies), strict=True):
        if copy:
            unfetched.pop()
            now = now + copy if ahead is None else max(now, ahead)
            ahead = now + unfetched[-1] if unfetched else None
        now += seconds
    return now
