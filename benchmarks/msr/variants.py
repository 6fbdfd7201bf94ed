"""Variants of the published workloads: files of the same kind that nobody tuned for.

Each is a change of one file, drawn from a seed of its own: other device counts, memory near the
least that a placement needs, costs ten times as large or as small, perturbed or equal times, merged
or split colour classes, a training graph made of an inference graph, and the forward part alone.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import networkx as nx
import numpy as np

from benchmarks.msr.solver.solve import solve
from benchmarks.msr.workload import Workload, partition_problem
from placer.partition import PartitionProblem, SharedValue

Data = dict[str, Any]
Random = np.random.Generator

DEVICES = (1, 2, 3, 4, 8, 12, 16)
TIGHT = (1.0, 1.01, 1.05, 1.2, 1.5)  # of the least limit that some placement keeps


def variants(workload: Workload) -> Iterator[Workload]:
    """All variants of ``workload``, one after the other; the same ones every time."""
    for devices in DEVICES:
        if devices != workload.num_devices:
            changed = _variant(workload, f"{devices} devices", maxFPGAs=devices)
            limit = max(changed.data["maxSizePerFPGA"], least_limit(changed))
            yield replace(changed, data={**changed.data, "maxSizePerFPGA": limit})
    for devices in dict.fromkeys((workload.num_devices, 4)):
        least = least_limit(replace(workload, data={**workload.data, "maxFPGAs": devices}))
        for share in TIGHT:
            name = f"memory {share:g} x least, {devices} devices"
            yield _variant(workload, name, maxSizePerFPGA=share * least, maxFPGAs=devices)
    for name, change in CHANGES.items():
        data = copy.deepcopy(workload.data)
        change(data, np.random.default_rng(zlib.crc32(f"{workload.name} {name}".encode())))
        changed = Workload(name=f"{workload.name}: {name}", data=data)
        yield changed
        tight = 1.05 * least_limit(changed)
        if tight < changed.data["maxSizePerFPGA"]:
            yield _variant(changed, "memory 1.05 x least", maxSizePerFPGA=tight)


def least_limit(workload: Workload) -> float:
    """The least memory limit that a placement of ``workload`` keeps, as placer's solver finds it."""
    solution = solve(size_problem(workload))
    assert solution is not None
    sizes = np.zeros(workload.num_devices)
    for node, stage in zip(workload.data["nodes"], solution.stage_of, strict=True):
        sizes[stage] += node["size"]
    return float(sizes.max()) * (1 + 1e-12)


def size_problem(workload: Workload) -> PartitionProblem:
    """Sizes as the load, nothing else."""
    problem = partition_problem(workload)
    slots = tuple(
        replace(slot, seconds=slot.nbytes, seconds_per_byte=0.0, budget=None)
        for slot in problem.slots
    )
    ties = tuple(SharedValue(nbytes=v.nbytes, units=v.units) for v in problem.values)
    return replace(problem, slots=slots, values=ties)


def _variant(workload: Workload, name: str, **fields: float) -> Workload:
    joint = ", " if ": " in workload.name else ": "
    return Workload(name=f"{workload.name}{joint}{name}", data={**workload.data, **fields})


def _scale_costs(factor: float) -> Callable[[Data, Random], None]:
    def change(data: Data, rng: Random) -> None:
        for edge in data["edges"]:
            edge["cost"] *= factor

    return change


def _perturb(data: Data, rng: Random) -> None:
    """Times, sizes and costs times a log-normal number each."""
    for node in data["nodes"]:
        node["fpgaLatency"] *= float(rng.lognormal(0.0, 0.7))
        node["size"] *= float(rng.lognormal(0.0, 0.7))
    factor = {node["id"]: float(rng.lognormal(0.0, 0.7)) for node in data["nodes"]}
    for edge in data["edges"]:
        edge["cost"] *= factor[edge["sourceId"]]


def _shuffle_times(data: Data, rng: Random) -> None:
    """The times of the file, each on another node."""
    times = rng.permutation([node["fpgaLatency"] for node in data["nodes"]])
    for node, seconds in zip(data["nodes"], times.tolist(), strict=True):
        node["fpgaLatency"] = seconds


def _equal_times(data: Data, rng: Random) -> None:
    for node in data["nodes"]:
        node["fpgaLatency"] = 1.0


def _rename(data: Data, rng: Random) -> None:
    """Other node ids, nodes and edges in another order."""
    new = dict(
        zip(
            [node["id"] for node in data["nodes"]],
            (rng.permutation(len(data["nodes"])) + 1000).tolist(),
            strict=True,
        )
    )
    for node in data["nodes"]:
        node["id"] = new[node["id"]]
    for edge in data["edges"]:
        edge["sourceId"], edge["destId"] = new[edge["sourceId"]], new[edge["destId"]]
    rng.shuffle(data["nodes"])
    rng.shuffle(data["edges"])


def _merge_classes(data: Data, rng: Random) -> None:
    """One in twenty edges joins the colour classes of its ends."""
    joined: nx.Graph = nx.Graph()
    colour = {
        node["id"]: ("class", node["colorClass"])
        if node.get("colorClass") is not None
        else ("node", node["id"])
        for node in data["nodes"]
    }
    joined.add_nodes_from(colour.values())
    for edge in data["edges"]:
        if rng.random() < 0.05:
            joined.add_edge(colour[edge["sourceId"]], colour[edge["destId"]])
    number = {c: i for i, group in enumerate(nx.connected_components(joined)) for c in group}
    for node in data["nodes"]:
        node["colorClass"] = number[colour[node["id"]]]


def _split_classes(data: Data, rng: Random) -> None:
    """One node in twenty leaves its colour class, forward nodes and backward ones."""
    for node in data["nodes"]:
        if rng.random() < 0.05:
            node["colorClass"] = None


def _forward_only(data: Data, rng: Random) -> None:
    backward = {node["id"] for node in data["nodes"] if node["isBackwardNode"]}
    data["nodes"] = [node for node in data["nodes"] if node["id"] not in backward]
    data["edges"] = [e for e in data["edges"] if not {e["sourceId"], e["destId"]} & backward]


def _mirror(data: Data, rng: Random) -> None:
    """A training graph: every node gets a backward node of twice the time, in one colour class."""
    first = max(node["id"] for node in data["nodes"]) + 1
    back = {node["id"]: first + i for i, node in enumerate(data["nodes"])}
    colours: dict[Any, int] = {}
    for node in list(data["nodes"]):
        colour = node.get("colorClass")
        key = ("node", node["id"]) if colour is None else ("class", colour)
        node["colorClass"] = colours.setdefault(key, len(colours))
        latency = 2.0 * node["fpgaLatency"]
        data["nodes"].append(
            {**node, "id": back[node["id"]], "fpgaLatency": latency, "isBackwardNode": True}
        )
    entering: dict[int, float] = {}  # the gradient of a node's output is as large as the output
    for edge in data["edges"]:
        entering[edge["destId"]] = max(entering.get(edge["destId"], 0.0), edge["cost"])
    for edge in list(data["edges"]):
        a, b = edge["sourceId"], edge["destId"]
        data["edges"].append({"sourceId": back[b], "destId": back[a], "cost": entering[b]})
    leaving = {edge["sourceId"] for edge in data["edges"] if edge["sourceId"] < first}
    for node in sorted(leaving):  # what the forward saved
        cost = next(e["cost"] for e in data["edges"] if e["sourceId"] == node)
        data["edges"].append({"sourceId": node, "destId": back[node], "cost": cost})


def _twice(*, chained: bool) -> Callable[[Data, Random], None]:
    """Two of the graph, the second after the first or beside it."""

    def change(data: Data, rng: Random) -> None:
        first = max(node["id"] for node in data["nodes"]) + 1
        colours = [n["colorClass"] for n in data["nodes"] if n.get("colorClass") is not None]
        shift = max(colours, default=0) + 1
        forward = {node["id"] for node in data["nodes"] if not node["isBackwardNode"]}
        sources = forward - {e["destId"] for e in data["edges"]}
        sinks = forward - {
            e["sourceId"] for e in data["edges"] if {e["sourceId"], e["destId"]} <= forward
        }
        for node in list(data["nodes"]):
            colour = node.get("colorClass")
            colour = None if colour is None else colour + shift
            data["nodes"].append({**node, "id": node["id"] + first, "colorClass": colour})
        cost = {e["sourceId"]: e["cost"] for e in data["edges"]}
        for edge in list(data["edges"]):
            a, b = edge["sourceId"] + first, edge["destId"] + first
            data["edges"].append({**edge, "sourceId": a, "destId": b})
        for a in sorted(sinks) if chained else ():
            for b in sorted(sources):
                data["edges"].append({"sourceId": a, "destId": b + first, "cost": cost.get(a, 1.0)})

    return change


CHANGES: dict[str, Callable[[Data, Random], None]] = {
    "costs x 10": _scale_costs(10.0),
    "costs / 10": _scale_costs(0.1),
    "costs x 100": _scale_costs(100.0),
    "no costs": _scale_costs(0.0),
    "perturbed": _perturb,
    "shuffled times": _shuffle_times,
    "equal times": _equal_times,
    "renamed": _rename,
    "merged classes": _merge_classes,
    "split classes": _split_classes,
    "forward only": _forward_only,
    "copied": _mirror,
    "twice, chained": _twice(chained=True),
    "twice, side by side": _twice(chained=False),
}
