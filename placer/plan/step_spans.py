"""Lay out a step in time, from the seconds of a plan's stages and transfers."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from placer.plan.types import Plan, StagePlan, Transfer
from placer.schedule import Action, linearize, one_process_order, ranks_of, schedule_on
from placer.timeline import Clock, Span, end_of


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
    return lay_out_step(
        plan.stages,
        plan.transfers,
        schedule=plan.schedule,
        microbatches=plan.example_microbatches or plan.microbatches,
        training=plan.training,
        processes=plan.processes,
        optimizer_seconds=plan.optimizer_seconds or 0.0,
    )


def lay_out_step(
    stages: Sequence[StagePlan],
    transfers: Sequence[Transfer],
    *,
    schedule: str,
    microbatches: int,
    training: bool,
    processes: bool,
    optimizer_seconds: float,
) -> tuple[Span, ...]:
    """The spans of a step of ``stages`` in the order of ``schedule``.

    One process launches all actions, replica by replica, and a copy keeps both of its devices busy.
    With ``processes``, every device has a process of its own, and messages overlap with computations.
    Offloading that overlaps has a link per device and direction. Each half of a split backward takes
    half of its seconds. The reduction of gradients over replicas takes no time: we assume that it
    overlaps with backward.
    """
    clock = Clock()
    replicas = len(stages[0].devices)
    for replica in range(replicas):
        devices = [stage.devices[replica] for stage in stages]
        moved = _moved(transfers, devices)
        order = _order(
            schedule if training else "GPipe",
            ranks_of(devices) if processes else None,
            len(stages),
            microbatches,
            training,
        )
        _run(clock, order, stages, devices, moved, processes=processes)
    if optimizer_seconds:
        trained = {
            stage.devices[i] for stage in stages for i in range(replicas if processes else 1)
        }
        after = [end_of(clock.spans)]
        clock.run("optimizer", "optimizer", sorted(trained), optimizer_seconds, after=after)
    return tuple(clock.spans)


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
        before = found.get((source, target), _Moved(source, target, 0.0, 0))
        found[source, target] = before._replace(
            seconds=before.seconds + (transfer.seconds or 0.0),
            nbytes=before.nbytes + transfer.nbytes,
        )
    return list(found.values())


def _run(
    clock: Clock,
    order: Sequence[Action],
    stages: Sequence[StagePlan],
    devices: Sequence[str],
    moved: Sequence[_Moved],
    *,
    processes: bool,
) -> None:
    """Add one replica's step to ``clock``."""
    ends: dict[tuple[str, int, int], float] = {}  # pass, stage, micro-batch
    received, sent = defaultdict[int, list[_Moved]](list), defaultdict[int, list[_Moved]](list)
    for found in moved:
        received[found.target].append(found)
        sent[found.source].append(found)

    def move(way: str, source: int, target: int, microbatch: int, what: _Moved) -> float:
        """Add a transfer. Returns the time when it arrives at stage ``target``."""
        pair = devices[source], devices[target]
        return clock.run(
            "transfer",
            f"{way}{microbatch} from {source} to {target}",
            [f"{pair[0]} to {pair[1]}"] if processes else pair,
            what.seconds,
            after=[ends[way, source, microbatch]],
            nbytes=what.nbytes,
        )

    for action in order:
        stage, microbatch = action.stage_index, action.microbatch_index
        forward = action.kind == "F"
        if forward:
            came = [move("F", m.source, stage, microbatch, m) for m in received[stage]]
        elif action.kind == "W":
            came = []
        else:
            came = [move("B", m.target, stage, microbatch, m) for m in sent[stage]]
        seconds, launching = _seconds(stages[stage], action)
        end = clock.run(
            "compute",
            str(action),
            [devices[stage]],
            seconds,
            after=came,
            process=f"process of {devices[stage]}" if processes else "process",
            launching=launching,
        )
        if stages[stage].host_copy_nbytes and action.kind in "FBI":
            _copy_overlapped(clock, stages[stage], devices[stage], str(action), forward=forward)
        if action.kind != "W":  # nothing waits for the gradients of weights
            ends["F" if forward else "B", stage, microbatch] = end


def _copy_overlapped(
    clock: Clock, stage: StagePlan, device: str, action: str, *, forward: bool
) -> None:
    """Add the copy to or from the host that overlaps with the action that was added last."""
    clock.run(
        "transfer",
        f"{action} {'to' if forward else 'from'} the host",
        [f"{device} to the host" if forward else f"the host to {device}"],
        stage.host_copy_seconds or 0.0,
        after=[clock.spans[-1].start],
        nbytes=stage.host_copy_nbytes,
    )


def _seconds(stage: StagePlan, action: Action) -> tuple[float, float]:
    """Seconds of ``action`` on the device, and in the process that launches it."""
    if action.kind == "F":
        return stage.forward_seconds or 0.0, stage.forward_launch_seconds or 0.0
    share = 1.0 if action.kind == "B" else 0.5
    return (
        share * (stage.backward_seconds or 0.0),
        share * (stage.backward_launch_seconds or 0.0),
    )
