"""What a model can be cut into, and how many devices that takes at the least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from placer.capture import Capture
from placer.cost import CostTable, estimate_costs
from placer.partition import Demands, choose_partition
from placer.partition.score import build_tables, optimizer_bytes, peak_bytes
from placer.partition.units import program_order, unit_graph
from placer.plan.build import device_slot
from placer.schedule import InFlight
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
    """How many pieces a model has, in all and by top-level layer (``""``: the model's own code)."""

    per_layer: dict[str, int]
    count: int


def count_pieces(capture: Capture) -> Pieces:
    """The pieces of ``capture``; a piece with nodes of two layers counts for both."""
    units = unit_graph(capture)
    per_layer: dict[str, int] = {}
    for unit in program_order(units):
        for top in {_top(capture, i) for i in units.nodes[unit]["nodes"]}:
            per_layer[top] = per_layer.get(top, 0) + 1
    return Pieces(per_layer=per_layer, count=len(units))


def largest_piece(
    capture: Capture, inputs: Sequence[Tensor], *, optimizer: str, training: bool
) -> Piece:
    """The piece with the highest peak for the whole batch at once (``inputs``)."""
    costs = estimate_costs(capture, inputs, training=training)
    kept = optimizer_bytes(optimizer if training else "sgd")
    alone = InFlight()
    units = unit_graph(capture)
    members = {unit: tuple(units.nodes[unit]["nodes"]) for unit in program_order(units)}
    nodes = [i for group in members.values() for i in group]
    ends = dict(zip(members, accumulate(len(group) for group in members.values()), strict=True))
    best: Piece | None = None
    for unit in sorted(members, key=lambda u: (-_rough_size(costs, members[u]), u))[:_EXAMINED]:
        first = ends[unit] - len(members[unit])
        cuts = sorted({0, first, ends[unit], len(nodes)})
        peaks = peak_bytes(build_tables(costs, nodes, cuts), alone, kept, training=training)
        at = cuts.index(first)
        if best is None or peaks[at, at] > best.peak:
            names = tuple(capture.order[i] for i in members[unit])
            layers = dict.fromkeys(capture.layer_of[name] for name in names)
            best = Piece(nodes=names, layers=tuple(layers), peak=int(peaks[at, at]))
    assert best is not None, "a model has at least one node"
    return best


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
