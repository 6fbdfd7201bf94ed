"""A workload file as a partition problem, and a checker that knows nothing of the partitioner."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np

from placer.errors import PlacerError
from placer.partition import PartitionProblem, SharedValue, StageSlot


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A file, as read."""

    name: str
    data: dict[str, Any]

    @property
    def num_devices(self) -> int:
        return int(self.data["maxFPGAs"])


class WorkloadError(PlacerError):
    """A file is not a placement workload, or has no placement."""


_NODE = {"id": int, "fpgaLatency": float, "size": float, "isBackwardNode": bool}
_EDGE = {"sourceId": int, "destId": int, "cost": float}
_COLOUR = (int, str, type(None))
_ROUNDING = 1e-12  # of sums of sizes; the limit of the solver, too
_LARGEST = 1e300  # of a sum, so that no sum of these is infinite
_FILE = {"nodes": list, "edges": list, "maxFPGAs": int, "maxSizePerFPGA": float}


def read_workload(path: str | Path) -> Workload:
    """The workload in ``path``; raises ``WorkloadError`` with the first thing that is wrong."""
    path = Path(path)
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise WorkloadError(str(path), f"cannot be read as JSON: {error}") from error
    problem = _first_problem(data)
    if problem is not None:
        raise WorkloadError(str(path), problem, "the format is in shared/workloads/msr/README.md")
    return Workload(name=path.stem, data=data)


def _first_problem(data: Any) -> str | None:
    problem = _wrong_fields("the file", data, _FILE)
    if problem is not None:
        return problem
    if data["maxFPGAs"] < 1:
        return f"maxFPGAs is {data['maxFPGAs']}; a placement needs at least 1 device"
    known: set[int] = set()
    for i, node in enumerate(data["nodes"]):
        problem = _wrong_fields(f"nodes[{i}]", node, _NODE)
        if problem is not None:
            return problem
        if node["id"] in known:
            return f"nodes[{i}] has the id {node['id']} of an earlier node"
        if not isinstance(node.get("colorClass"), _COLOUR):
            return f"nodes[{i}] has 'colorClass': {node['colorClass']!r}; it must be of type int"
        if not node.get("supportedOnFpga", True):
            return f"nodes[{i}] does not run on an accelerator, and only these are placed"
        known.add(node["id"])
    for i, edge in enumerate(data["edges"]):
        problem = _wrong_fields(f"edges[{i}]", edge, _EDGE)
        if problem is not None:
            return problem
        unknown = {edge["sourceId"], edge["destId"]} - known
        if unknown:
            return f"edges[{i}] has an end that is no node: {min(unknown)}"
    total = sum(float(node["fpgaLatency"]) for node in data["nodes"])
    total += 2 * sum(float(edge["cost"]) for edge in data["edges"])  # out of a device, and in
    if max(total, sum(float(node["size"]) for node in data["nodes"])) > _LARGEST:
        return f"its latencies and costs, or its sizes, add up to more than {_LARGEST:g}"
    return None


def _wrong_fields(where: str, found: Any, fields: Mapping[str, type]) -> str | None:
    """What is wrong with the types of ``fields`` in ``found``; numbers are finite and not negative."""
    if not isinstance(found, dict):
        return f"{where} is not an object"
    for field, kind in fields.items():
        if field not in found:
            return f"{where} has no {field!r}"
        value = found[field]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind is float:
            if not number or not 0 <= value <= _LARGEST:
                return f"{where} has {field!r}: {value!r:.40}; it must be a number from 0 to {_LARGEST:g}"
        elif kind is bool:  # the files have both true and 1
            if value not in (0, 1):
                return f"{where} has {field!r}: {value!r}; it must be true or false"
        elif not isinstance(value, kind) or (kind is int and not number):
            return f"{where} has {field!r}: {value!r}; it must be of type {kind.__name__}"
    return None


def partition_problem(workload: Workload) -> PartitionProblem:
    """Units are the file's nodes, in its order; only forward edges order the stages.

    The nodes of a colour class are on a cycle of edges: they share a stage.

    Accelerators only: what a file says of CPUs (``maxCPUs``, ``cpuLatency``) is not read.
    """
    nodes, edges = workload.data["nodes"], workload.data["edges"]
    index = {node["id"]: i for i, node in enumerate(nodes)}
    backward = [bool(node["isBackwardNode"]) for node in nodes]
    consumers: dict[int, set[int]] = {}
    cost: dict[int, float] = {}
    forward = set()
    for edge in edges:
        source, target = index[edge["sourceId"]], index[edge["destId"]]
        consumers.setdefault(source, set()).add(target)
        cost[source] = max(cost.get(source, 0.0), float(edge["cost"]))
        if not backward[source] and not backward[target]:
            forward.add((source, target))
    classes: dict[Any, list[int]] = {}
    for i, node in enumerate(nodes):
        if node.get("colorClass") is not None:
            classes.setdefault(node["colorClass"], []).append(i)
    tied = {(a, b) for group in classes.values() for a, b in itertools.pairwise([*group, group[0]])}
    slot = StageSlot(
        device="accelerator",
        seconds=np.array([float(node["fpgaLatency"]) for node in nodes]),
        seconds_per_byte=1.0,  # a file gives the time to move an output, not its bytes
        nbytes=np.array([float(node["size"]) for node in nodes]),
        budget=float(workload.data["maxSizePerFPGA"]),
    )
    return PartitionProblem(
        num_units=len(nodes),
        edges=tuple(sorted(forward | {(a, b) for a, b in tied if a != b})),
        values=tuple(
            SharedValue(nbytes=cost[i], units=(i, *sorted(consumers[i] - {i})))
            for i in sorted(consumers)
        ),
        slots=(slot,) * workload.num_devices,
    )


def check_placement(workload: Workload, devices: Sequence[Sequence[int]]) -> float:
    """The largest load of ``devices`` (node ids of each), from the file alone.

    Raises ``ValueError`` where a rule of the workloads is broken: every node once, colours
    together, sizes within the limit, and an order of the devices in which forward edges go forwards.
    """
    nodes, edges = workload.data["nodes"], workload.data["edges"]
    home: dict[int, int] = {}
    for d, ids in enumerate(devices):
        for i in ids:
            if i in home:
                raise ValueError(f"node {i} is on devices {home[i]} and {d}")
            home[i] = d
    missing = {node["id"] for node in nodes} ^ set(home)
    if missing or len(devices) > workload.num_devices:
        raise ValueError(f"nodes {sorted(missing)[:5]} are not placed, or too many devices")
    colours: dict[Any, set[int]] = {}
    sizes, loads = [0.0] * len(devices), [0.0] * len(devices)
    for node in nodes:
        d = home[node["id"]]
        sizes[d] += node["size"]
        loads[d] += node["fpgaLatency"]
        if node.get("colorClass") is not None:
            colours.setdefault(node["colorClass"], set()).add(d)
    for colour, found in colours.items():
        if len(found) > 1:
            raise ValueError(f"colour class {colour} is on devices {sorted(found)}")
    if max(sizes) > workload.data["maxSizePerFPGA"] * (1 + _ROUNDING):
        raise ValueError(f"a device holds {max(sizes)} bytes")
    backward = {node["id"] for node in nodes if node["isBackwardNode"]}
    chain: nx.DiGraph = nx.DiGraph()
    outputs: dict[int, tuple[float, set[int]]] = {}
    for edge in edges:
        a, b = edge["sourceId"], edge["destId"]
        cost, found = outputs.get(a, (0.0, {home[a]}))
        outputs[a] = max(cost, edge["cost"]), found | {home[b]}
        if a not in backward and b not in backward and home[a] != home[b]:
            chain.add_edge(home[a], home[b])
    if not nx.is_directed_acyclic_graph(chain):
        raise ValueError("the devices cannot be put in an order: not contiguous")
    for cost, found in outputs.values():
        if len(found) > 1:
            for d in found:
                loads[d] += cost
    return max(loads)
