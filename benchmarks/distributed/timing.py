"""Times several ways to train, in turns, and compares them by the ratios of their seconds."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

# Else glibc gives freed memory back and takes it anew, which costs whom it hits 10 ms a step and more:
# one contestant or another, by what lies above it on the heap.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}

Step = Callable[[], None]
Seconds = Mapping[str, list[float]]  # contestant -> of every round


def take_turns(
    contestants: Mapping[str, Callable[[], Step]], rounds: int, order: random.Random
) -> dict[str, list[float]]:
    """Seconds of every step of every contestant; all ranks start and end each together.

    Contestants are built, and take their turns, in random ``order``, the same on all ranks.
    """
    names = list(contestants)
    steps = {name: contestants[name]() for name in order.sample(names, len(names))}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 2):
        for name in order.sample(names, len(names)):
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            dist.barrier()
            if number >= 2:  # the first ones warm up
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratios(jobs: Sequence[Seconds], over: str, under: str) -> list[float]:
    """The first's seconds over the second's in every round of every job, in ascending order."""
    return sorted(
        a / b for seconds in jobs for a, b in zip(seconds[over], seconds[under], strict=True)
    )


def ratio(jobs: Sequence[Seconds], over: str, under: str) -> float:
    """The median over all rounds."""
    return statistics.median(ratios(jobs, over, under))


def fastest(jobs: Sequence[Seconds], over: str, under: str) -> float:
    """The first's least seconds over the second's."""
    least = {name: min(x for seconds in jobs for x in seconds[name]) for name in (over, under)}
    return least[over] / least[under]


def difference(jobs: Sequence[Seconds], name: str, less: str) -> float:
    """The additional seconds of the first over the second: the median over all rounds."""
    return statistics.median(
        a - b for seconds in jobs for a, b in zip(seconds[name], seconds[less], strict=True)
    )


def milliseconds(jobs: Sequence[Seconds], name: str, digits: int = 0) -> str:
    median = statistics.median(x for seconds in jobs for x in seconds[name])
    return f"{median * 1e3:.{digits}f}"


def both_ratios(jobs: Sequence[Seconds], over: str, under: str) -> str:
    """The median over all rounds, and the ratio of the fastest steps."""
    return f"{ratio(jobs, over, under):.2f}, {fastest(jobs, over, under):.2f}"


def with_bounds(jobs: Sequence[Seconds], over: str, under: str) -> str:
    """The median, and where it is with 95 % confidence: between the n/2 ± sqrt(n)-th of n rounds.

    The interval of order statistics for a quantile (Conover, Practical Nonparametric Statistics,
    1999, section 3.2): 0.98 sqrt(n), rounded up.
    """
    found = ratios(jobs, over, under)
    low = max(math.floor(len(found) / 2 - math.sqrt(len(found))), 0)
    return f"{statistics.median(found):.3f} ({found[low]:.2f} to {found[-1 - low]:.2f})"
