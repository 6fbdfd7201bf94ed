"""Does a model train in the memory that its plan says it needs? Real steps on a GPU with a memory limit.

For every model, the smallest budget under which its plan fits is searched, and the largest one under which it
does not (within 1 %). Then three steps run under each: under the first they must succeed, and under the
second they must not succeed with more than 4 % to spare. Every mode of torch's allocator is tested. Each run
has its own process, whose allocator is limited to the budget minus the context.

    python -m benchmarks.fits_gpu [CASE ...]           # a GPU of 80 GB; has been run on none yet
    python -m benchmarks.fits_gpu --recorded FOLDER    # no GPU: the runs of fits_16GiB.json, predicted
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import placer
from benchmarks.gpu_cases import DEVICE, PROFILED, GPUCase
from benchmarks.memory_gpu import trained_steps
from benchmarks.record import table, write_page
from placer.api import as_spec
from placer.program import capture_model, flatten_call
from placer.quantities import format_bytes
from placer.simulation.judge import JudgingPlanner
from placer.spec import PlacementSpec

ALLOCATORS = {"default": "expandable_segments:False", "expandable": "expandable_segments:True"}
_NEAR = 0.01  # how near the two budgets of an edge are
_SPARE = 0.04  # what a refused plan may have trained with
_STEPS = 3
GIB = 2**30


def edge_of(fits: Callable[[int], bool], low: int, high: int) -> tuple[int, int]:
    """The smallest budget known to fit, and the largest known not to, within 1 %: by bisection.

    ``low`` does not fit, ``high`` does.
    """
    while high - low > _NEAR * high:
        half = (low + high) // 2
        low, high = (low, half) if fits(half) else (half, high)
    return high, low


def case_spec(case: GPUCase, budget: int | None, allocator: str) -> PlacementSpec:
    """One GPU with this many bytes, of which nothing is kept free."""
    device: dict[str, Any] = {"name": DEVICE, "allocator": allocator}
    if budget is not None:
        device["memory"] = budget
    return as_spec({"devices": [device], "objective": "memory", "reserve": 0, **case.fields})


def edge(case: GPUCase, allocator: str) -> tuple[int, int]:
    """The edge of ``case`` by its plans. Needs no GPU."""
    model, x = case.build()
    program = capture_model(model, (x,))
    planner = JudgingPlanner(program, flatten_call(program.call, (x,), {}))
    (device,) = planner(case_spec(case, 2**50, allocator)).devices
    assert device.reserved is not None, "it is a CUDA device"
    enough = device.needed
    return edge_of(
        lambda budget: planner(case_spec(case, budget, allocator)).fits, device.context, enough
    )


def train(case: GPUCase, budget: int, allocator: str) -> dict[str, Any]:
    """Three steps under ``budget``: whether they ran, seconds of the last, and the most reserved bytes."""
    model, x = case.build()
    if x.is_floating_point():
        x = torch.randn(x.shape)
    plan = placer.make_plan(model, case_spec(case, None, allocator), (x,))
    (device,) = plan.devices
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((budget - device.context) / total)
    try:
        *_, seconds = trained_steps(model, plan, x, _STEPS)
    except torch.cuda.OutOfMemoryError:
        return {"trained": False, "reserved": torch.cuda.max_memory_reserved()}
    return {"trained": True, "seconds": seconds, "reserved": torch.cuda.max_memory_reserved()}


def _in_process(name: str, budget: int, allocator: str) -> dict[str, Any]:
    """`train` in a process whose allocator is in this mode."""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": ALLOCATORS[allocator]}
    command = [sys.executable, "-m", "benchmarks.fits_gpu", name]
    command += ["--budget", str(budget), "--allocator", allocator]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} under {format_bytes(budget)}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(cases: Mapping[str, GPUCase]) -> Iterator[dict[str, Any]]:
    """A row per case and mode of the allocator."""
    for name, case in cases.items():
        for allocator in ALLOCATORS:
            fits, too_little = edge(case, allocator)
            spare = int((1 - _SPARE) * too_little)
            row = {
                "case": name,
                "allocator": allocator,
                "fits": fits,
                "too_little": too_little,
                "at_fits": _in_process(name, fits, allocator),
                "with_spare": _in_process(name, spare, allocator),
            }
            print(row, flush=True)
            yield row


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    """The table, and in how many rows the plans were right."""
    cells = []
    for row in rows:
        trained, spare = row["at_fits"], row["with_spare"]
        cells.append(
            [
                row["case"],
                row["allocator"],
                f"{row['fits'] / GIB:.2f}",
                "yes" if trained["trained"] else "**no**",
                f"{trained['seconds']:.3f}" if trained["trained"] else "",
                f"{trained['reserved'] / GIB:.2f}",
                f"{(1 - _SPARE) * row['too_little'] / GIB:.2f}",
                "**yes**" if spare["trained"] else "no",
            ]
        )
    header = ["case", "allocator", "said to fit, GiB", "trained", "s per step", "reserved, GiB",
              "refused, 4 % to spare, GiB", "trained"]  # fmt: skip
    bad = sum(not row["at_fits"]["trained"] for row in rows)
    late = sum(row["with_spare"]["trained"] for row in rows)
    return [
        *table(header, cells),
        f"Of {len(rows)} plans at their edge, {bad} ran out of memory; {late} were refused and would have "
        "trained with more than 4 % to spare. Nothing is kept free here (by default a plan keeps 2 %).",
        "",
    ]


def _recorded(folder: Path) -> None:
    from benchmarks.reserved import compare_fits, fit_lines

    rows = list(compare_fits(json.loads((folder / "fits_16GiB.json").read_text())))
    print("\n".join(fit_lines(rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", default=[], help=", ".join(PROFILED))
    parser.add_argument("--recorded", type=Path, metavar="FOLDER", help="of fits_16GiB.json")
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--allocator", choices=list(ALLOCATORS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    unknown = [name for name in given.cases if name not in PROFILED]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(PROFILED)}")
    if given.recorded is not None:
        _recorded(given.recorded)
        return
    if not torch.cuda.is_available():
        sys.exit(
            "benchmarks.fits_gpu needs a CUDA device, and this machine has none; with --recorded FOLDER "
            "it compares plans with runs that were recorded"
        )
    if given.budget is not None:
        print(json.dumps(train(PROFILED[given.cases[0]], given.budget, given.allocator)))
        return
    rows = list(measure({name: PROFILED[name] for name in given.cases or PROFILED}))
    title = "Plans at the edge, trained on a GPU"
    write_page("fits_gpu", title, "python -m benchmarks.fits_gpu", lines_of(rows))


if __name__ == "__main__":
    main()
