"""List layers briefly."""

from __future__ import annotations

from collections.abc import Sequence

from placer.plan.types import Plan


def stage_layers(plan: Plan) -> list[tuple[str, ...]]:
    """Per stage the outermost modules that are entirely on it, in program order.

    A module that is on several stages is left out, unless the stage has nothing else.
    """
    stages_of: dict[str, set[int]] = {}
    for stage in plan.stages:
        for node in stage.nodes:
            layer = plan.node_layers.get(node, "")
            while layer:
                stages_of.setdefault(layer, set()).add(stage.index)
                layer = layer.rpartition(".")[0]
    whole = {layer for layer, stages in stages_of.items() if len(stages) == 1}
    found = []
    for stage in plan.stages:
        largest = [_largest(layer, whole) for layer in stage.layers]
        names = dict.fromkeys(layer for layer in largest if layer in whole)
        found.append(tuple(names) or stage.layers)
    return found


def _largest(layer: str, whole: set[str]) -> str:
    """The outermost module around ``layer`` that is in ``whole``, or ``layer``."""
    parts = layer.split(".")
    outer = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    return next((path for path in outer if path in whole), layer)


def compact_layers(layers: Sequence[str], *, most: int = 4) -> str:
    """``layers`` in one line: runs of siblings are joined; if there are many, the middle is left out.

    >>> compact_layers(["stem", "enc.0", "enc.1", "enc.2", "enc.3"])
    'stem, enc.0 … enc.3'
    >>> compact_layers(["a", "b.x", "c", "d.y", "e", "f.0.z", "g"], most=3)
    'a … g (7 layers)'
    """
    if not layers:
        return "(only operations between layers)"
    runs: list[list[str]] = []
    for layer in layers:
        if runs and "." in layer and _parent(runs[-1][-1]) == _parent(layer):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    words = [f"{run[0]} … {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs]
    if len(words) > most:
        return f"{layers[0]} … {layers[-1]} ({len(layers)} layers)"
    return ", ".join(words)


def _parent(layer: str) -> str:
    return layer.rpartition(".")[0]
