"""Finds the layer whose code raised an exception in a stage.

A forward, and a recomputation in backward, has a line of the stage's code in its traceback. A backward has
none. If the environment variable PLACER_ANOMALY is 1, torch's anomaly mode keeps the traceback of every
operation's forward, and says that of the one whose backward failed. This slows training several times, so
it is for a second run.
"""

from __future__ import annotations

import os
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from placer.emit import StageCode, node_lines
from placer.errors import causes

_FRAME = re.compile(r'File "(.+)", line (\d+)')


class LayerFailure(Exception):
    """An exception in a stage's code; ``layer`` is "" if unknown, ``phase`` that of `MicrobatchRun`."""

    def __init__(self, stage_index: int, layer: str, phase: str) -> None:
        super().__init__(stage_index, layer, phase)
        self.stage_index = stage_index
        self.layer = layer
        self.phase = phase


@contextmanager
def anomalies_kept() -> Iterator[list[warnings.WarningMessage]]:
    """Turns on torch's anomaly mode in the block if PLACER_ANOMALY is 1; it adds its warnings to the list.

    All warnings of the block are given again at its end.
    """
    if os.environ.get("PLACER_ANOMALY") != "1":
        yield []
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with torch.autograd.set_detect_anomaly(True, check_nan=False):
                yield caught
        finally:
            given = list(caught)
    for each in given:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


def explain_failure(
    code: StageCode,
    phase: str,
    error: Exception,
    layer_of: Mapping[str, str],
    anomalies: Sequence[warnings.WarningMessage],
) -> LayerFailure:
    """The `LayerFailure` for ``error``, which the stage of ``code`` raised.

    ``layer_of`` has the layer of each node of the model, ``anomalies`` the warnings of `anomalies_kept`.
    """
    node = ""
    if phase in ("forward", "backward"):
        frames = [
            (frame.f_code.co_filename, number)
            for cause in causes(error)
            for frame, number in traceback.walk_tb(cause.__traceback__)
        ]
        for warning in anomalies:
            frames += [(file, int(number)) for file, number in _FRAME.findall(str(warning.message))]
        node = _node_of(code, frames)
    return LayerFailure(code.index, layer_of.get(node, ""), phase)


def _node_of(code: StageCode, frames: Sequence[tuple[str, int]]) -> str:
    """The node that the first of ``frames`` in the stage's code computes; "" if there is none."""
    stage = [segment.forward for segment in code.segments]
    lines = {each.__code__.co_filename: node_lines(each.__globals__) or {} for each in stage}
    found = (lines[file].get(number, "") for file, number in frames if file in lines)
    return next(found, "")
