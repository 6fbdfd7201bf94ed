"""How evenly a placement divides a training step's memory, and what stands in the way.

For 2, 3 and 4 devices: the largest peak of any device, by the ledger, over an even share of one
device's peak. A share of 1.15 is the goal. No placement of whole nodes can be below the largest
node's own peak (what its stage needs if it holds nothing else); where that alone is more than 1.15
shares, the goal is out of reach and the page says so. Adam, batch 1, fp32, no recomputation.

    python -m benchmarks.evenness [MODEL ...]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np

from benchmarks.capacity import GIB, SUBJECTS, Case, Search
from benchmarks.record import write_result
from placer.partition.score import build_tables, optimizer_bytes, peak_bytes
from placer.partition.units import program_order, unit_graph
from placer.plan.build import build_plan
from placer.schedule import InFlight
from placer.simulation import simulate_plan
from placer.spec import PlacementSpec

GOAL = 1.15
EDGE = 128


def largest_node(case: Case) -> tuple[str, float]:
    """The node (or nodes that must stay together) whose stage of its own peaks highest; bytes."""
    units = unit_graph(case.capture)
    groups = [units.nodes[unit]["nodes"] for unit in program_order(units)]
    cuts = np.cumsum([0, *map(len, groups)]).tolist()
    tables = build_tables(case.costs, [node for group in groups for node in group], cuts)
    peaks = peak_bytes(tables, InFlight(), optimizer_bytes("adam", together=True), training=True)
    alone = np.diagonal(peaks)
    index = int(np.argmax(alone))
    return case.capture.order[groups[index][0]], float(alone[index])


def rows(names: list[str]) -> Iterator[list[object]]:
    for name in names:
        case = Search(SUBJECTS[name]).case(EDGE)
        node, alone = largest_node(case)
        whole = None
        for devices in (1, 2, 3, 4):
            names_ = [f"cuda:{i}" for i in range(devices)]
            spec = PlacementSpec.model_validate({"devices": names_, "objective": "memory"})
            plan = build_plan(case.capture, spec, case.inputs)
            report = simulate_plan(case.capture, plan, case.inputs)
            peaks = [device.peak for device in report.devices]
            whole = whole or max(peaks)
            share, floor = max(peaks) * devices / whole, alone * devices / whole
            verdict = "yes" if share <= GOAL else ("impossible" if floor > GOAL else "no")
            yield [
                f"{name}, {EDGE}^3",
                devices,
                " + ".join(f"{peak / GIB:.3f}" for peak in peaks),
                f"{share:.2f}",
                f"{floor:.2f} ({node}, {alone / GIB:.3f} GiB)",
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
            f"within {GOAL}?",
        ],
        rows(names),
        f"Even share: one device's peak over the number of devices. Goal: {GOAL}. impossible: the "
        "largest node's own peak is above the goal, wherever the cuts are.",
    )


if __name__ == "__main__":
    main()
