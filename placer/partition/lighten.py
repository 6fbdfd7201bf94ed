"""Which nodes of one stage to recompute or to offload, so that it fits at the least extra time.

Atoms (`placer.partition.labels`) are added one by one (kept, or offloaded) or in runs (recomputed
together), and a label is dropped when another at the same border is as good in all three respects.

O(atoms^2 x labels) extensions, at most `_MOST_LABELS` labels per border. It is a heuristic by that
limit, by the choice of atoms, and because labels of unlike pasts are compared by their sums alone;
`placer.partition.least` bounds from below what any treatment can cost. (Dynamic programs for chains:
Griewank and Walther, "Revolve", ACM TOMS 2000; Beaumont et al., "Efficient Combination of
Rematerialization and Offloading for Training DNNs", NeurIPS 2021.)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from placer.partition.labels import (
    KEEP,
    Label,
    LabelledStage,
    StageLimits,
    Treatment,
    first_label,
    peak_of,
)
from placer.regions import RegionKey

_MOST_LABELS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Lightened:
    """A treatment of a stage: runs of nodes with what is done to each, extra seconds, peak bytes."""

    runs: tuple[tuple[tuple[int, ...], Treatment], ...]
    seconds: float
    peak: float


def lighten_stage(
    stage: LabelledStage, choices: Collection[Treatment], limits: StageLimits
) -> Lightened:
    """The cheapest treatment of ``stage`` within ``limits``.

    ``choices`` besides keeping. Where nothing fits, the answer is that with the least peak.
    """
    count = len(stage.atoms)
    at: list[list[Label]] = [[first_label()], *([] for _ in range(count))]
    for border in range(count):
        at[border] = _best(at[border], limits)
        for label in at[border]:
            for end, made in stage.extend(label, border, choices):
                at[end].append(made)
    final = _best(at[count], limits)
    fitting = [label for label in final if peak_of(label, limits) <= limits.budget]
    if fitting:
        chosen = min(fitting, key=lambda label: (label.seconds, peak_of(label, limits)))
    else:
        chosen = min(final, key=lambda label: (peak_of(label, limits), label.seconds))
    runs = []
    step: Label | None = chosen
    while step is not None:
        first, last = step.span
        inside = [node for atom in stage.atoms[first:last] for node in atom]
        if step.treatment != KEEP:
            runs.append((tuple(stage.nodes[t] for t in inside), step.treatment))
        step = step.before
    return Lightened(
        runs=tuple(reversed(runs)), seconds=chosen.seconds, peak=peak_of(chosen, limits)
    )


def _best(labels: list[Label], limits: StageLimits) -> list[Label]:
    """Labels that no other is as good as in every respect; of too many, an even choice by seconds."""
    kept: list[Label] = []
    for label in sorted(labels, key=lambda x: (x.seconds, x.kept, x.worst)):
        if not any(o.kept <= label.kept and o.worst <= label.worst for o in kept):
            kept.append(label)
    fitting = [label for label in kept if peak_of(label, limits) <= limits.budget]
    kept = fitting or sorted(kept, key=lambda x: peak_of(x, limits))[:_MOST_LABELS]
    if len(kept) <= _MOST_LABELS:
        return kept
    step = (len(kept) - 1) / (_MOST_LABELS - 1)
    return [kept[round(i * step)] for i in range(_MOST_LABELS)]


def keys_of(
    layer_of: Sequence[str], runs: Sequence[tuple[tuple[int, ...], Treatment]]
) -> dict[int, RegionKey]:
    """Node -> key for the runs of a lightened stage; the labels name the layers that a run spans."""
    keys: dict[int, RegionKey] = {}
    before = ""
    for nodes, treatment in runs:
        inside = [layer_of[node] for node in nodes if layer_of[node]] or ["the model's own code"]
        label = inside[0] if inside[0] == inside[-1] else f"{inside[0]} … {inside[-1]}"
        if label == before:
            label += " (next part)"
        before = label
        key = RegionKey(label=label, recompute=treatment.recompute, offload=treatment.offload)
        keys.update(dict.fromkeys(nodes, key))
    return keys
