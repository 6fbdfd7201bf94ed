"""``python -m benchmarks.scale``: how time and memory of the partitioner grow with the graph.

Layered random DAGs: layers of 1 to 8 units, each unit reads one to three of the last three layers;
work and bytes are log-normal. Each case runs in a process of its own, so that its peak memory is
its own; the interpreter with the partitioner imported is taken off.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.record import RESULTS, write_result
from placer.partition import CrossingValue, PartitionProblem, StageSlot, solve

CASES = [
    *((n, k) for n in (100, 1_000, 10_000, 50_000) for k in (2, 16, 64)),
    (10_000, 256),
    (50_000, 256),
    (3_000, 16),
    (30_000, 16),
]


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
            CrossingValue(nbytes=float(nbytes[u]), units=(u, *readers[u])) for u in sorted(readers)
        ),
        slots=(slot,) * num_stages,
    )


def measure(num_units: int, num_stages: int) -> dict[str, float]:
    """Solve one case in this process: seconds, peak MiB above the start, value and bound."""
    problem = layered_problem(num_units, num_stages)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, cpu = time.perf_counter(), time.process_time()
    solution = solve(problem)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    assert solution is not None
    return {
        "seconds": seconds,
        "cpu": cpu,
        "mebibytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
        "value": solution.optimality.value,
        "bound": solution.optimality.lower_bound,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--case", nargs=2, type=int, metavar=("UNITS", "STAGES"))
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(*options.case)))
        return
    found = {}
    for n, k in sorted(CASES):
        run = subprocess.run(
            [sys.executable, "-m", "benchmarks.scale", "--case", str(n), str(k)],
            capture_output=True,
            text=True,
            check=True,
        )
        found[n, k] = json.loads(run.stdout)
    write_result(
        "scale",
        "The partitioner on layered random graphs",
        "python -m benchmarks.scale",
        ["units", "stages", "CPU seconds", "seconds", "MiB", "largest load / lower bound"],
        [
            [
                n,
                k,
                f"{r['cpu']:.2f}",
                f"{r['seconds']:.2f}",
                f"{r['mebibytes']:.0f}",
                f"{r['value'] / r['bound']:.3f}",
            ]
            for (n, k), r in found.items()
        ],
        "Times on a core shared with others: CPU seconds are the ones to read. MiB above the "
        "interpreter with the graph loaded. The lower bound is the even spread of work without any "
        "transfer, or the largest unit; up to 1,500 units all downsets are tried as far as that is "
        "possible.\n\n![log-log plot](scale.svg)",
    )
    plot(found, RESULTS / "scale.svg")


def plot(found: dict[tuple[int, int], dict[str, float]], path: Path) -> None:
    """CPU seconds and MiB over units, both axes logarithmic, a line per number of stages."""
    from matplotlib import pyplot
    from matplotlib.figure import Figure

    figure: Figure
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5))
    for axis, field, label in zip(axes, ("cpu", "mebibytes"), ("CPU seconds", "MiB"), strict=True):
        for k in sorted({k for _, k in found}):
            units = sorted(n for n, stages in found if stages == k)
            axis.plot(
                units,
                [max(found[n, k][field], 0.1 if field == "mebibytes" else 1e-3) for n in units],
                "o-",
                label=f"{k} stages",
            )
        axis.set(xscale="log", yscale="log", xlabel="units", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
