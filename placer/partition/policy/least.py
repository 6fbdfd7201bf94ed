"""What any policy of a stage within its limits costs at the least.

Two bounds, of which the larger counts:

`_relaxed` is the search of `placer.partition.policy.cheapest` with labels merged instead of
dropped. A merged label has the least seconds and bytes of its parts, and counts what any of them counts, so
that what follows it costs no more than what follows any of them. Labels that cost more than the
answer in hand are left out. Where none had to be merged, the bound is the optimum. It holds for
regions that begin and end at the boundaries of atoms.

`_knapsack`: at each moment of backward the values that are too much must be away: each was
offloaded, or the node that made it runs again. The cheapest bytes first (the fractional knapsack)
bound that from below, moment by moment, wherever regions begin and end.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from placer.partition.policy.labels import (
    Label,
    LabelledStage,
    Policy,
    StageLimits,
)

_MOST_LABELS = 400
_MOST_COMPARED = 1000  # labels that are compared by what they count, too


def least_extra_seconds(
    stage: LabelledStage,
    choices: Collection[Policy],
    limits: StageLimits,
    *,
    answer: float = float("inf"),
) -> float:
    """Seconds that every policy of ``stage`` within ``limits`` costs at the least.

    As `placer.partition.policy.cheapest.choose_stage_policy`; ``answer`` are those of a policy that
    is known, and the most that comes back. O(atoms^2 x labels) time.
    """
    least = min(answer, _knapsack(stage, choices, limits))
    return max(least, _relaxed(stage, choices, limits, answer))


def _relaxed(
    stage: LabelledStage, choices: Collection[Policy], limits: StageLimits, answer: float
) -> float:
    def select(labels: list[Label], boundary: int) -> list[Label]:
        useful = [x for x in labels if x.seconds < answer and limits.peak(x) <= limits.budget]
        return _merged(useful, stage.needed_from(boundary))

    return min((label.seconds for label in stage.search(choices, select)), default=answer)


def _merged(labels: list[Label], later: int) -> list[Label]:
    """At most `_MOST_LABELS`, of which one is at least as good as each of ``labels``.

    ``later`` has a bit for each value that matters from here on.
    """
    exact = len(labels) <= _MOST_COMPARED
    kept: list[Label] = []
    for label in sorted(labels, key=lambda x: (x.seconds, x.kept, x.worst)):
        counts = label.counted & later, label.hosted & later
        for i, other in enumerate(kept):
            if other.kept > label.kept or other.worst > label.worst:
                continue
            if not (counts[0] & ~other.counted or counts[1] & ~other.hosted):
                break
            if not exact:
                kept[i] = _union(other, label)
                break
        else:
            kept.append(label)
    if len(kept) <= _MOST_LABELS:
        return kept
    # Join neighbours whose seconds differ the least.
    gaps = sorted(range(1, len(kept)), key=lambda i: kept[i].seconds - kept[i - 1].seconds)
    joined = set(gaps[: len(kept) - _MOST_LABELS])
    merged: list[Label] = []
    for i, label in enumerate(kept):
        if i in joined:
            merged[-1] = _union(merged[-1], label)
        else:
            merged.append(label)
    return merged


def _union(a: Label, b: Label) -> Label:
    return replace(
        a,
        seconds=min(a.seconds, b.seconds),
        kept=min(a.kept, b.kept),
        worst=min(a.worst, b.worst),
        counted=a.counted | b.counted,
        hosted=a.hosted | b.hosted,
        before=None,
    )


def _knapsack(stage: LabelledStage, choices: Collection[Policy], limits: StageLimits) -> float:
    recompute = any(choice.recompute for choice in choices)
    offload = any(choice.offload for choice in choices)
    room = limits.budget - limits.static - limits.others
    least = 0.0
    held = 0.0
    live: dict[int, float] = {}
    for t in range(len(stage.nodes)):
        for value in stage.saved_at[t]:
            live.setdefault(value, stage.nbytes[value])
        held = sum(live.values())
        own = sum(stage.nbytes[v] for v in stage.saved_at[t] if stage.single[v])
        excess = held * limits.held - own + stage.fixed[t] - room
        if excess <= 0:
            continue
        # Values of micro-batches that wait go with the same decision, so each counts for all.
        offers: dict[tuple[str, int], list[float]] = {}
        for value, nbytes in live.items():
            producer = stage.producer[value]
            again = stage.forward_seconds[producer] if recompute and producer >= 0 else None
            away = 2 * nbytes / stage.kind.host_bandwidth if offload else None
            if again is not None and (away is None or again <= away):
                entry = offers.setdefault(("node", producer), [again, 0.0])
                entry[1] += nbytes * limits.held
            elif away is not None:
                offers["value", value] = [away, nbytes * limits.held]
            elif recompute:  # it was received: only the boundary could be elsewhere
                continue
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
