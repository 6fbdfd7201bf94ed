"""Chooses which nodes of one stage to recompute or offload, so that it fits at the least extra time.

A policy is built block by block (`placer.partition.policy.search`): a block is kept or offloaded, or
several blocks are recomputed together. A first search finds the least peak. It drops a partial policy if
another one at the same boundary leads to a peak at most as high, whatever follows. If the least peak is
within the limits, a second search minimizes the time. It drops a partial policy if none of another one's
sums is larger. If host memory is limited too, the offloaded bytes are one of the sums, rounded up to one of
`_HOST_LEVELS` levels.

There are O(blocks^2 * partial policies) extensions, and at most `_MAX_PARTIAL` partial policies per
boundary. The result is heuristic because of that limit, because of the choice of blocks, and because the
second search compares only sums. For dynamic programs on chains, see Griewank and Walther, "Revolve", ACM
TOMS 2000, and Beaumont et al., "Efficient Combination of Rematerialization and Offloading for Training DNNs",
NeurIPS 2021.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from placer.partition.policy.search import PolicySearch
from placer.partition.policy.types import KEEP, PartialPolicy, Policy, StageLimits
from placer.regions import RegionKey

_MAX_PARTIAL = 120
_HOST_LEVELS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePolicy:
    """A policy for a whole stage, with its extra seconds and its peak bytes.

    ``runs`` are the runs of consecutive nodes that are not kept, each with its policy. ``hosted`` is the host
    memory that the policy takes, in bytes per micro-batch.
    """

    runs: tuple[tuple[tuple[int, ...], Policy], ...]
    seconds: float
    peak: float
    hosted: float


def choose_stage_policy(
    stage: PolicySearch, choices: Collection[Policy], limits: StageLimits
) -> StagePolicy:
    """The fastest policy of ``stage`` within ``limits``; if none is found, the one with the least peak.

    ``choices`` are the policies that a block may have, besides `KEEP`. The search is a heuristic.
    """
    key = frozenset(choices), limits
    if key not in stage.cache.chosen:
        stage.cache.chosen[key] = _choose(stage, choices, limits)
    chosen = stage.cache.chosen[key]
    runs = []
    step: PartialPolicy | None = chosen
    while step is not None:
        first, last = step.span
        inside = [node for block in stage.blocks[first:last] for node in block]
        if step.policy != KEEP:
            runs.append((tuple(stage.nodes[t] for t in inside), step.policy))
        step = step.before
    return StagePolicy(
        runs=tuple(reversed(runs)),
        seconds=chosen.seconds,
        peak=limits.peak(chosen),
        hosted=chosen.hosted,
    )


def _choose(stage: PolicySearch, choices: Collection[Policy], limits: StageLimits) -> PartialPolicy:
    """The policy that `choose_stage_policy` returns."""
    within_host = math.isfinite(limits.host_budget)
    lightest = _least_peaks(stage, choices, limits.host_budget)
    if within_host:
        lightest = [*lightest, *_least_hosted(stage, choices, limits)]
    chosen = min(
        lightest or _least_peaks(stage, choices, math.inf),
        key=lambda candidate: (
            candidate.hosted > limits.host_budget,
            limits.peak(candidate),
            candidate.seconds,
        ),
    )
    if limits.fits(chosen):
        select = partial(_within_both if within_host else _within_budget, limits=limits)
        cheapest = stage.search(choices, select)
        # Search without offloading too, as the first search may have dropped the best
        if within_host:
            without = [choice for choice in choices if not choice.offload]
            cheapest += [x for x in stage.search(without, select) if limits.fits(x)]
        chosen = min([chosen, *cheapest], key=lambda x: (x.seconds, limits.peak(x)))
    return chosen


def least_host_bytes(
    stage: PolicySearch, choices: Collection[Policy], limits: StageLimits
) -> float:
    """The least host memory, in bytes per micro-batch, of the policies found within the device's budget.

    Returns 0 if no policy is within that budget.
    """
    return min((found.hosted for found in _least_hosted(stage, choices, limits)), default=0.0)


def _least_hosted(
    stage: PolicySearch, choices: Collection[Policy], limits: StageLimits
) -> list[PartialPolicy]:
    """Policies within the device's budget, among them the one that takes the least host memory."""
    return stage.search(
        choices,
        partial(_within_budget, limits=limits, cost=lambda found: (found.hosted, found.seconds)),
    )


def _least_peaks(
    stage: PolicySearch, choices: Collection[Policy], host_budget: float
) -> list[PartialPolicy]:
    """Policies of the whole stage, among them the one with the least peak, whatever the device's budget."""
    key, known = (frozenset(choices), host_budget), stage.cache.least_peaks
    if key not in known:
        select = partial(_not_dominated, stage=stage, host_budget=host_budget)
        known[key] = stage.search(choices, select)
    return known[key]


def _not_dominated(
    partials: list[PartialPolicy], boundary: int, *, stage: PolicySearch, host_budget: float
) -> list[PartialPolicy]:
    """The partial policies within the host's budget that may lead to the least peak.

    Let a value be needed later, and let only policy B have it on the device. Then the following blocks add at
    most its bytes more to a policy A than to B. A dominates B if it needs no more than B even so.
    """
    later = stage.needed_from(boundary)
    kept: list[PartialPolicy] = []
    limited = math.isfinite(host_budget)
    for candidate in sorted(partials, key=lambda x: (x.kept, x.backward_peak, x.seconds)):
        if candidate.hosted > host_budget:
            continue
        if not any(
            other.backward_peak <= candidate.backward_peak
            and not (limited and other.hosted > candidate.hosted)
            and other.kept + stage.bytes_of(candidate.on_device & ~other.on_device & later)
            <= candidate.kept
            for other in kept
        ):
            kept.append(candidate)
    return _capped(kept)


def _within_budget(
    partials: list[PartialPolicy],
    boundary: int,
    *,
    limits: StageLimits,
    cost: Callable[[PartialPolicy], Any] = lambda found: found.seconds,
) -> list[PartialPolicy]:
    """The partial policies within the device's budget that no other one dominates in bytes and ``cost``."""
    kept: list[PartialPolicy] = []
    least = _Staircase()
    fitting = (x for x in partials if limits.peak(x) <= limits.budget)
    for candidate in sorted(fitting, key=lambda x: (cost(x), x.kept, x.backward_peak)):
        if not least.has_below(candidate):
            kept.append(candidate)
            least.add(candidate)
    return _capped(kept)


def _within_both(
    partials: list[PartialPolicy], boundary: int, *, limits: StageLimits
) -> list[PartialPolicy]:
    """Like `_within_budget`, within both budgets; offloaded bytes are compared too."""
    kept: list[PartialPolicy] = []
    levels = [_Staircase() for _ in range(_HOST_LEVELS + 1)]
    step = limits.host_budget / _HOST_LEVELS
    for candidate in sorted(partials, key=lambda x: (x.seconds, x.kept, x.backward_peak)):
        if not limits.fits(candidate):
            continue
        level = min(_HOST_LEVELS, math.ceil(candidate.hosted / step)) if step else 0
        if not any(least.has_below(candidate) for least in levels[: level + 1]):
            kept.append(candidate)
            levels[level].add(candidate)
    return _capped(kept)


class _Staircase:
    """A Pareto front of ``kept`` and ``backward_peak`` that tests dominance in logarithmic time."""

    def __init__(self) -> None:
        self._kept: list[float] = []
        self._backward_peak: list[float] = []

    def has_below(self, candidate: PartialPolicy) -> bool:
        """Whether some entry is no larger than the candidate in both ``kept`` and ``backward_peak``."""
        at = bisect.bisect_right(self._kept, candidate.kept)
        return bool(at) and self._backward_peak[at - 1] <= candidate.backward_peak

    def add(self, candidate: PartialPolicy) -> None:
        """Add a candidate that no entry dominates, and remove those that it dominates."""
        at = end = bisect.bisect_right(self._kept, candidate.kept)
        peaks = self._backward_peak
        while end < len(peaks) and peaks[end] >= candidate.backward_peak:
            end += 1
        self._kept[at:end], peaks[at:end] = [candidate.kept], [candidate.backward_peak]


def _capped(partials: list[PartialPolicy]) -> list[PartialPolicy]:
    """At most `_MAX_PARTIAL` of ``partials``, evenly spaced."""
    if len(partials) <= _MAX_PARTIAL:
        return partials
    step = (len(partials) - 1) / (_MAX_PARTIAL - 1)
    return [partials[round(i * step)] for i in range(_MAX_PARTIAL)]


def keys_of(
    layer_of: Sequence[str], runs: Sequence[tuple[tuple[int, ...], Policy]]
) -> dict[int, RegionKey]:
    """The region key of each node in the ``runs`` of a stage's policy; its label names the layers it spans.

    Neighbouring runs that are offloaded but not recomputed form one region, so that a value that several of
    them save is copied only once.
    """
    keys: dict[int, RegionKey] = {}
    before = ""
    for nodes, policy in _joined(runs):
        inside = [layer_of[node] for node in nodes if layer_of[node]] or ["the model's own code"]
        label = inside[0] if inside[0] == inside[-1] else f"{inside[0]} … {inside[-1]}"
        if label == before:
            label += " (next part)"
        before = label
        key = RegionKey(label=label, recompute=policy.recompute, offload=policy.offload)
        keys.update(dict.fromkeys(nodes, key))
    return keys


def _joined(runs: Sequence[tuple[tuple[int, ...], Policy]]) -> list[tuple[tuple[int, ...], Policy]]:
    """``runs`` with neighbouring offloaded runs merged, as `keys_of` says."""
    joined: list[tuple[tuple[int, ...], Policy]] = []
    for nodes, policy in runs:
        if joined and not policy.recompute and joined[-1][1] == policy:
            before = joined[-1][0]
            if before[-1] + 1 == nodes[0]:
                joined[-1] = (*before, *nodes), policy
                continue
        joined.append((nodes, policy))
    return joined
