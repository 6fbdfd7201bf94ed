"""Computes a lower bound on the extra time of every policy of a stage within its memory limits.

It is the larger of two bounds:

`_relaxed` is the search of `placer.partition.policy.cheapest`, except that partial policies are merged
instead of dropped. A merged one has the least seconds and the fewest bytes of those merged, and every value
that any of them has on the device, so the following blocks add no more to it than to any of them. Partial
policies that take longer than a known policy are left out. If none had to be merged, the bound is the
optimum. It holds for regions that begin and end at boundaries of blocks.

`_knapsack`: at each moment of backward, the values beyond the limit cannot be on the device, so each of them
was offloaded, or the node that made it runs again. Taking the cheapest bytes first (a fractional knapsack
problem) gives a lower bound on the time, wherever regions begin and end.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from placer.partition.policy.search import PolicySearch
from placer.partition.policy.types import (
    PartialPolicy,
    Policy,
    StageLimits,
)

_MOST_PARTIAL = 400
_MAX_COMPARED = (
    1000  # if there are more, they are compared by sums only, not by values on the device
)


def least_extra_seconds(
    stage: PolicySearch,
    choices: Collection[Policy],
    limits: StageLimits,
    *,
    answer: float = float("inf"),
) -> float:
    """A lower bound on the extra seconds of every policy of ``stage`` within ``limits``.

    ``answer`` is the extra time of a known policy; the bound is never larger. The other arguments are those
    of `placer.partition.policy.cheapest.choose_stage_policy`. Takes O(blocks^2 * partial policies) time.
    """
    least = min(answer, _knapsack(stage, choices, limits))
    return max(least, _relaxed(stage, choices, limits, answer))


def _relaxed(
    stage: PolicySearch, choices: Collection[Policy], limits: StageLimits, answer: float
) -> float:
    def select(partials: list[PartialPolicy], boundary: int) -> list[PartialPolicy]:
        useful = [x for x in partials if x.seconds < answer and limits.peak(x) <= limits.budget]
        return _merged(useful, stage.needed_from(boundary))

    return min((candidate.seconds for candidate in stage.search(choices, select)), default=answer)


def _merged(partials: list[PartialPolicy], later: int) -> list[PartialPolicy]:
    """At most `_MOST_PARTIAL` partial policies, among them one at least as good as each of ``partials``.

    ``later`` is the set of values that are needed from here on, with one bit per value.
    """
    exact = len(partials) <= _MAX_COMPARED
    kept: list[PartialPolicy] = []
    for candidate in sorted(partials, key=lambda x: (x.seconds, x.kept, x.backward_peak)):
        counts = candidate.on_device & later, candidate.on_host & later
        for i, other in enumerate(kept):
            if other.kept > candidate.kept or other.backward_peak > candidate.backward_peak:
                continue
            if not (counts[0] & ~other.on_device or counts[1] & ~other.on_host):
                break
            if not exact:
                kept[i] = _union(other, candidate)
                break
        else:
            kept.append(candidate)
    if len(kept) <= _MOST_PARTIAL:
        return kept
    # Merge neighbours whose seconds differ the least.
    gaps = sorted(range(1, len(kept)), key=lambda i: kept[i].seconds - kept[i - 1].seconds)
    joined = set(gaps[: len(kept) - _MOST_PARTIAL])
    merged: list[PartialPolicy] = []
    for i, candidate in enumerate(kept):
        if i in joined:
            merged[-1] = _union(merged[-1], candidate)
        else:
            merged.append(candidate)
    return merged


def _union(a: PartialPolicy, b: PartialPolicy) -> PartialPolicy:
    return replace(
        a,
        seconds=min(a.seconds, b.seconds),
        kept=min(a.kept, b.kept),
        backward_peak=min(a.backward_peak, b.backward_peak),
        on_device=a.on_device | b.on_device,
        on_host=a.on_host | b.on_host,
        hosted=min(a.hosted, b.hosted),
        before=None,
    )


def _knapsack(stage: PolicySearch, choices: Collection[Policy], limits: StageLimits) -> float:
    recompute = any(choice.recompute for choice in choices)
    offload = any(choice.offload for choice in choices)
    room = limits.budget - limits.static - limits.others
    least = 0.0
    live: dict[int, float] = {}
    for t in range(len(stage.nodes)):
        for value in stage.saved_at[t]:
            live.setdefault(value, stage.nbytes[value])
        live_bytes = sum(live.values())
        own = sum(stage.nbytes[v] for v in stage.saved_at[t] if stage.single[v])
        excess = live_bytes * limits.in_flight - own + stage.backward_bytes[t] - room
        if excess <= 0:
            continue
        # All micro-batches in flight have the same policy, so each value counts once for each of them.
        offers: dict[tuple[str, int], list[float]] = {}
        for value, nbytes in live.items():
            producer = stage.producer[value]
            again = stage.forward_seconds[producer] if recompute and producer >= 0 else None
            away = 2 * nbytes / stage.kind.host_bandwidth if offload else None
            if again is not None and (away is None or again <= away):
                entry = offers.setdefault(("node", producer), [again, 0.0])
                entry[1] += nbytes * limits.in_flight
            elif away is not None:
                offers["value", value] = [away, nbytes * limits.in_flight]
        least = max(least, _fractional(offers.values(), excess))
    return least


def _fractional(offers: Collection[list[float]], excess: float) -> float:
    seconds = 0.0
    for price, nbytes in sorted(offers, key=lambda offer: offer[0] / max(offer[1], 1.0)):
        if excess <= 0:
            break
        share = min(1.0, excess / nbytes) if nbytes else 0.0
        seconds += share * price
        excess -= share * nbytes
    return seconds
