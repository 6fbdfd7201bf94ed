"""``python -m benchmarks.msr FILE.json [--json]``: place one workload; ``--all``: the table.

``--variants`` places the variants of all workloads (`benchmarks.msr.variants`); some minutes.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.msr.solver.solve import search_plainly, solve
from benchmarks.msr.variants import least_limit, size_problem, variants
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
        least = solve(size_problem(workload))
        assert least is not None
        bound = least.lower_bound
        raise WorkloadError(
            str(path),
            f"no placement keeps the limit of {limit:g} bytes: one device holds {bound:g} or more"
            if bound > limit
            else f"no placement was found that keeps the limit of {limit:g} bytes",
            f"with a limit of {least.value:g} there is one",
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
        found = place(folder / f"{name}.json")
        exact = known["exact_seconds"]
        problem = partition_problem(read_workload(folder / f"{name}.json"))
        cpu = time.process_time()
        own = search_plainly(problem)
        cpu = time.process_time() - cpu
        ratio = np.inf if own is None else largest_load(problem, own) / known["optimum"]
        if ratio > 1.01 or cpu > 3:
            missed.append(name)
        rows.append(
            [
                name,
                known["k"],
                known["optimum"],
                f"{ratio:.4f}",
                f"{cpu:.2f}",
                f"{found['max_load']:.6g}",
                f"{found['max_load'] / known['optimum']:.6f}",  # type: ignore[operator]
                f"{found['lower_bound']:.6g}",
                "yes" if found["proven"] else "no",
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
            "with proof: largest load",
            "load / optimum",
            "lower bound",
            "proven",
            "CPU seconds",
            "the authors' C++, seconds",
        ],
        rows,
        "placer's search looks at the downsets of a few orders and a beam. Operations on a cycle, of which "
        "these graphs have some and models none, are joined before, and operations without edges are put "
        "where they cost least afterwards (benchmarks/msr/solver). More than 1 % above the optimum, or "
        f"slower than 3 seconds: {', '.join(missed) or 'none'}. With proof, all downsets that could matter "
        "are tried (benchmarks/msr/proof). "
        "Loads are recomputed by a checker from the file alone. CPU seconds are of the partitioner, "
        "on one core that it shared with others, without imports and reading the file. Peak memory "
        "of the process, torch included: "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResult:
    """How a variant was placed; loads in the file's unit."""

    name: str  # of the workload, then what was changed
    cpu_seconds: float
    load: float
    lower_bound: float
    proven: bool

    @property
    def is_tight(self) -> bool:
        return "memory" in self.name

    @property
    def gap(self) -> float:
        """How far the load may be above the least, as a share of the bound."""
        return 0.0 if self.proven else self.load / self.lower_bound - 1


def place_variants(folder: Path) -> list[VariantResult]:
    """Place all variants of the workloads of ``folder``."""
    found = []
    for name in sorted(json.loads((folder / "optima.json").read_text())):
        for variant in variants(read_workload(folder / f"{name}.json")):
            problem = partition_problem(variant)
            cpu = time.process_time()
            solution = solve(problem)
            cpu = time.process_time() - cpu
            if solution is None:  # merged classes can be larger than a device
                assert least_limit(variant) > variant.data["maxSizePerFPGA"]
                continue
            found.append(
                VariantResult(
                    name=variant.name,
                    cpu_seconds=cpu,
                    load=solution.value,
                    lower_bound=solution.lower_bound,
                    proven=solution.proven,
                )
            )
            print(found[-1], flush=True)
    return found


def write_variants(results: Sequence[VariantResult]) -> None:
    """``results/msr_variants.md``: a row per workload, and all that was not proven or took long."""
    rows = []
    for workload in dict.fromkeys(r.name.partition(": ")[0] for r in results):
        own = [r for r in results if r.name.startswith(workload + ": ")]
        row: list[object] = [workload]
        for tight in (False, True):
            some = [r for r in own if r.is_tight == tight]
            row.append(f"{sum(r.proven for r in some)} of {len(some)}")
            row.append(f"{max(r.gap for r in some):.2%}")
            row.append(f"{max(r.cpu_seconds for r in some):.2f}")
        rows.append(row)
    unproven = sorted((r for r in results if not r.proven), key=lambda r: (r.is_tight, r.name))
    listed = [f"- {r.name}: load {r.load:.6g}, bound {r.lower_bound:.6g}" for r in unproven]
    write_result(
        "msr_variants",
        "Variants of the published placement workloads",
        "python -m benchmarks.msr --variants",
        [
            "workload",
            "proven",
            "widest gap",
            "most CPU seconds",
            "tight memory: proven",
            "widest gap",
            "most CPU seconds",
        ],
        rows,
        f"{len(results)} files that nobody tuned for (benchmarks/msr/variants.py): other numbers of "
        "devices, costs, times and colour classes, training made of inference and the reverse, two "
        "graphs in one; and the same with memory near the least that some placement keeps, which no "
        f"published file has. {sum(r.cpu_seconds > 3 for r in results)} take more than 3 CPU "
        f"seconds, {sum(r.cpu_seconds for r in results):.0f} CPU seconds for all, on cores shared "
        "with others. The gap is how far the load may be above the least. Not proven:\n\n"
        + "\n".join(listed or ["- none"]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.msr", description=__doc__)
    parser.add_argument("file", nargs="?", help="a workload file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--all", action="store_true", help="place all published workloads")
    parser.add_argument("--variants", action="store_true", help="place variants of all of them")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the workloads are")
    options = parser.parse_args()
    if options.all:
        write_table(options.folder)
        return
    if options.variants:
        write_variants(place_variants(options.folder))
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
