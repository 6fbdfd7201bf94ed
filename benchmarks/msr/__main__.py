"""``python -m benchmarks.msr FILE.json [--json]``: place one workload; ``--all``: the table."""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import numpy as np

from benchmarks.msr.search import search_plainly, solve
from benchmarks.msr.workload import (
    WorkloadError,
    check_placement,
    partition_problem,
    read_workload,
)
from benchmarks.record import write_result
from placer.partition.solver.problem import largest_load

_PLACES = [parent / "shared" / "workloads" / "msr" for parent in Path(__file__).parents]
FOLDER = next((place for place in _PLACES if place.exists()), _PLACES[3])


def place(path: str | Path) -> dict[str, object]:
    """Place the workload in ``path`` and check the answer from the file alone."""
    workload = read_workload(path)
    start, cpu = time.perf_counter(), time.process_time()
    solution = solve(partition_problem(workload))
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    if solution is None:
        limit = workload.data["maxSizePerFPGA"]
        raise WorkloadError(
            str(path),
            f"no placement was found that keeps the limit of {limit:g} bytes",
            "raise maxSizePerFPGA or maxFPGAs",
        )
    devices: list[list[int]] = [[] for _ in range(workload.num_devices)]
    for node, stage in zip(workload.data["nodes"], solution.stage_of, strict=True):
        devices[stage].append(node["id"])
    return {
        "file": str(path),
        "max_load": check_placement(workload, devices),
        "lower_bound": solution.lower_bound,
        "proven": solution.proven,
        "seconds": round(seconds, 3),
        "cpu_seconds": round(cpu_seconds, 3),
        "devices": devices,
    }


def write_table(folder: Path) -> None:
    """Place every workload of ``folder`` and write ``results/msr.md``."""
    optima = json.loads((folder / "optima.json").read_text())
    rows, missed = [], []
    for name, known in sorted(optima.items()):
        exact = known["exact_seconds"]
        problem = partition_problem(read_workload(folder / f"{name}.json"))
        cpu = time.process_time()
        own = search_plainly(problem)
        cpu = time.process_time() - cpu
        ratio = np.inf if own is None else largest_load(problem, own) / known["optimum"]
        if ratio > 1.01 or cpu > 3:
            missed.append(name)
        found = place(folder / f"{name}.json")
        rows.append(
            [
                name,
                known["k"],
                known["optimum"],
                f"{ratio:.4f}",
                f"{cpu:.2f}",
                "yes" if found["proven"] else f"{found['lower_bound']:.6g} or more",
                f"{found['cpu_seconds']:.2f}",
                "did not finish" if exact is None else f"{exact:.2f}",
            ]
        )
    write_result(
        "msr",
        "Published placement workloads: largest loads, and the time to find them",
        "python -m benchmarks.msr --all",
        [
            "workload",
            "devices",
            "optimum",
            "placer's search: load / optimum",
            "its CPU seconds",
            "referee: optimum proven",
            "its CPU seconds with the search",
            "the authors' C++, seconds",
        ],
        rows,
        "placer's search looks at the downsets of a few orders and a beam. Operations on a cycle, of which "
        "these graphs have some and models none, are joined before, and operations without edges are put "
        "where they cost least afterwards (benchmarks/msr/search.py). More than 1 % above the optimum, or "
        f"slower than 3 seconds: {', '.join(missed) or 'none'}. The referee tries all downsets that could "
        "matter (benchmarks/msr/proof), within a limit of work and of the operations with edges alone. "
        "Loads are recomputed by a checker from the file alone. CPU seconds are of the partitioner, "
        "on one core that it shared with others, without imports and reading the file. Peak memory "
        "of the process, torch included: "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.msr", description=__doc__)
    parser.add_argument("file", nargs="?", help="a workload file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--all", action="store_true", help="place all published workloads")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the workloads are")
    options = parser.parse_args()
    if options.all:
        write_table(options.folder)
        return
    if options.file is None:
        parser.error("a workload file, or --all")
    try:
        found = place(options.file)
    except WorkloadError as error:
        parser.exit(2, f"error: {error}\n")
    if options.json:
        print(json.dumps(found))
        return
    proof = "proven optimal" if found["proven"] else f"lower bound {found['lower_bound']:.6g}"
    print(f"{found['file']}: largest load {found['max_load']:.6g}, {proof}, {found['seconds']} s")
    for d, ids in enumerate(found["devices"]):  # type: ignore[arg-type]
        print(f"  device {d}: {len(ids)} nodes")


if __name__ == "__main__":
    main()
