"""Lists the strategies that a spec and a pool of devices allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from placer.program import Program
from placer.schedule import num_chunks, split_evenly
from placer.search.strategy import SEARCHED, STATES, Strategy, degrees
from placer.space import CONVOLUTIONS, find_joins
from placer.spec import DeviceSpec, PlacementSpec
from placer.spec.fields import ScheduleName
from placer.state_layout import ShardState

_SHARDS = (1, 2, 4, 8, 16, 32, 64)
_FEW = 8  # numbers of replicas up to this one may give some of them fewer rows
_MICROBATCHES = tuple(2**power for power in range(13))
_SCHEDULES: tuple[ScheduleName, ...] = ("1F1B", "InterleavedZeroBubble")


def free_fields(wanted: PlacementSpec) -> frozenset[str]:
    """The fields that the search chooses: those that ``wanted`` does not give, or gives as "auto"."""
    given = wanted.model_fields_set
    free = {name for name in SEARCHED if name not in given or getattr(wanted, name) == "auto"}
    if wanted.space.shards == "auto":
        free.add("space")
    return frozenset(free)


def list_strategies(
    program: Program,
    wanted: PlacementSpec,
    pool: Sequence[DeviceSpec],
    rows: int,
    *,
    processes: bool,
) -> Iterator[Strategy]:
    """Every strategy that is tried for a batch of ``rows``, in a fixed order.

    Every replica has a row for each of its micro-batches, unless their number is given. A batch whose rows
    depend on each other is not split. Offloading is tried only if the spec says "auto": it needs host memory
    that nobody counted. Each number of micro-batches has one schedule without a split backward, and under
    ``processes`` one with it.
    """
    free = free_fields(wanted)
    if program.captured.mixing:
        free -= {"replicas", "microbatches"}
    most, operations = len(pool), len(program.order)
    spatial = "space" in free and not wanted.compile
    spatial = spatial and any(isinstance(m, CONVOLUTIONS) for m in program.model.modules())

    def choices(name: str, given: int, found: Sequence[int]) -> Sequence[int]:
        return found if name in free else (given,)

    chunkable = not wanted.compile and bool(find_joins(program))
    shards = choices("space", wanted.space.number, _SHARDS if spatial else (1,))
    recompute = _ways("checkpoint", free, allowed=wanted.training)
    offload = _ways("offload", free, allowed=wanted.training and wanted.offload == "auto")
    chunks = _ways("chunks", free, allowed=chunkable)
    divisible = processes and wanted.training and "shard_state" in free
    for shard in shards:
        if shard > most:
            continue
        useful = _replica_counts(rows, most // shard)
        replicas = choices("replicas", _count(wanted.replicas), useful)
        for replica in replicas:
            if wanted.shard_over != "auto" and replica % wanted.shard_over:
                continue
            left = most // (shard * replica)
            counts = choices("microbatches", _count(wanted.microbatches), _MICROBATCHES)
            counts = [count for count in counts if split_evenly(rows, replica, count)]
            stages = choices("stages", _count(wanted.stages), list(degrees(left)))
            for stage in stages if counts else ():
                if not 0 < stage <= min(left, operations):
                    continue
                state: tuple[ShardState, ...] = ("none",)
                if divisible and replica * shard > 1:
                    state = STATES
                for count, light, away, chunked, divided in product(
                    counts, recompute, offload, chunks, state
                ):
                    # Plans that recompute split no backwards.
                    splits = processes and not light
                    for schedule in _schedules(wanted, free, stage, count, splits=splits):
                        yield Strategy(
                            replicas=replica,
                            stages=stage,
                            shards=shard,
                            microbatches=count,
                            schedule=schedule,
                            recompute=light,
                            offload=away,
                            chunks=chunked,
                            shard_state=divided,
                        )


def _replica_counts(rows: int, most: int) -> list[int]:
    """The numbers of replicas that are tried: all have rows, and equally many if they are not few."""
    counts = range(1, min(rows, most) + 1)
    return [n for n in counts if num_chunks(rows, n) == n and (n <= _FEW or rows % n == 0)]


def _count(value: int | str) -> int:
    return value if isinstance(value, int) else 1


def _ways(name: str, free: frozenset[str], *, allowed: bool) -> tuple[bool, ...]:
    """Whether a way of saving memory may be used: no, or both without and with it."""
    return (False, True) if name in free and allowed else (False,)


def _schedules(
    wanted: PlacementSpec, free: frozenset[str], stages: int, microbatches: int, *, splits: bool
) -> tuple[ScheduleName, ...]:
    if wanted.schedule != "auto" and "schedule" not in free:
        return (wanted.schedule,)
    over_batch = wanted.loss is not None and wanted.loss.whole_batch
    if microbatches == 1 or not wanted.training or over_batch:
        return ("GPipe",)
    if stages == 1:
        return ("1F1B",)
    return _SCHEDULES if splits and not wanted.compile else _SCHEDULES[:1]
