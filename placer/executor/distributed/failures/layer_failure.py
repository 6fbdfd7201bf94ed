"""Describes an exception in a stage's code: the node, or the autograd nodes, that may have raised it."""

from __future__ import annotations

import traceback
from typing import Any

from torch import nn

from placer.emit import StageCode, node_lines
from placer.errors import causes
from placer.executor.distributed.failures.failing_nodes import FailingNodes, find_failing_nodes


class LayerFailure(Exception):
    """An exception in a stage's code, with the ``node`` of the model that raised it ("" if unknown).

    For a backward, ``given`` is the micro-batch and ``failing`` has the autograd nodes that may have
    raised it.
    """

    def __init__(
        self,
        stage_index: int,
        node: str,
        phase: str,
        *,
        given: Any = None,
        failing: FailingNodes | None = None,
    ) -> None:
        super().__init__(stage_index, node, phase)
        self.stage_index = stage_index
        self.node = node
        self.phase = phase
        self.given = given
        self.failing = failing


def explain_failure(
    code: StageCode, phase: str, error: Exception, *, given: Any, part: nn.Module
) -> LayerFailure:
    """The `LayerFailure` for ``error``, which the stage of ``code`` raised.

    ``given`` is the micro-batch; ``part`` has the rank's modules. ``phase`` is that of `MicrobatchRun`.
    """
    if phase != "backward":
        node = _failing_node(code, error) if phase == "forward" else ""
        return LayerFailure(code.index, node, phase)
    node, failing = _failing_node(code, error), _find_failing(error, part)
    return LayerFailure(code.index, node, phase, given=given, failing=failing)


def _find_failing(error: Exception, part: nn.Module) -> FailingNodes | None:
    # A backward that communicates must not be run twice, because the other ranks would not take part.
    talks = any(getattr(module, "process_group", None) for module in part.modules())
    try:
        return find_failing_nodes(error, part, may_run_again=not talks)
    except Exception:  # report the first failure even if its graph cannot be analysed
        return None


def _failing_node(code: StageCode, error: BaseException) -> str:
    """The node whose line of generated code is in the traceback; "" if there is none.

    In backward that is the case for layers that are recomputed.
    """
    lines = {segment.forward.__code__: node_lines(segment) for segment in code.segments}
    for cause in causes(error):
        for frame, number in traceback.walk_tb(cause.__traceback__):
            found = lines.get(frame.f_code)
            if found is not None:
                return found.get(number, "")
    return ""
