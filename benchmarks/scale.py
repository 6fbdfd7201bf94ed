"""``python -m benchmarks.scale``: how time and memory of the partitioner grow with the graph.

Layered random DAGs: layers of 1 to 8 units, each unit reads one to three of the last three layers;
work and bytes are log-normal. Captured graphs: a GPT, a ResNet and a U-Net of as many layers as make
the number of nodes, captured and costed on ``meta`` (`benchmarks.deep`). Each case runs in a forked
process of its own, so that its peak memory is its own; the memory of the process before it is subtracted.
Measurements are kept in ``results/scale.json`` and not repeated without ``--again``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import RESULTS, write_result
from benchmarks.resident import begin_peak, peak
from placer.partition import PartitionProblem, SharedValue, StageSlot, solve
from placer.partition.solver.problem import largest_load, simple_bound

SIZES, STAGES = (100, 1_000, 10_000, 50_000), (2, 16, 64, 256)
CASES = [
    *(("random", n, k) for n in SIZES for k in STAGES if 4 * k <= n),
    *(("GPT", n, k) for n in SIZES for k in STAGES if 4 * k <= n),
    *((graph, n, 16) for graph in ("ResNet", "U-Net") for n in (1_000, 10_000)),
]
_FILE = RESULTS / "scale.json"


def layered_problem(num_units: int, num_stages: int, seed: int = 0) -> PartitionProblem:
    """A layered random DAG on ``num_stages`` equal devices."""
    rng = np.random.default_rng(seed)
    layers: list[list[int]] = []
    readers: dict[int, list[int]] = {}
    edges, made = [], 0
    while made < num_units:
        width = int(min(rng.integers(1, 9), num_units - made))
        layer = list(range(made, made + width))
        recent = [u for row in layers[-3:] for u in row]
        for u in layer if recent else []:
            for source in rng.choice(
                recent, size=min(len(recent), int(rng.integers(1, 4))), replace=False
            ):
                edges.append((int(source), u))
                readers.setdefault(int(source), []).append(u)
        layers.append(layer)
        made += width
    seconds = rng.lognormal(0.0, 1.0, num_units)
    nbytes = rng.lognormal(0.0, 1.0, num_units)
    slot = StageSlot(
        device="device", seconds=seconds, seconds_per_byte=0.5, nbytes=nbytes, budget=None
    )
    return PartitionProblem(
        num_units=num_units,
        edges=tuple(edges),
        values=tuple(
            SharedValue(nbytes=float(nbytes[u]), units=(u, *readers[u])) for u in sorted(readers)
        ),
        slots=(slot,) * num_stages,
    )


def captured_problem(graph: str, num_nodes: int) -> tuple[PartitionProblem, dict[str, float]]:
    """A captured model of about ``num_nodes`` nodes on one device; seconds to capture and cost it."""
    import torch

    from benchmarks.deep import deep_model
    from benchmarks.loss import MEAN_SQUARE
    from placer.cost import estimate_costs
    from placer.machine.devices import device_kind
    from placer.partition.model import model_units, seconds_problem
    from placer.partition.types import DeviceSlot, PlanningOptions
    from placer.partition.units import program_order, unit_graph
    from placer.program import lower

    with torch.device("meta"):
        model, inputs = deep_model(graph, num_nodes)
    start = time.process_time()
    program = lower(model, inputs)
    captured = time.process_time()
    costs = estimate_costs(program, list(inputs), loss=MEAN_SQUARE)
    costed = time.process_time()
    units = unit_graph(program)
    kind = device_kind("cuda:0", "h100")
    chain = [DeviceSlot(name="device", kind=kind, budget=None, reserve=0)]
    found = model_units(units, program_order(units), costs, {})
    problem = seconds_problem(found, costs, chain, PlanningOptions(), [None])
    return problem, {
        "nodes": len(program.order),
        "capture": captured - start,
        "costs": costed - captured,
    }


def measure(problem: PartitionProblem, num_stages: int) -> dict[str, float]:
    """Solve for ``num_stages`` devices like the first: seconds, MiB above the start, value, bound."""
    problem = replace(problem, slots=(problem.slots[0],) * num_stages)
    before = begin_peak()
    start, cpu = time.perf_counter(), time.process_time()
    stage_of = solve(problem)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    assert stage_of is not None
    return {
        "seconds": seconds,
        "cpu": cpu,
        "mebibytes": (peak() - before) / 2**20,
        "value": largest_load(problem, stage_of),
        "bound": simple_bound(problem),
        "units": problem.num_units,
    }


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` in a forked process of its own."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, args)


def _capture_into(path: Path, graph: str, num_nodes: int) -> dict[str, float]:
    problem, seconds = captured_problem(graph, num_nodes)
    path.write_bytes(pickle.dumps(problem))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--again", action="store_true", help="measure all cases anew")
    parser.add_argument("--only", nargs=2, metavar=("GRAPH", "NODES"), help="these cases alone")
    parser.add_argument("--folder", type=Path, help="where captured graphs are kept")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    known = {} if options.again or not _FILE.exists() else json.loads(_FILE.read_text())
    for graph, n in dict.fromkeys((graph, n) for graph, n, _ in sorted(CASES, key=lambda c: c[1])):
        stages = [k for g, m, k in CASES if (g, m) == (graph, n)]
        if options.only and [graph, str(n)] != options.only:
            continue
        if all(f"{graph} {n} {k}" in known for k in stages):
            continue
        path = folder / f"{graph}-{n}.pickle"
        if graph != "random" and not path.exists():
            known[f"{graph} {n}"] = in_child(_capture_into, path, graph, n)
        problem = layered_problem(n, 1) if graph == "random" else pickle.loads(path.read_bytes())
        for k in stages:
            if f"{graph} {n} {k}" not in known:
                known[f"{graph} {n} {k}"] = in_child(measure, problem, k)
                print(graph, n, k, known[f"{graph} {n} {k}"], flush=True)
                _FILE.write_text(json.dumps(known, indent=1) + "\n")
    write_page(known)


def write_page(known: dict[str, dict[str, float]]) -> None:
    """Write the table of all cases, the growth rates, and the plot."""
    rows, grown = [], []
    measured = [case for case in CASES if " ".join(map(str, case)) in known]
    for graph, n, k in measured:
        run, made = known[f"{graph} {n} {k}"], known.get(f"{graph} {n}")
        rows.append(
            [
                graph,
                int(made["nodes"]) if made else n,
                run["units"],
                k,
                f"{run['cpu']:.2f}",
                f"{run['seconds']:.2f}",
                f"{run['mebibytes']:.0f}",
                f"{run['value'] / run['bound']:.3f}" if run["bound"] else "-",
                f"{made['capture']:.1f} + {made['costs']:.1f}" if made else "",
            ]
        )
    for graph in ("random", "GPT"):
        for k in STAGES:
            names = [f"{graph} {n} {k}" for n in SIZES[2:]]
            if not set(names) <= set(known):
                continue
            runs = [known[name] for name in names]
            powers = [
                np.log(runs[1][field] / runs[0][field])
                / np.log(runs[1]["units"] / runs[0]["units"])
                for field in ("cpu", "mebibytes")
            ]
            grown.append(f"{graph}, {k} stages: {powers[0]:.2f} and {powers[1]:.2f}")
    write_result(
        "scale",
        "The partitioner on graphs of 100 to 50,000 nodes",
        "python -m benchmarks.scale",
        [
            "graph",
            "nodes",
            "units",
            "stages",
            "CPU seconds",
            "seconds",
            "MiB",
            "largest load / lower bound",
            "capture + costs, CPU seconds",
        ],
        rows,
        "Times on cores shared with others: CPU seconds are the ones to read. MiB above the "
        "interpreter with the graph loaded. Powers with which CPU seconds and MiB grow with units "
        f"from 10,000 to 50,000 nodes: {'; '.join(grown)}. {len(CASES) - len(measured)} of "
        f"{len(CASES)} cases are not measured. Up to 1,500 units the "
        "downsets of a few orders and of a beam are tried, beyond that stages are "
        "intervals of a few orders: the step in the curves. Graphs of up to 1,000 nodes were measured "
        "with one thread (OMP_NUM_THREADS=1)."
        "\n\n![log-log plot](scale.png)",
    )
    plot(known, measured, RESULTS / "scale.png")


def plot(
    known: dict[str, dict[str, float]], measured: list[tuple[str, int, int]], path: Path
) -> None:
    """CPU seconds and MiB over units, both axes logarithmic, a line per number of stages."""
    from matplotlib import pyplot
    from matplotlib.figure import Figure

    figure: Figure
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 7), sharex=True)
    for row, graph in zip(axes, ("random", "GPT"), strict=True):
        for axis, field, label in zip(
            row, ("cpu", "mebibytes"), ("CPU seconds", "MiB"), strict=True
        ):
            for k in STAGES:
                runs = [known[f"{g} {n} {m}"] for g, n, m in measured if (g, m) == (graph, k)]
                units = [run["units"] for run in runs]
                axis.plot(units, [max(run[field], 0.01) for run in runs], "o-", label=f"{k} stages")
            axis.set(xscale="log", yscale="log", xlabel="units", ylabel=label, title=graph)
            axis.grid(alpha=0.3)
    axes[0, 0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
