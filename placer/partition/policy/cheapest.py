"""Which nodes of one stage to recompute or to offload, so that it fits at the least extra time.

A policy is built block by block (`placer.partition.policy.search`): a block is kept or offloaded, or
several are recomputed together. A first search finds the least peak. It drops a partial policy if
another one at the same boundary leads to no higher peak, whatever follows. If that peak is within the
limits, a second search finds less time. It drops a partial policy if another one has no larger sums.

O(blocks^2 x partial policies) extensions, at most `_MOST_PARTIAL` partial policies per boundary. A
heuristic: by that limit, by the choice of blocks, and because the second search compares sums alone.
`placer.partition.policy.least` bounds the time of any policy from below. (Dynamic programs for chains:
Griewank and Walther, "Revolve", ACM TOMS 2000; Beaumont et al., "Efficient Combination of
Rematerialization and Offloading for Training DNNs", NeurIPS 2021.)
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from placer.partition.policy.search import PolicySearch
from placer.partition.policy.types import (
    KEEP,
    PartialPolicy,
    Policy,
    StageLimits,
)
from placer.regions import RegionKey

_MOST_PARTIAL = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePolicy:
    """A policy of a stage: runs of nodes with the policy of each, extra seconds, and peak bytes."""

    runs: tuple[tuple[tuple[int, ...], Policy], ...]
    seconds: float
    peak: float


def choose_stage_policy(
    stage: PolicySearch, choices: Collection[Policy], limits: StageLimits
) -> StagePolicy:
    """The policy of ``stage`` within ``limits`` that takes the least time, or else has the least peak.

    ``choices`` are the policies allowed for blocks, besides keeping.
    """
    chosen = min(
        _least_peaks(stage, choices),
        key=lambda candidate: (limits.peak(candidate), candidate.seconds),
    )
    if limits.peak(chosen) <= limits.budget:
        cheapest = stage.search(choices, partial(_within_budget, limits=limits))
        chosen = min([chosen, *cheapest], key=lambda x: (x.seconds, limits.peak(x)))
    runs = []
    step: PartialPolicy | None = chosen
    while step is not None:
        first, last = step.span
        inside = [node for block in stage.blocks[first:last] for node in block]
        if step.policy != KEEP:
            runs.append((tuple(stage.nodes[t] for t in inside), step.policy))
        step = step.before
    return StagePolicy(runs=tuple(reversed(runs)), seconds=chosen.seconds, peak=limits.peak(chosen))


def _least_peaks(stage: PolicySearch, choices: Collection[Policy]) -> list[PartialPolicy]:
    """Policies of the whole stage, the one with the least peak among them whatever the limits are."""
    known = stage.least_peaks.get(frozenset(choices))
    if known is None:
        known = stage.search(choices, partial(_not_dominated, stage=stage))
        stage.least_peaks[frozenset(choices)] = known
    return known


def _not_dominated(
    partials: list[PartialPolicy], boundary: int, *, stage: PolicySearch
) -> list[PartialPolicy]:
    """The partial policies that may lead to the least peak, whatever follows.

    What follows costs one more than another by at most the bytes of the values that are needed later
    and that only the other has on the device.
    """
    later = stage.needed_from(boundary)
    kept: list[PartialPolicy] = []
    for candidate in sorted(partials, key=lambda x: (x.kept, x.backward_peak, x.seconds)):
        if not any(
            other.backward_peak <= candidate.backward_peak
            and other.kept + stage.bytes_of(candidate.on_device & ~other.on_device & later)
            <= candidate.kept
            for other in kept
        ):
            kept.append(candidate)
    return _capped(kept)


def _within_budget(
    partials: list[PartialPolicy], boundary: int, *, limits: StageLimits
) -> list[PartialPolicy]:
    """Those within the budget of which no other has sums that are as small."""
    kept: list[PartialPolicy] = []
    # A staircase: the least `backward_peak` of all so far that keep at most so much.
    most_kept: list[float] = []
    least_worst: list[float] = []
    for candidate in sorted(partials, key=lambda x: (x.seconds, x.kept, x.backward_peak)):
        if limits.peak(candidate) > limits.budget:
            continue
        at = bisect.bisect_right(most_kept, candidate.kept)
        if at and least_worst[at - 1] <= candidate.backward_peak:
            continue
        kept.append(candidate)
        end = at
        while end < len(least_worst) and least_worst[end] >= candidate.backward_peak:
            end += 1
        most_kept[at:end], least_worst[at:end] = [candidate.kept], [candidate.backward_peak]
    return _capped(kept)


def _capped(partials: list[PartialPolicy]) -> list[PartialPolicy]:
    """At most `_MOST_PARTIAL` of them, spread evenly."""
    if len(partials) <= _MOST_PARTIAL:
        return partials
    step = (len(partials) - 1) / (_MOST_PARTIAL - 1)
    return [partials[round(i * step)] for i in range(_MOST_PARTIAL)]


def keys_of(
    layer_of: Sequence[str], runs: Sequence[tuple[tuple[int, ...], Policy]]
) -> dict[int, RegionKey]:
    """Node -> region key for the ``runs`` of a stage under its policy, labelled with the layers they span."""
    keys: dict[int, RegionKey] = {}
    before = ""
    for nodes, policy in runs:
        inside = [layer_of[node] for node in nodes if layer_of[node]] or ["the model's own code"]
        label = inside[0] if inside[0] == inside[-1] else f"{inside[0]} … {inside[-1]}"
        if label == before:
            label += " (next part)"
        before = label
        key = RegionKey(label=label, recompute=policy.recompute, offload=policy.offload)
        keys.update(dict.fromkeys(nodes, key))
    return keys
