"""Rival placements: what other tools and people would do with the same model, as node -> device.

Every function takes a program, its costs and a number of devices, and returns a `Placement`: the index of a
device for every node. `plan_placement` turns one into a plan of placer's, so that all
rivals and placer are judged by the same prediction and the same ledger. A device may occur twice
along the chain, as in accelerate's maps; the plan then has more stages than devices.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.known_costs import known_costs
from placer.cost import CostTable
from placer.partition import DeviceSlot, PlanningOptions
from placer.partition.arrange import candidate_cuts
from placer.partition.candidate import StageCosts, solve_order
from placer.partition.chain import best_cuts
from placer.partition.stage_cost.optimizer import optimizer_bytes
from placer.partition.stage_cost.score import peak_bytes
from placer.partition.stage_cost.tables import build_tables
from placer.partition.units import random_order, unit_graph
from placer.plan.types import Plan
from placer.planner.build import build_plan
from placer.program import Program
from placer.schedule import InFlight
from placer.spec import PlacementSpec, resolve_layers


class RivalFailure(Exception):
    """The other tool cannot place this model."""


Placement = dict[str, int]  # node name -> index of its device
Rival = Callable[[Program, CostTable, int], Placement]


def equal_layer_counts(program: Program, costs: CostTable, k: int) -> Placement:
    """As many module calls on every device as on the next (one more on the first where k does not
    divide them), in program order."""
    chain = layer_chain(program)
    share, more = divmod(len(chain), k)
    return _place(chain, [share + (device < more) for device in range(k)])


def equal_parameters(program: Program, costs: CostTable, k: int) -> Placement:
    """Program order cut where the running sum of parameters is nearest to j / k of all of them.

    A parameter counts where it is first read.
    """
    chain = layer_chain(program)
    weights = _parameter_bytes(chain, costs)
    sums = [0, *itertools.accumulate(weights)]
    cuts = [0]
    for j in range(1, k):
        free = range(cuts[-1] + 1, len(chain) - (k - j) + 1)
        target = sums[-1] * j / k
        cuts.append(min(free, key=lambda c: abs(sums[c] - target), default=cuts[-1]))
    cuts.append(len(chain))
    return _place(chain, [b - a for a, b in itertools.pairwise(cuts)])


def balance_by_size(
    program: Program, costs: CostTable, k: int, *, param_scale: float = 4.0
) -> Placement:
    """torchgpipe's `balance_by_size` over the chain of module calls.

    A layer's size is the most bytes that its forward adds (what it saves and its result among
    them) plus ``param_scale`` times its parameters; torchgpipe's guide takes 4 for Adam. The chain
    is cut by `block_partition`. (torchgpipe 0.0.7, balance/profile.py and balance/__init__.py.)
    """
    chain = layer_chain(program)
    position = {name: i for i, name in enumerate(costs.names)}
    kept = [0] * (len(costs.names) + 1)
    for value in costs.values:
        if value.producer >= 0 and value.savers:
            kept[value.producer] += value.nbytes
    sizes = []
    parameters = _parameter_bytes(chain, costs)
    for names, weights in zip(chain, parameters, strict=True):
        live = most = 0
        for node in (position[name] for name in names):
            most = max(most, live + costs.nodes[node].forward_transient)
            live += kept[node]
        sizes.append(max(most, live) + param_scale * weights)
    return _place(chain, block_partition(sizes, k))


def balance_by_time(program: Program, costs: CostTable, k: int) -> Placement:
    """torchgpipe's `balance_by_time` over the chain of module calls.

    Here a layer's time is the larger of its FLOPs and its bytes of traffic, forward and backward,
    at 10 FLOPs per byte (a GPU's usual ratio in fp32), instead of a stop watch.
    """
    chain = layer_chain(program)
    node_times = np.zeros(len(costs.nodes))
    for operations in costs.work.operations().values():
        flops, traffic = np.zeros_like(node_times), np.zeros_like(node_times)
        for node, operation in operations:
            flops[node] += operation.flops
            traffic[node] += operation.nbytes
        node_times += np.maximum(flops / 10, traffic)
    position = {name: i for i, name in enumerate(costs.names)}
    times = [sum(float(node_times[position[name]]) for name in names) for names in chain]
    return _place(chain, block_partition(times, k))


def block_partition(sizes: Sequence[float], k: int) -> list[int]:
    """Lengths of k consecutive blocks whose sums differ by at most the largest size.

    I. Bárány and V. S. Grinberg, "Block partitions of sequences", Israel Journal of Mathematics 206
    (2015), arXiv:1308.2452, as torchgpipe runs it: sizes are mapped to [0, 1] first, and the blocks
    start with equal counts. O(k n^3). The bound holds for the mapped sizes only, where the smallest
    layer weighs nothing; ties go to the later block. Raises ValueError for more blocks than sizes.

    >>> block_partition([1, 2, 3, 4, 5, 6], 2)
    [4, 2]
    """
    n = len(sizes)
    if not 1 <= k <= n:
        raise ValueError(f"{n} sizes cannot make {k} blocks")
    low, high = min(sizes), max(sizes)
    scaled = [(size - low) / (high - low) if high > low else 0.0 for size in sizes]
    ends = [n // k * (block + 1) for block in range(k - 1)] + [n]

    def total(block: int) -> float:
        return sum(scaled[ends[block - 1] if block else 0 : ends[block]])

    while True:
        most, largest = max((total(block), block) for block in range(k))
        while True:
            least, smallest = min((total(block), block) for block in range(k))
            if most <= least + 1:
                return [b - a for a, b in itertools.pairwise([0, *ends])]
            giver = smallest - 1 if largest < smallest else smallest + 1
            ends[min(giver, smallest)] += -1 if giver < smallest else 1
            if giver == largest:
                break


def accelerate_map(
    program: Program, costs: CostTable, k: int, *, memory: int = 16 * 2**30
) -> Placement:
    """accelerate's `infer_auto_device_map` for k devices of ``memory`` bytes; it counts weights."""
    from accelerate import infer_auto_device_map

    with _accelerate():
        found = infer_auto_device_map(program.model, max_memory=dict.fromkeys(range(k), memory))
    return _follow_modules(program, found)


def accelerate_balanced(
    program: Program, costs: CostTable, k: int, *, memory: int = 16 * 2**30
) -> Placement:
    """The same under `get_balanced_memory`, which is ``device_map="balanced"`` in transformers."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    with _accelerate():
        limits = get_balanced_memory(program.model, max_memory=dict.fromkeys(range(k), memory))
        found = infer_auto_device_map(program.model, max_memory=limits)
    return _follow_modules(program, found)


def hand_split(program: Program, layers: Mapping[str, int]) -> Placement:
    """A split written by hand: patterns of layers (as in a spec) -> device."""
    paths = [name for name, _ in program.model.named_modules(remove_duplicate=False)]
    placed, problems = resolve_layers({k: str(v) for k, v in layers.items()}, paths)
    if problems:
        raise ValueError("; ".join(map(str, problems)))
    return _follow_modules(program, {layer: int(device) for layer, device in placed.items()})


def one_order(
    program: Program,
    costs: CostTable,
    chain: Sequence[DeviceSlot],
    options: PlanningOptions,
    *,
    seed: int = 0,
) -> Placement:
    """The best cuts of one arbitrary topological order, by the planner's own scores.

    ``seed`` draws the order; it is not one of those that the planner itself draws.
    """
    units = unit_graph(program)
    order = random_order(units, random.Random(seed))
    nodes = [node for unit in order for node in units.nodes[unit]["nodes"]]
    tables = build_tables(costs, nodes, candidate_cuts(units, order, costs, {}))
    costs = StageCosts(tables, chain, [None] * len(nodes), options)
    found = solve_order(costs, nodes)
    assert found is not None
    boundaries = [tables.cuts[cut] for cut in found.cuts]
    return {
        program.order[node]: device
        for device, (begin, end) in enumerate(itertools.pairwise(boundaries))
        for node in nodes[begin:end]
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePeaks:
    """Every stage that there can be: ``peaks[x, y]`` bytes from downset x up to downset y + 1."""

    downsets: tuple[frozenset[int], ...]  # of nodes, by size
    peaks: NDArray[np.float64]  # inf where the one does not hold the other


def all_stage_peaks(
    program: Program, costs: CostTable, *, most_pairs: int = 40_000
) -> StagePeaks | None:
    """The predicted peak of every contiguous stage, its nodes in program order (Adam, one
    micro-batch, anywhere in the chain). None where there are more than ``most_pairs``."""
    units = unit_graph(program)
    found = all_downsets(units, int((2 * most_pairs) ** 0.5))
    if found is None:
        return None
    downsets = tuple(
        frozenset(node for unit in downset for node in units.nodes[unit]["nodes"])
        for downset in found
    )
    peaks = np.full((len(downsets) - 1,) * 2, np.inf)
    for x, before in enumerate(downsets[:-1]):
        above = {y for y in range(x + 1, len(downsets)) if before < downsets[y]}
        while above:  # those that follow each other in program order share their tables
            rest = sorted(set(range(len(program.order))) - before)
            first = min(above)
            inside = sorted(downsets[first] - before)
            after = [node for node in rest if node not in downsets[first]]
            nodes = [*sorted(before), *inside, *after]
            ends = {first: len(before) + len(inside)}
            if nodes[len(before) :] == rest:
                ends = {y: len(downsets[y]) for y in above
                        if set(nodes[: len(downsets[y])]) == downsets[y]}  # fmt: skip
            cuts = sorted({0, len(before), *ends.values(), len(nodes)})
            tables = build_tables(costs, nodes, cuts)
            row = peak_bytes(
                tables, InFlight(), optimizer_bytes("adam", together=True), training=True
            )
            for y, end in ends.items():
                peaks[x, y - 1] = row[cuts.index(len(before)), cuts.index(end) - 1]
            above -= set(ends)
    return StagePeaks(downsets=downsets, peaks=peaks)


def exact_peaks(program: Program, stages: StagePeaks, k: int) -> Placement:
    """The contiguous placement on k equal devices of least largest peak, as predicted."""
    peaks = stages.peaks
    result = best_cuts(
        [peaks] * k, [np.isfinite(peaks)] * k, combine="max", may_be_empty=[True] * k
    )
    assert result is not None
    boundaries = itertools.pairwise(stages.downsets[cut] for cut in result[0])
    return {
        program.order[node]: device
        for device, (before, after) in enumerate(boundaries)
        for node in after - before
    }


def all_downsets(units: nx.DiGraph, most: int) -> list[frozenset[int]] | None:
    """Every set of units that has all predecessors of its units, by size; None if over ``most``."""
    level = {frozenset[int]()}
    found: list[frozenset[int]] = []
    while level:
        found += sorted(level, key=sorted)
        if len(found) > most:
            return None
        level = {
            ideal | {unit}
            for ideal in level
            for unit in units
            if unit not in ideal and all(before in ideal for before in units.predecessors(unit))
        }
    return found


RIVALS: dict[str, Rival] = {
    "equal layer counts": equal_layer_counts,
    "equal parameters": equal_parameters,
    "torchgpipe balance_by_size": balance_by_size,
    "torchgpipe balance_by_time": balance_by_time,
    "accelerate auto": accelerate_map,
    "accelerate balanced": accelerate_balanced,
}


def plan_placement(
    program: Program,
    spec: PlacementSpec,
    inputs: Sequence[Tensor],
    placement: Placement,
    *,
    costs: CostTable | None = None,
) -> Plan:
    """The plan with every node where ``placement`` puts it; ``spec`` names the devices.

    Nodes that must stay together (a view and the write to its base, tied weights) go where the
    first of them is.
    """
    names = [device.name for device in spec.devices]
    used = {names[device] for device in placement.values()}
    only = spec.with_devices([device for device in spec.devices if device.name in used])
    pins = {node: names[device] for node, device in placement.items()}
    estimate = None if costs is None else known_costs(costs)
    return build_plan(program, only, inputs, pins=pins, estimate=estimate)


def layer_chain(program: Program) -> list[list[str]]:
    """The nodes in program order, cut before every call of a torch.nn layer.

    Operations of a parent's forward between two calls go with the call before them.
    """
    calls = {node.name for node in program.graph.nodes if node.op == "call_module"}
    chain: list[list[str]] = [[]]
    opened = False
    for name in program.order:
        if name in calls and opened:
            chain.append([])
        opened = opened or name in calls
        chain[-1].append(name)
    return chain


def _place(chain: Sequence[Sequence[str]], lengths: Iterable[int]) -> Placement:
    devices = [device for device, length in enumerate(lengths) for _ in range(length)]
    return {name: device for names, device in zip(chain, devices, strict=True) for name in names}


def _parameter_bytes(chain: Sequence[Sequence[str]], costs: CostTable) -> list[int]:
    """For each group of the chain, the bytes of the parameters that it reads first."""
    position = {name: i for i, name in enumerate(costs.names)}
    group_of = {position[name]: i for i, names in enumerate(chain) for name in names}
    found = [0] * len(chain)
    for tensor in costs.state:
        if tensor.readers and not tensor.is_buffer:
            found[min(group_of[node] for node in tensor.readers)] += tensor.nbytes
    return found


def _follow_modules(program: Program, devices: Mapping[str, Any]) -> Placement:
    """Nodes of a module that the map covers go to its device, others where their input is.

    That is what accelerate's hooks do: inputs are moved to a module's device, and what runs
    between modules runs where the last module left its result.
    """
    nodes = {node.name: node for node in program.graph.nodes}
    placement: Placement = {}
    unknown: list[str] = []
    for name in program.order:
        path = program.nodes[name].layer
        while path and path not in devices:
            path = path.rpartition(".")[0]
        inputs = [n.name for n in nodes[name].all_input_nodes if n.name in placement]
        state = [s for s in program.nodes[name].reads if s in devices]  # a bare parameter
        if path in devices:
            placement[name] = int(devices[path])
        elif state:
            placement[name] = int(devices[state[0]])
        elif inputs:
            placement[name] = max((program.order.index(n), placement[n]) for n in inputs)[1]
        else:
            unknown.append(name)
    for name in reversed(unknown):  # nothing placed comes before it: with its first reader
        readers = [placement[u.name] for u in nodes[name].users if u.name in placement]
        placement[name] = readers[0] if readers else 0
    return placement


@contextmanager
def _accelerate() -> Iterator[None]:
    """Run accelerate without its warnings about missing GPUs. It fails for modules under two names."""
    logger = logging.getLogger("accelerate.utils.modeling")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except IndexError as error:
        raise RivalFailure("accelerate cannot map modules that have two names") from error
    finally:
        logger.setLevel(level)
