"""Finds the largest input with which a model can be trained on given devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from placer.plan.types import Plan
from placer.planner.devices import with_all_devices
from placer.search.auto import Answer, answer_of
from placer.search.search import find_strategy
from placer.simulation.judge import JudgingPlanner
from placer.spec import PlacementSpec

# The planner of the model for an input of a size, with what `choose_spec` needs besides.
PlannerOf = Callable[[int], "Case"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeTried:
    """A size, and the strategy with which it fits, or which overflows the least.

    ``plan`` is None if no plan was made, because even a lower bound is too large.
    """

    size: int
    fits: bool
    strategy: str
    plan: Plan | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest size that fits, None if none does, with its spec and plan; and all that were tried."""

    size: int | None
    answer: Answer | None
    tried: tuple[SizeTried, ...]  # ascending


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model recorded with an input of some size."""

    make: JudgingPlanner
    wanted: PlacementSpec


def find_largest(
    sizes: Sequence[int],
    case_of: PlannerOf,
    told: Callable[[SizeTried], None] = lambda _: None,
    first: int = 0,
) -> Largest:
    """The largest of ``sizes``, which are ascending, for which a strategy fits.

    Tries ``sizes[first]``, then about twice as much until one does not fit, and then bisects: a larger
    input is taken to need more memory. ``case_of`` records the model for a size, ``told`` hears of each one
    that was tried. Raises what `find_strategy` raises.
    """
    tried: dict[int, SizeTried] = {}
    fitting: dict[int, Answer] = {}

    def fits(index: int) -> bool:
        size = sizes[index]
        case = case_of(size)
        found = find_strategy(with_all_devices(case.wanted), case.make)
        rated = found.best or found.nearest or found.unfit[0]
        if found.best is not None:
            fitting.clear()  # of smaller sizes
            fitting[index] = answer_of(found, case.make, len(case.wanted.devices))
        tried[index] = SizeTried(
            size=size,
            fits=found.best is not None,
            strategy=rated.strategy.describe(),
            plan=rated.plan,
        )
        told(tried[index])
        return tried[index].fits

    low, high = -1, min(first, len(sizes) - 1)  # sizes[low] fits, sizes[high] does not
    while high < len(sizes) and fits(high):
        low, high = high, min(2 * high + 1, len(sizes) - 1) if high < len(sizes) - 1 else len(sizes)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Largest(
        size=sizes[low] if low >= 0 else None,
        answer=fitting.get(low),
        tried=tuple(tried[index] for index in sorted(tried)),
    )
