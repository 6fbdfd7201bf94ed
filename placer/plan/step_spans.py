"""Lay out a step in time, from the seconds of a plan's stages and transfers."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from placer.plan.types import Plan, StagePlan, Transfer
from placer.schedule import Action, linearize, one_process_order, ranks_of, schedule_on
from placer.state_layout import StateLayout
from placer.timeline import Operation, Span, Task, run

_WHOLE = StateLayout()
BUCKET_NBYTES = 25 * 2**20  # in which processes sum gradients: DistributedDataParallel's default


class _Moved(NamedTuple):
    """What one stage sends to another in forward; gradients of the same size come back in backward."""

    source: int
    target: int
    seconds: float
    nbytes: int


def step_spans(plan: Plan) -> tuple[Span, ...]:
    """The spans of a step of ``plan`` on all devices, in the order in which they are launched.

    There are none if times are not known.
    """
    if plan.step_seconds is None:
        return ()
    spans = lay_out_step(
        plan.stages,
        plan.transfers,
        [[plan.devices_of(s, r)[0] for s in plan.stages] for r in range(plan.replicas)],
        schedule=plan.schedule,
        microbatches=plan.example_microbatches or plan.microbatches,
        training=plan.training,
        processes=plan.processes,
        optimizer_seconds=plan.optimizer_seconds or 0,
        shards=plan.shards,
        state_layout=plan.state_layout,
    )
    return tuple(span for shard in range(plan.shards) for span in _of_shard(spans, plan, shard))


def _of_shard(spans: Sequence[Span], plan: Plan, shard: int) -> Iterator[Span]:
    """The same on the devices of another shard: all shards of a stage work at the same time."""
    if not shard:
        yield from spans
        return
    rows = [plan.devices_of(s, r) for s in plan.stages for r in range(plan.replicas)]
    there = {row[0]: row[shard] for row in rows}
    for span in spans:
        if set(span.on) & there.keys():
            yield span._replace(on=tuple(there.get(name, name) for name in span.on))


def lay_out_step(
    stages: Sequence[StagePlan],
    transfers: Sequence[Transfer],
    rows: Sequence[Sequence[str]],
    *,
    schedule: str,
    microbatches: int,
    training: bool,
    processes: bool,
    optimizer_seconds: float,
    shards: int = 1,
    state_layout: StateLayout = _WHOLE,
    latest: Callable[[Sequence[float]], float] = max,
) -> tuple[Span, ...]:
    """The spans of a step of ``stages`` in the order of ``schedule``.

    ``rows`` has for each replica the device of every stage. One process launches all actions, replica by
    replica, and a copy keeps both of its devices busy. With ``processes``, every device has a process of its
    own, and messages overlap with computations; as replicas then share nothing, all take as long as the first
    one. Offloading that overlaps has a link per device and direction. Each half of a split backward takes
    half of its seconds. Processes sum gradients in buckets, all but the last of which overlap with the last
    backward of their stage, or with each of its backwards if ranks divide gradients by ``state_layout``. In
    one process, the weights are copied from the first replica and shard to the others at the beginning, and
    gradients back after every backward. Seconds may be arrays (see `Operation`).
    """
    order = _order(
        schedule if training else "GPipe",
        ranks_of(rows[0]) if processes else None,
        len(stages),
        microbatches,
        training,
    )

    moved = _moved(transfers, rows[0])  # of any replica

    def operations(replicas: Sequence[int]) -> list[Operation]:
        copied = {} if processes or not training else {r: shards - (r == 0) for r in replicas}
        found = [
            _copy(stage, "weights", rows[replica], rows[0], count)
            for replica, count in copied.items()
            for stage in stages
            if count and stage.sum_seconds
        ]
        for replica in replicas:
            done = _operations(order, stages, replica, rows[replica], moved, processes=processes)
            if training and processes:
                found += _with_sums(list(done), stages, state_layout.gradients)
            else:
                found += _with_copies(done, stages, rows[replica], rows[0], copied.get(replica, 0))
        if optimizer_seconds:
            found.append(
                Operation(
                    kind="optimizer",
                    name="optimizer",
                    # The other replicas of a process have copies of the weights of the first one.
                    on=tuple(sorted(set(rows[replicas[0]]))),
                    seconds=optimizer_seconds,
                    after=tuple(found),
                    task=Task(replica=replicas[0]),
                )
            )
        return found

    replicas = range(len(rows))
    first, *others = [[replica] for replica in replicas] if processes else [replicas]
    spans = run(operations(first), latest=latest)
    return spans + tuple(
        span._replace(on=same.on, task=same.task)
        for other in others
        for span, same in zip(spans, operations(other), strict=True)
    )


@functools.lru_cache(maxsize=64)
def _order(
    schedule: str, rank_of: tuple[int, ...] | None, stages: int, microbatches: int, training: bool
) -> tuple[Action, ...]:
    """A replica's actions in the order in which they are launched; by one process if ``rank_of`` is None."""
    if rank_of is None and not training:  # micro-batch by micro-batch
        return tuple(
            Action(stage_index=stage, kind="F", microbatch_index=microbatch)
            for microbatch in range(microbatches)
            for stage in range(stages)
        )
    if rank_of is None:
        return one_process_order(schedule, stages, microbatches)
    order = linearize(schedule_on(schedule, rank_of, microbatches))
    return order if training else tuple(action for action in order if action.kind == "F")


def _moved(transfers: Sequence[Transfer], devices: Sequence[str]) -> Sequence[_Moved]:
    """What each pair of stages sends. A value goes to each device once, to its first stage there."""
    found: dict[tuple[int, int], _Moved] = {}
    sent: set[tuple[str, int, str]] = set()
    for transfer in sorted(transfers, key=lambda transfer: transfer.target):
        source, target = transfer.source, transfer.target
        key = transfer.value, source, devices[target]
        if devices[source] == devices[target] or key in sent:
            continue
        sent.add(key)
        before = found.get((source, target), _Moved(source, target, 0, 0))
        found[source, target] = before._replace(
            seconds=before.seconds + _known(transfer.seconds),
            nbytes=before.nbytes + transfer.nbytes,
        )
    return list(found.values())


def _operations(
    order: Sequence[Action],
    stages: Sequence[StagePlan],
    replica: int,
    devices: Sequence[str],
    moved: Sequence[_Moved],
    *,
    processes: bool,
) -> Iterator[Operation]:
    """What one replica, whose stages are on ``devices``, does in a step, in the order of the launches."""
    done: dict[tuple[str, int, int], Operation] = {}  # by pass, stage, micro-batch
    arriving = defaultdict[tuple[str, int], list[tuple[int, _Moved]]](list)  # by pass, stage
    for found in moved:
        arriving["F", found.target].append((found.source, found))
        arriving["B", found.source].append((found.target, found))
    for action in order:
        stage, device = stages[action.stage_index], devices[action.stage_index]
        microbatch, forward = action.microbatch_index, action.kind == "F"
        way = "F" if forward else "B"
        came = []
        # Nothing is sent for the gradients of weights, and nothing waits for them.
        for maker, what in arriving[way, stage.index] if action.kind != "W" else ():
            pair = devices[maker], device
            came.append(
                Operation(
                    kind="transfer",
                    name=f"{way}{microbatch} from {maker} to {stage.index}",
                    on=(f"{pair[0]} to {pair[1]}",) if processes else pair,
                    seconds=what.seconds,
                    after=(done[way, maker, microbatch],),
                    nbytes=what.nbytes,
                )
            )
        yield from came
        seconds, launch_seconds = _seconds(stage, action)
        computed = Operation(
            kind="compute",
            name=str(action),
            on=(device,),
            seconds=seconds,
            after=tuple(came),
            process=f"process of {device}" if processes else "process",
            launch_seconds=launch_seconds,
            task=Task(action, replica),
        )
        yield computed
        if action.kind == "W":
            continue
        done[way, stage.index, microbatch] = computed
        if stage.host_copy_nbytes:  # of offloaded tensors, while the stage computes
            yield Operation(
                kind="transfer",
                name=f"{action} {'to' if forward else 'from'} the host",
                on=(f"{device} to the host" if forward else f"the host to {device}",),
                seconds=stage.host_copy_seconds or 0,
                beside=computed,
                nbytes=stage.host_copy_nbytes,
            )


def _with_sums(
    operations: Sequence[Operation], stages: Sequence[StagePlan], pieces: int
) -> Iterator[Operation]:
    """``operations``, and after the last backward of each stage the sum of its gradients over processes.

    After every one, if ranks keep one of several ``pieces`` of the sums.
    """
    last = {
        o.task.action.stage_index: o for o in operations if o.task is not None and o.task.action
    }
    for operation in operations:
        yield operation
        action = None if operation.task is None else operation.task.action
        if action is None:
            continue
        if last[action.stage_index] is not operation and (pieces == 1 or action.kind not in "BW"):
            continue
        stage = stages[action.stage_index]
        if not stage.sum_seconds:
            continue
        whole = pieces * stage.memory.gradients
        bucket = min(1.0, BUCKET_NBYTES / max(whole, 1))
        name, on = f"gradients of stage {stage.index}", (f"{operation.on[0]} to other ranks",)
        parts = [
            Operation(
                kind="sum",
                name=name,
                on=on,
                seconds=stage.sum_seconds * share,
                after=after,
                beside=operation,
                nbytes=int(whole * share),
            )
            for share, after in ((1 - bucket, ()), (bucket, (operation,)))
            if share
        ]
        yield from parts


def _with_copies(
    operations: Iterable[Operation],
    stages: Sequence[StagePlan],
    devices: Sequence[str],
    leads: Sequence[str],
    copies: int,
) -> Iterator[Operation]:
    """``operations`` of one process, with copies of gradients to the ``leads`` after every backward."""
    for operation in operations:
        yield operation
        action = None if operation.task is None else operation.task.action
        if not copies or action is None or action.kind not in "BW":
            continue
        if (stage := stages[action.stage_index]).sum_seconds:
            yield _copy(stage, "gradients", devices, leads, copies, operation)


def _copy(
    stage: StagePlan,
    what: str,
    devices: Sequence[str],
    leads: Sequence[str],
    copies: int,
    *after: Operation,
) -> Operation:
    """So many copies, to or from the stage's lead device, of what has the size of its gradients."""
    there, lead = devices[stage.index], leads[stage.index]
    return Operation(
        kind="sum",
        name=f"{what} of stage {stage.index}",
        on=(there,) if there == lead else (there, lead),
        seconds=copies * (stage.sum_seconds or 0),
        after=after,
        nbytes=copies * stage.memory.gradients,
    )


def _seconds(stage: StagePlan, action: Action) -> tuple[float, float]:
    """Seconds of ``action`` on the device, and in the process that launches it."""
    if action.kind == "F":
        return _known(stage.forward_seconds), _known(stage.forward_launch_seconds)
    parts = 1 if action.kind == "B" else 2
    return _known(stage.backward_seconds) / parts, _known(stage.backward_launch_seconds) / parts


def _known(seconds: float | None) -> float:
    return 0.0 if seconds is None else seconds
