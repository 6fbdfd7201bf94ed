"""How evenly a placement divides a training step's memory, and what stands in the way.

For 2, 3 and 4 devices: the largest peak of any device, by the ledger, over an even share of one
device's peak. A share of 1.15 is the goal. No placement of whole nodes can be below the largest
node's own peak (what its stage needs if it holds nothing else); if that alone is more than 1.15
shares, the goal is out of reach and the page says so. Of more nodes than devices, two must share
a device: if any two of N + 1 nodes need that much on a device with nothing else, no placement on N devices,
contiguous or not, is below it. Adam, batch 1, fp32, no recomputation.

    python -m benchmarks.evenness [MODEL ...]
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import networkx as nx
import numpy as np

from benchmarks.capacity import GIB, SUBJECTS, Case, Search
from benchmarks.loss import LOSS
from benchmarks.record import write_result
from placer.partition.stage_cost.optimizer import optimizer_bytes
from placer.partition.stage_cost.score import peak_bytes
from placer.partition.stage_cost.shared import SharedPeaks
from placer.partition.stage_cost.tables import build_tables
from placer.partition.units import program_order, unit_graph
from placer.planner.build import build_plan
from placer.schedule import InFlight
from placer.simulation import simulate_plan
from placer.spec import PlacementSpec

GOAL = 1.15
EDGE = 128
LARGEST_NODES = 30  # that are looked at in pairs


def largest_node(case: Case) -> tuple[str, float, dict[tuple[int, int], float]]:
    """The node (or nodes that must stay together) whose stage of its own peaks highest; bytes.

    And the peaks of a device that has two of the largest such nodes, and nothing else.
    """
    units = unit_graph(case.program)
    groups = [units.nodes[unit]["nodes"] for unit in program_order(units)]
    cuts = np.cumsum([0, *map(len, groups)]).tolist()
    nodes = [node for group in groups for node in group]
    tables = build_tables(case.costs, nodes, cuts)
    kept = optimizer_bytes("adam", together=True)
    alone = np.diagonal(peak_bytes(tables, InFlight(), kept, training=True))
    index = int(np.argmax(alone))
    shared = SharedPeaks(tables, case.costs, nodes, kept)
    largest = sorted(np.argsort(-alone, kind="stable")[:LARGEST_NODES].tolist())
    pairs = {
        (i, j): shared.peak([(i, j + 1)] if j == i + 1 else [(i, i + 1), (j, j + 1)])
        for i, j in itertools.combinations(largest, 2)
    }
    return case.program.order[groups[index][0]], float(alone[index]), pairs


def two_of(count: int, pairs: dict[tuple[int, int], float]) -> float:
    """The largest b such that ``count`` nodes pairwise need at least b bytes."""
    for least in sorted(set(pairs.values()), reverse=True):
        graph = nx.Graph([pair for pair, peak in pairs.items() if peak >= least])
        if max((len(clique) for clique in nx.find_cliques(graph)), default=0) >= count:
            return least
    return 0.0


def rows(names: list[str]) -> Iterator[list[object]]:
    for name in names:
        case = Search(SUBJECTS[name]).case(EDGE)
        node, alone, pairs = largest_node(case)
        whole = None
        for devices in (1, 2, 3, 4):
            names_ = [f"cuda:{i}" for i in range(devices)]
            spec = PlacementSpec.model_validate({"devices": names_, "objective": "memory", **LOSS})
            plan = build_plan(case.program, spec, case.inputs)
            report = simulate_plan(case.program, plan, case.inputs)
            peaks = [device.peak for device in report.devices]
            whole = whole or max(peaks)
            share, floor = max(peaks) * devices / whole, alone * devices / whole
            two = two_of(devices + 1, pairs)
            beyond = max(floor, two * devices / whole) > GOAL
            verdict = "yes" if share <= GOAL else ("impossible" if beyond else "no")
            yield [
                f"{name}, {EDGE}^3",
                devices,
                " + ".join(f"{peak / GIB:.3f}" for peak in peaks),
                f"{share:.2f}",
                f"{floor:.2f} ({node}, {alone / GIB:.3f} GiB)",
                f"{two * devices / whole:.2f} ({two / GIB:.3f} GiB)",
                verdict,
            ]


def main() -> None:
    names = sys.argv[1:] or list(SUBJECTS)
    write_result(
        "evenness",
        "How evenly the memory of a training step is divided",
        "python -m benchmarks.evenness",
        [
            "model",
            "devices",
            "peaks, GiB",
            "largest / even share",
            "largest node alone / even share",
            "two of N + 1 nodes / even share",
            f"within {GOAL}?",
        ],
        rows(names),
        f"Even share: one device's peak over the number of devices. Goal: {GOAL}. impossible: the "
        "largest node's own peak, or that of some two of N + 1 nodes, is above the goal, wherever the "
        "cuts are. Two of N + 1 nodes: any two of them come to so much on one device.",
    )


if __name__ == "__main__":
    main()
