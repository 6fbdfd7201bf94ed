"""Finds how far a model can be split, and how many devices it needs at least."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from torch import Tensor

from placer.cost import CostEstimates, CostTable, find_loss
from placer.partition import PlanningOptions, TableCache
from placer.partition.candidate import optimizer_on
from placer.partition.model import least_bytes, model_units
from placer.partition.stage_cost.score import peak_bytes, unit_seconds
from placer.partition.stage_cost.tables import build_tables
from placer.partition.units import program_order, unit_graph
from placer.plan.types import PlannedLoss
from placer.planner.assemble import planned_loss
from placer.planner.batch import microbatch_inputs, microbatch_rows
from placer.planner.build import build_plan
from placer.planner.devices import device_slot, likely_kernels
from placer.planner.resolve import planning_options
from placer.program import Program
from placer.schedule import InFlight
from placer.spec import PlacementSpec

_EXAMINED = 8  # for how many pieces, the largest by a rough estimate, the peak is computed exactly
_MAX_DEVICES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Nodes that must be on one device (a unit), with the peak bytes of a stage that has only these.

    ``with_loss``: they are the last ones, so that stage computes the loss too.
    """

    nodes: tuple[str, ...]
    layers: tuple[str, ...]
    peak: int
    with_loss: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """The number of a model's pieces, in total and per top-level layer (``""``: the model's own code)."""

    per_layer: dict[str, int]
    count: int


def count_pieces(program: Program) -> Pieces:
    """Count the pieces of ``program``. A piece with nodes of two layers counts for both of them."""
    units = unit_graph(program)
    per_layer: dict[str, int] = {}
    for unit in program_order(units):
        layers = {program.nodes[program.order[i]].layer for i in units.nodes[unit]["nodes"]}
        for top in {layer.split(".")[0] for layer in layers}:
            per_layer[top] = per_layer.get(top, 0) + 1
    return Pieces(per_layer=per_layer, count=len(units))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShare:
    """The share of some pieces in the time and the memory of a model's step, between 0 and 1."""

    seconds: float
    nbytes: float

    @property
    def most_stages(self) -> int | None:
        """The most stages that can each take an equal share of the time; None if there is no limit."""
        return max(1, int(1 / self.seconds + 1e-9)) if self.seconds > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLimits:
    """How far a model can be split, for one micro-batch.

    ``least_bytes`` are the bytes that the largest piece needs on a device that also has other stages.
    ``least_devices`` is how many devices are needed at least, if each has the memory of the largest piece's
    peak.
    """

    largest: Piece
    least_bytes: int
    least_devices: int
    largest_share: StepShare
    whole: Mapping[str, StepShare]  # for each module that cannot be split, by its layer
    loss: PlannedLoss | None  # None without training


def measure_limits(
    program: Program, inputs: Sequence[Tensor], spec: PlacementSpec, estimate: CostEstimates
) -> SplitLimits:
    """How far ``program`` can be split for a micro-batch of ``spec``, on devices like its first one."""
    replicas, microbatches = int(spec.replicas), int(spec.microbatches)
    loss = find_loss(spec.loss)
    rows = microbatch_rows(program, inputs, replicas, microbatches)[0]
    costs = estimate(
        microbatch_inputs(program, inputs, rows),
        training=spec.training,
        precision=spec.precision,
        kernels=likely_kernels(spec),
        loss=loss,
    )
    options = planning_options(spec, (rows,), processes=False)
    units = unit_graph(program)
    order = program_order(units)
    model = model_units(units, order, costs, {})
    nbytes = least_bytes(model, costs, options, 1)[0]
    kind = device_slot(spec.devices[0], spec).kind
    seconds = unit_seconds(costs, kind, training=spec.training)
    by_unit = np.bincount(model.unit_of, weights=seconds, minlength=len(nbytes))

    def share(indices: Iterable[int]) -> StepShare:
        chosen = sorted(set(indices))
        return StepShare(
            seconds=float(by_unit[chosen].sum() / max(by_unit.sum(), 1e-30)),
            nbytes=float(nbytes[chosen].sum() / max(nbytes.sum(), 1.0)),
        )

    largest = largest_piece(program, costs, options)
    position = {name: i for i, name in enumerate(program.order)}
    unit = int(model.unit_of[position[largest.nodes[0]]])
    inside = {
        w.layer: [
            int(model.unit_of[position[n]]) for n, at in program.layers.items() if at == w.layer
        ]
        for w in program.captured.whole_modules
    }
    return SplitLimits(
        largest=largest,
        least_bytes=int(nbytes[unit]),
        least_devices=max(1, -(-int(nbytes.sum()) // max(largest.peak, 1))),
        largest_share=share([unit]),
        whole={layer: share(indices) for layer, indices in inside.items()},
        loss=planned_loss(loss, costs) if spec.training else None,
    )


def largest_piece(
    program: Program, costs: CostTable, options: PlanningOptions, devices: Iterable[str] = ()
) -> Piece:
    """The piece with the highest peak as a stage of its own, as a plan on ``devices`` would state it.

    The peak is capped at that of the whole model as one stage, which receives nothing.
    """
    kept = optimizer_on(options, devices)
    units = unit_graph(program)
    order = program_order(units)
    members = {unit: tuple(units.nodes[unit]["nodes"]) for unit in order}
    nodes = [i for group in members.values() for i in group]
    ends = dict(zip(members, accumulate(len(group) for group in members.values()), strict=True))

    def peak(first: int, end: int) -> int:
        cuts = sorted({0, first, end, len(nodes)})
        tables = build_tables(costs, nodes, cuts)
        peaks = peak_bytes(tables, InFlight(), kept, training=options.training)
        return int(peaks[cuts.index(first), cuts.index(end) - 1])

    found = {
        unit: peak(ends[unit] - len(members[unit]), ends[unit])
        for unit in sorted(members, key=lambda u: (-_rough_size(costs, members[u]), u))[:_EXAMINED]
    }
    unit = max(found, key=lambda u: (found[u], -u))
    names = tuple(program.order[i] for i in members[unit])
    layers = dict.fromkeys(program.nodes[name].layer for name in names)
    size = min(found[unit], peak(0, len(nodes)))
    with_loss = options.training and ends[unit] == len(nodes)
    return Piece(nodes=names, layers=tuple(layers), peak=size, with_loss=with_loss)


def devices_needed(
    program: Program,
    inputs: Sequence[Tensor],
    spec: PlacementSpec,
    memory: int,
    estimate: CostEstimates,
) -> int | None:
    """The fewest devices of ``memory`` bytes per replica on which ``program`` fits by estimates.

    They are like the first one of ``spec``; None if more than 64 are needed in all.
    """
    device, tables = spec.devices[0].model_copy(update={"memory": memory}), TableCache()
    most = max(1, _MAX_DEVICES // int(spec.replicas))

    def fits(count: int) -> bool:
        devices = [device.model_copy(update={"name": f"cuda:{i}"}) for i in range(count)]
        plan = build_plan(
            program,
            spec.with_devices(devices),
            inputs,
            estimate=estimate,
            tables=tables,
            stop_at_share=1.0,
        )
        return plan.fits

    low, high = 0, 1
    while not fits(high):
        low, high = high, high * 2
        if high > most:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _rough_size(costs: CostTable, members: Sequence[int]) -> int:
    """A rough estimate of bytes: four times the parameters, the saved tensors, and the largest transient."""
    inside = set(members)
    parameters = (t for t in costs.state if not t.is_buffer and inside.intersection(t.readers))
    state = sum(tensor.nbytes for tensor in parameters)
    saved = sum(v.nbytes for v in costs.values if inside.intersection(v.savers))
    nodes = [costs.nodes[i] for i in members]
    return 4 * state + saved + max(max(n.forward_transient, n.backward_transient) for n in nodes)
