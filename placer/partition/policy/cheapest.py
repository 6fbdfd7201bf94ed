"""Which nodes of one stage to recompute or to offload, so that it fits at the least extra time.

Atoms (`placer.partition.policy.labels`) are added one by one (kept, or offloaded) or in runs (recomputed
together). A first search finds the least peak: it drops a label when another at the same boundary leads
to no higher peak whatever follows. Where that is within the limits, a second one finds less time: it
drops a label when another is as good by its sums.

O(atoms^2 x labels) extensions, at most `_MOST_LABELS` labels per boundary. It is a heuristic by that
limit, by the choice of atoms, and because the second search compares labels of unlike pasts by their
sums alone; `placer.partition.policy.least` bounds from below what any policy can cost. (Dynamic
programs for chains: Griewank and Walther, "Revolve", ACM TOMS 2000; Beaumont et al., "Efficient Combination
of Rematerialization and Offloading for Training DNNs", NeurIPS 2021.)
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from placer.partition.policy.labels import (
    KEEP,
    Label,
    LabelledStage,
    Policy,
    StageLimits,
)
from placer.regions import RegionKey

_MOST_LABELS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePolicy:
    """A policy of a stage: runs of nodes with what is done to each, extra seconds, peak bytes."""

    runs: tuple[tuple[tuple[int, ...], Policy], ...]
    seconds: float
    peak: float


def choose_stage_policy(
    stage: LabelledStage, choices: Collection[Policy], limits: StageLimits
) -> StagePolicy:
    """The cheapest policy of ``stage`` within ``limits``.

    ``choices`` besides keeping. Where nothing fits, the answer is that with the least peak.
    """
    most_saving = _lightest(stage, choices)
    chosen = min(most_saving, key=lambda label: (limits.peak(label), label.seconds))
    if limits.peak(chosen) <= limits.budget:
        cheapest = stage.search(choices, partial(_within_budget, limits=limits))
        chosen = min([chosen, *cheapest], key=lambda x: (x.seconds, limits.peak(x)))
    runs = []
    step: Label | None = chosen
    while step is not None:
        first, last = step.span
        inside = [node for atom in stage.atoms[first:last] for node in atom]
        if step.policy != KEEP:
            runs.append((tuple(stage.nodes[t] for t in inside), step.policy))
        step = step.before
    return StagePolicy(runs=tuple(reversed(runs)), seconds=chosen.seconds, peak=limits.peak(chosen))


def _lightest(stage: LabelledStage, choices: Collection[Policy]) -> list[Label]:
    """The labels of the whole stage among which the least peak is; they depend on no limit."""
    known = stage.most_saving.get(frozenset(choices))
    if known is None:
        known = stage.search(choices, partial(_least_peak, stage=stage))
        stage.most_saving[frozenset(choices)] = known
    return known


def _least_peak(labels: list[Label], boundary: int, *, stage: LabelledStage) -> list[Label]:
    """Labels from which no other leads to a lower peak, whatever follows.

    What follows costs a label the more, the less of what is needed later it has counted.
    """
    later = stage.needed_from(boundary)
    kept: list[Label] = []
    for label in sorted(labels, key=lambda x: (x.kept, x.worst, x.seconds)):
        if not any(
            other.worst <= label.worst
            and other.kept + stage.bytes_of(label.counted & ~other.counted & later) <= label.kept
            for other in kept
        ):
            kept.append(label)
    return _some(kept)


def _within_budget(labels: list[Label], boundary: int, *, limits: StageLimits) -> list[Label]:
    """Those within the budget that no other is as good as by its sums."""
    kept: list[Label] = []
    # Of those so far, the least `worst` of all that keep at most so much: ascending, and descending.
    most_kept: list[float] = []
    least_worst: list[float] = []
    for label in sorted(labels, key=lambda x: (x.seconds, x.kept, x.worst)):
        if limits.peak(label) > limits.budget:
            continue
        at = bisect.bisect_right(most_kept, label.kept)
        if at and least_worst[at - 1] <= label.worst:
            continue
        kept.append(label)
        end = at
        while end < len(least_worst) and least_worst[end] >= label.worst:
            end += 1
        most_kept[at:end], least_worst[at:end] = [label.kept], [label.worst]
    return _some(kept)


def _some(labels: list[Label]) -> list[Label]:
    """At most `_MOST_LABELS`, an even choice."""
    if len(labels) <= _MOST_LABELS:
        return labels
    step = (len(labels) - 1) / (_MOST_LABELS - 1)
    return [labels[round(i * step)] for i in range(_MOST_LABELS)]


def keys_of(
    layer_of: Sequence[str], runs: Sequence[tuple[tuple[int, ...], Policy]]
) -> dict[int, RegionKey]:
    """Node -> key for the runs of a stage under its policy; the labels name the layers that a run spans."""
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
