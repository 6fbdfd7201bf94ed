"""Dry-run every rank of a job on fake tensors: torch's own engine, with nobody at the other end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from placer._torch import fake_process_group, releasing_fakes
from placer.capture import Capture, FakeWorld
from placer.cost import device_type, stand_in_loss, updates_together
from placer.emit import StagedModel, emit_stages
from placer.errors import PlacerError
from placer.plan.types import Plan
from placer.runtime.attribution import Attribution, Where
from placer.runtime.distributed.boundary import BoundaryFinder, Crossings
from placer.runtime.distributed.engine import Engine
from placer.runtime.distributed.gradients import GradientReducer, find_shared
from placer.runtime.distributed.job import Job, Seat, take_seat
from placer.runtime.distributed.part import build_part, find_holdings
from placer.runtime.distributed.split import SplitStage
from placer.runtime.distributed.stage import Microbatch, Run
from placer.runtime.place import CALLER, Place
from placer.runtime.replica import Replica
from placer.runtime.scatter import batch_size, split_rows
from placer.runtime.statistics import DeferredStatistics, defers_statistics
from placer.schedule import batch_cuts
from placer.simulation.ledger import Ledger, Moment
from placer.simulation.optimizers import make_optimizer
from placer.simulation.simulate import describe_peak, running_kernels
from placer.simulation.types import SimulationReport

_CPU = torch.device("cpu")
_RANK = "rank"


class _FakeReducer(GradientReducer):
    """Sums fake gradients, which hold no numbers to look at."""

    def _positive(self, counts: Tensor) -> list[bool]:
        return [True] * len(counts)


class RankLedger(Ledger):
    """Counts what a process makes on its one device; the caller's own batch is not on it.

    The device's kernels are by default those of a CPU.
    """

    def __init__(
        self,
        where: Callable[[], Where] = Where,
        *,
        kernels: Callable[[str], str] = lambda place: "cpu",
    ) -> None:
        super().__init__(where, kernels=kernels)

    def _place_of(self, func: Any, leaves: Iterable[Any]) -> str:
        return _RANK

    def add_state(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that are there already."""
        for tensor in tensors:
            self.add(tensor, _RANK, kind="parameter")

    @property
    def peak(self) -> Moment:
        """The moment when the rank held the most."""
        return self.peaks.get(_RANK, Moment())


def simulate_ranks(
    capture: Capture,
    plan: Plan,
    inputs: Sequence[Tensor],
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
    run_on: str | None = None,
) -> SimulationReport:
    """The peak of every device of the first replica when each has a process of its own.

    Each rank's training step runs twice under its real schedule, on fake tensors and a process
    group that sends nothing. What ``torch.distributed.pipelining`` keeps beyond the plan's figures
    (gradients of whole boundaries, relayed values, both halves of a split backward) is in it, and
    so are the buckets in which replicas sum their gradients. Raises ``PlacerError`` inside a job.
    """
    if dist.is_initialized():
        raise PlacerError(
            "simulate",
            "cannot stand in for the ranks of a job that this process is part of",
            "call it before the process group is made",
        )
    staged = emit_stages(capture, *plan.parts)
    names = list(dict.fromkeys(stage.devices[0] for stage in plan.stages))
    predicted = {device.device: device.peak for device in plan.devices}
    found = []
    for index, name in enumerate(names):
        job = Job(rank=index, world_size=plan.replicas * len(names), local_rank=0)
        seat = take_seat(plan, job)
        with fake_process_group(index, job.world_size):
            ledger = _simulate_rank(capture, plan, staged, seat, inputs, loss_fn, run_on or name)
        found.append(describe_peak(ledger, name, predicted[name], place=_RANK))
    return SimulationReport(devices=tuple(found), step_ok=True)


def _simulate_rank(
    capture: Capture,
    plan: Plan,
    staged: StagedModel,
    seat: Seat,
    inputs: Sequence[Tensor],
    loss_fn: Callable[[Any], Tensor] | None,
    name: str,
) -> RankLedger:
    """Two training steps of the rank that has ``seat``, with the kernels of the device ``name``."""
    world = FakeWorld()
    fake_model = world.module(capture.model)
    leaves = [world.tensor(tensor) for tensor in inputs]
    holdings = find_holdings(fake_model, staged, seat.num_devices)
    finder = BoundaryFinder(capture.model, plan, staged, _CPU)
    attribution = Attribution(staged.stages, capture.layer_of)
    ledger = RankLedger(attribution.where, kernels=lambda _: device_type(name))
    with world.running(capture.conditions.guess):
        part = build_part(fake_model, staged, holdings, seat.device_index, _CPU)
        finder.follow(part)
        pieces = _cut(staged, plan, leaves)
        crossings = [finder.find(piece, grad=True) for piece in pieces]
        engine = _engine(plan, staged, part, seat)
        trained = [p for p in part.parameters() if p.requires_grad]
        optimizer = make_optimizer(plan.optimizer, trained, foreach=updates_together([name]))
        group_of = cache(partial(_make_group, plan.replicas, seat))
        reducer = _FakeReducer(find_shared(part, staged, holdings, seat.stage_indices, group_of))
        ledger.add_state((*part.parameters(), *part.buffers()))
        for leaf in (*leaves, *(tensor for piece in pieces for tensor in piece)):
            ledger.add(leaf, CALLER, kind="input")
        microbatches = _microbatches(plan, staged, pieces, crossings, name)
        loss_of = loss_fn or stand_in_loss
        with ledger, running_kernels(plan, name):
            for _ in range(2):
                run = Run(
                    microbatches=microbatches,
                    loss_of=lambda _, output: loss_of(output) * (1 / len(pieces)),
                )
                reducer.prepare(len(pieces), overlap=not engine.splits_backward)
                engine.execute(run, crossings[0])
                reducer.finish()
                del run
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    return ledger


def _engine(plan: Plan, staged: StagedModel, part: nn.Module, seat: Seat) -> Engine:
    """Torch's engine for the rank's stages, among ranks of which none is there."""
    places = [Place(_RANK, _CPU)] * len(plan.stages)
    statistics = DeferredStatistics() if defers_statistics(plan) else None
    return Engine(
        Replica(staged, places, places, plan.precision, statistics),
        part,
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        stage_indices=seat.stage_indices,
        group=_make_group(1, seat, tuple(range(seat.num_devices))),
        device=_CPU,
        stage_class=releasing_fakes(SplitStage),
    )


def _microbatches(
    plan: Plan,
    staged: StagedModel,
    pieces: Sequence[Sequence[Tensor]],
    crossings: Sequence[Crossings],
    name: str,
) -> list[Microbatch]:
    """The first replica's micro-batches on the device ``name``, those without rows last."""
    found = [
        Microbatch(
            inputs=dict(zip(staged.graph_inputs, piece, strict=True)),
            crossings=crossing,
            inputs_here=torch.device(name).type == "cpu",
        )
        for piece, crossing in zip(pieces, crossings, strict=True)
    ]
    empty = Microbatch(inputs={}, crossings=None)
    return found + [empty] * (plan.microbatches - len(pieces))


def _make_group(replicas: int, seat: Seat, devices: tuple[int, ...]) -> dist.ProcessGroup:
    ranks = [r * seat.num_devices + d for r in range(replicas) for d in devices]
    group: Any = dist.new_group(ranks)
    return group  # type: ignore[no-any-return]


def _cut(staged: StagedModel, plan: Plan, leaves: list[Tensor]) -> list[list[Tensor]]:
    """The first replica's micro-batches."""
    total = batch_size(staged.call, leaves)
    if total is None:
        return [leaves]
    cuts = batch_cuts(total, plan.replicas, plan.microbatches)
    sizes = [size for row in cuts for size in row]
    return split_rows(staged.call, leaves, sizes)[: len(cuts[0])]
