"""What a model can be cut into, and how many devices that takes at the least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from placer.capture import Capture
from placer.cost import CostTable, estimate_costs
from placer.partition import Demands, choose_partition
from placer.partition.score import InFlight, build_tables, optimizer_copies, peak_bytes
from placer.partition.units import program_order, unit_graph
from placer.plan.build import device_slot
from placer.spec import DeviceSpec, PlacementSpec

_EXAMINED = 8  # largest pieces, by a rough measure, whose peak is computed exactly
_MOST_DEVICES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Nodes that stay on one device, and the peak bytes of a stage that holds them alone."""

    nodes: tuple[str, ...]
    layers: tuple[str, ...]
    peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """All pieces of a model by top-level layer; ``largest`` is the one with the highest peak."""

    per_layer: dict[str, int]  # "" is the model's own code
    count: int
    largest: Piece


def find_pieces(
    capture: Capture, inputs: Sequence[Tensor], *, optimizer: str, training: bool
) -> Pieces:
    """The pieces of ``capture`` for a whole batch, shaped like ``inputs``, at once."""
    costs = estimate_costs(capture, inputs, training=training)
    units = unit_graph(capture)
    order = program_order(units)
    per_layer: dict[str, int] = {}
    for unit in order:
        for top in {_top(capture, i) for i in units.nodes[unit]["nodes"]}:
            per_layer[top] = per_layer.get(top, 0) + 1
    sizes = {unit: _rough_size(costs, units.nodes[unit]["nodes"]) for unit in order}
    copies = optimizer_copies(optimizer) if training else 0.0
    nodes = [i for unit in order for i in units.nodes[unit]["nodes"]]
    start: dict[int, int] = {}
    for unit in order:
        start[unit] = sum(len(units.nodes[u]["nodes"]) for u in start)
    best: Piece | None = None
    for unit in sorted(order, key=lambda u: (-sizes[u], u))[:_EXAMINED]:
        members = units.nodes[unit]["nodes"]
        first, last = start[unit], start[unit] + len(members)
        cuts = sorted({0, first, last, len(nodes)})
        tables = build_tables(costs, nodes, cuts)
        alone = InFlight(microbatches=1, most=1, after_backward=1)
        peaks = peak_bytes(tables, alone, copies, training=training)
        at = cuts.index(first)
        peak = int(peaks[at, at])
        if best is None or peak > best.peak:
            names = tuple(capture.order[i] for i in members)
            layers = dict.fromkeys(capture.layer_of[name] for name in names)
            best = Piece(nodes=names, layers=tuple(layers), peak=peak)
    assert best is not None, "a model has at least one node"
    return Pieces(per_layer=per_layer, count=len(order), largest=best)


def devices_needed(
    capture: Capture,
    inputs: Sequence[Tensor],
    memory: int,
    *,
    optimizer: str,
    training: bool,
) -> int | None:
    """The fewest cuda devices of ``memory`` bytes each that the planner fits, None beyond 64."""
    costs = estimate_costs(capture, inputs, training=training)
    demands = Demands(objective="memory", optimizer=optimizer, training=training)

    def fits(count: int) -> bool:
        spec = PlacementSpec(
            devices=tuple(DeviceSpec(name=f"cuda:{i}", memory=memory) for i in range(count))
        )
        slots = [device_slot(device, spec) for device in spec.devices]
        return choose_partition(capture, costs, slots, {}, demands).fits

    low, high = 0, 1
    while not fits(high):
        low, high = high, high * 2
        if high > _MOST_DEVICES:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _top(capture: Capture, node: int) -> str:
    return capture.layer_of[capture.order[node]].split(".")[0]


def _rough_size(costs: CostTable, members: Sequence[int]) -> int:
    """Parameters, what is saved for the members' backward, and their largest transient."""
    inside = set(members)
    names = {costs.alias_of[name] for i in members for name in costs.parameters_of[i]}
    state = sum(costs.state_nbytes[name] for name in names)
    saved = sum(v.nbytes for v in costs.values if inside.intersection(v.savers))
    nodes = [costs.nodes[i] for i in members]
    return 4 * state + saved + max(max(n.forward_transient, n.backward_transient) for n in nodes)
