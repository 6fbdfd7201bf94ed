"""Builds schedules: the actions of every rank, by the rules of the papers that describe them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from placer.schedule.order import linearize, merge_backward
from placer.schedule.types import Action, Schedule

Maker = Callable[[int, int, int, int], list[Action]]


def make_schedule(
    name: str, num_stages: int, num_microbatches: int, *, num_ranks: int | None = None
) -> Schedule:
    """The schedule ``name``, with stage ``s`` on rank ``s % num_ranks``.

    By default there are as many ranks as stages. With several stages per rank, 1F1B is interleaved, and
    GPipe runs a rank's stages one after the other (torch's ``ScheduleLoopedBFS``). Raises ``ValueError``
    for an unknown name, and for numbers that the schedule does not support.

    >>> for actions in make_schedule("1F1B", 2, 3).actions:
    ...     print(*actions)
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    """
    ranks = num_stages if num_ranks is None else num_ranks
    if name not in _MAKERS:
        raise ValueError(f"{name!r} is not a schedule; known: {', '.join(_MAKERS)}")
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError("a schedule has at least one stage and one micro-batch")
    if ranks < 1 or num_stages % ranks:
        raise ValueError(f"{num_stages} stages cannot be divided evenly among {ranks} ranks")
    make = _MAKERS[name]
    return Schedule(
        name=name,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        rank_of=tuple(stage % ranks for stage in range(num_stages)),
        actions=tuple(
            tuple(make(rank, ranks, num_stages, num_microbatches)) for rank in range(ranks)
        ),
    )


def splits_backward(schedule: str) -> bool:
    """Does the schedule run backward in two halves, for inputs and for weights?"""
    return schedule.endswith("ZeroBubble")


def ranks_of(devices: Sequence[str]) -> tuple[int, ...]:
    """The number of each stage's device; devices are numbered in the order of their first stage.

    >>> ranks_of(["cuda:1", "cuda:0", "cuda:1"])
    (0, 1, 0)
    """
    number: dict[str, int] = {}
    return tuple(number.setdefault(device, len(number)) for device in devices)


def schedule_on(name: str, rank_of: Sequence[int], num_microbatches: int) -> Schedule:
    """The schedule ``name`` with stage ``s`` on rank ``rank_of[s]``.

    If stages are on ranks in turn, and micro-batches divide evenly into rounds, the order is that of
    `make_schedule`. The papers have no order for other cases. In those, each rank runs its actions in the
    order in which one process would run the schedule with one rank per stage. That order respects all
    dependencies, so there is no deadlock.

    >>> for actions in schedule_on("1F1B", (0, 1, 0), 2).actions:
    ...     print(*actions)
    0F0 2F0 2B0 0F1 2F1 0B0 2B1 0B1
    1F0 1F1 1B0 1B1
    """
    ranks, stages = max(rank_of) + 1, len(rank_of)
    try:
        in_turn = make_schedule(name, stages, num_microbatches, num_ranks=ranks)
    except ValueError:  # they cannot be divided evenly
        in_turn = None
    if in_turn is not None and in_turn.rank_of == tuple(rank_of):
        return in_turn
    whole = make_schedule(name, stages, num_microbatches)
    order = linearize(whole)
    actions = (tuple(a for a in order if rank_of[a.stage_index] == rank) for rank in range(ranks))
    return replace(whole, rank_of=tuple(rank_of), actions=tuple(actions))


@functools.lru_cache(maxsize=64)
def one_process_order(name: str, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
    """All actions of the schedule ``name`` in the order in which one process runs them.

    Backwards are whole, because splitting them has no benefit in one process.
    """
    return linearize(merge_backward(make_schedule(name, num_stages, num_microbatches)))


def _gpipe(rank: int, num_ranks: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """All forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965).

    A rank with several stages runs them one after the other (Lamy-Poirier 2023, arXiv:2211.05953).
    """
    stages, microbatches = range(rank, num_stages, num_ranks), range(num_microbatches)
    return [
        *(
            Action(stage_index=s, kind="F", microbatch_index=m)
            for s in stages
            for m in microbatches
        ),
        *(
            Action(stage_index=s, kind="B", microbatch_index=m)
            for s in reversed(stages)
            for m in microbatches
        ),
    ]


def _1f1b(rank: int, num_ranks: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """PipeDream-Flush (Narayanan et al. 2021, arXiv:2006.09503); interleaved if ranks have several stages."""
    hop = 1 if num_ranks == num_stages else 2
    return _alternate(rank, num_ranks, num_stages, num_microbatches, hop=hop, delay=None)


def _interleaved(rank: int, num_ranks: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """Interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473)."""
    return _alternate(rank, num_ranks, num_stages, num_microbatches, hop=2, delay=None)


def _zero_bubble(rank: int, num_ranks: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """ZB1P: weight gradients fill the bubble (Qi et al. 2023, arXiv:2401.10241)."""
    return _alternate(rank, num_ranks, num_stages, num_microbatches, hop=1, delay=rank)


_MAKERS: dict[str, Maker] = {
    "GPipe": _gpipe,
    "1F1B": _1f1b,
    "Interleaved1F1B": _interleaved,
    "InterleavedZeroBubble": _zero_bubble,
}
SCHEDULES = tuple(_MAKERS)
"""The names of all schedules."""


def _alternate(
    rank: int,
    num_ranks: int,
    num_stages: int,
    num_microbatches: int,
    *,
    hop: int,
    delay: int | None,
) -> list[Action]:
    """Warm-up forwards, then alternately one forward and one backward, then the remaining backwards.

    A rank's warm-up has ``hop`` forwards for every rank after it. With ``delay``, each backward is split into
    two halves, and the half for weights runs ``delay`` backwards after the half for inputs.
    """
    per_rank = num_stages // num_ranks
    rounds = max(1, num_microbatches // num_ranks)
    if per_rank > 1 and num_microbatches % rounds:
        raise ValueError(
            f"{num_microbatches} micro-batches cannot be divided into {rounds} equal rounds "
            f"over {num_ranks} ranks; use a multiple of {num_ranks}"
        )
    in_round = num_microbatches // rounds if per_rank > 1 else num_microbatches
    total = per_rank * num_microbatches
    warmup = min(total, (per_rank - 1) * in_round + hop * (num_ranks - 1 - rank))

    def stage(step: int, *, backward: bool) -> int:
        local = (step // in_round) % per_rank
        return (per_rank - 1 - local if backward else local) * num_ranks + rank

    actions: list[Action] = []
    done: Counter[tuple[str, int]] = Counter()

    def append(kind: str, stage_index: int) -> None:
        microbatch = done[kind, stage_index]
        done[kind, stage_index] += 1
        actions.append(Action(stage_index=stage_index, kind=kind, microbatch_index=microbatch))  # type: ignore[arg-type]

    weights = 0
    for step in range(total + warmup):
        if step < total:
            append("F", stage(step, backward=False))
        if step < warmup:
            continue
        backward = step - warmup
        append("B" if delay is None else "I", stage(backward, backward=True))
        if delay is not None and backward >= delay:
            append("W", stage(weights, backward=True))
            weights += 1
    while delay is not None and weights < total:
        append("W", stage(weights, backward=True))
        weights += 1
    return actions
