"""Writes the result pages of training with one process per device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.distributed.timing import (
    KEEP_FREED_MEMORY,
    Seconds,
    both_ratios,
    difference,
    fastest,
    milliseconds,
    ratio,
    with_bounds,
)
from benchmarks.record import table, write_page


def write_speed(found: Mapping[str, Sequence[Mapping[str, Seconds]]], load: float) -> None:
    """``found`` are the jobs of each comparison; ``load`` is the load average at the start."""
    kept = ", ".join(f"`{name}={value}`" for name, value in KEEP_FREED_MEMORY.items())
    rounds = len(found["stages"][0]["1"]["one process"])
    counts = ", ".join(f"{kind} {len(jobs)}" for kind, jobs in found.items())
    lines = [
        f"Two processes of one thread each, gloo on loopback; jobs of {rounds} rounds, contestants in turn",
        f"({counts} jobs). A ratio is the median over all rounds (in brackets: where it is with 95 %",
        "confidence); beside it the ratio of the fastest steps of each, which others on this machine",
        f"disturbed least. Load average at the start: {load:.1f}.",
        "",
        f"Freed memory stays with its process ({kept}): else glibc gives some back and takes it anew,",
        "thousands of page faults a step, for one contestant or another by what lies above it on the heap.",
        "",
        "## Two replicas: throughput, the whole batch of the same size",
        "",
        *replica_table(by_case(found["replicas"])),
        "No communication: two processes, each training by itself on half of the batch. What is over",
        "one process there is what this machine's two cores can do; no way to sum gradients is faster.",
        "",
        "## Two stages: step time over the same stages by hand; efficiency",
        "",
        *stage_table(by_case(found["stages"])),
        "Efficiency is the time of one process for the same micro-batches over twice the step's; that",
        "of the schedule is 1 - bubble. The same with four times the rows:",
        "",
        *stage_table(by_case(found["long stages"])),
        "## What a step costs beside its kernels",
        "",
        "The same with tensors of a few kB: what placer does more than the program by hand (it asks the",
        "other ranks whether they were called alike, gives the loss to all, looks for what was changed).",
        "",
        *overhead_table(by_case(found["overhead"])),
    ]
    write_page(
        "distributed", "One process per device: speed", "python -m benchmarks.distributed", lines
    )


def replica_table(cases: Mapping[str, Sequence[Seconds]]) -> list[str]:
    header = ["training step", "one process, ms", "placer dp=2, ms"]
    header += [
        f"{name} over one process: median, fastest"
        for name in ("placer", "DDP", "no communication")
    ]
    header += ["placer over DDP", "placer over average_gradients"]
    rows = [
        [
            name,
            milliseconds(jobs, "one process"),
            milliseconds(jobs, "placer"),
            both_ratios(jobs, "one process", "placer"),
            both_ratios(jobs, "one process", "DDP"),
            both_ratios(jobs, "one process", "no communication"),
            with_bounds(jobs, "DDP", "placer"),
            with_bounds(jobs, "average_gradients", "placer"),
        ]
        for name, jobs in cases.items()
    ]
    return table(header, rows)


def schedule_efficiency(microbatches: int) -> float:
    """The share of time in which two devices compute, under GPipe and under 1F1B (arXiv:1811.06965)."""
    return microbatches / (microbatches + 1)


def stage_table(cases: Mapping[str, Sequence[Seconds]]) -> list[str]:
    header = ["micro-batches", "schedule", "placer, ms", "by hand, ms", "placer / by hand"]
    header += ["of the fastest", "efficiency", "of the schedule"]
    rows = [
        [
            count,
            schedule,
            milliseconds(jobs, f"placer {schedule}"),
            milliseconds(jobs, f"by hand {schedule}"),
            with_bounds(jobs, f"placer {schedule}", f"by hand {schedule}"),
            f"{fastest(jobs, f'placer {schedule}', f'by hand {schedule}'):.3f}",
            f"{ratio(jobs, 'one process', f'placer {schedule}') / 2:.3f}",
            f"{schedule_efficiency(int(count)):.3f}",
        ]
        for count, jobs in cases.items()
        for schedule in ("GPipe", "1F1B")
        if f"placer {schedule}" in jobs[0]
    ]
    return table(header, rows)


def overhead_table(cases: Mapping[str, Sequence[Seconds]]) -> list[str]:
    header = ["step", "placer, ms", "by hand (DDP), ms", "difference, ms"]
    rows = [
        [
            name,
            milliseconds(jobs, "placer", digits=1),
            milliseconds(jobs, "by hand", digits=1),
            f"{difference(jobs, 'placer', 'by hand') * 1e3:+.1f}",
        ]
        for name, jobs in cases.items()
    ]
    return table(header, rows)


def by_case(jobs: Sequence[Mapping[str, Seconds]]) -> dict[str, list[Seconds]]:
    """Case -> what each job found."""
    return {name: [job[name] for job in jobs] for name in jobs[0]}
