"""An exception in a stage's own code, with the layer or the part of autograd's graph where it arose."""

from __future__ import annotations

import traceback
from typing import Any

from torch import nn

from placer.emit import StageCode, node_lines
from placer.errors import causes
from placer.executor.distributed.failures.failing_nodes import FailingNodes, find_failing_nodes


class LayerFailure(Exception):
    """An exception inside a stage's own code, with the node that raised it.

    One of a backward has the micro-batch, and of autograd's graph what may have failed.
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
    """What names the stage of ``code``, and as far as it shows the node, that raised ``error``.

    ``given`` is the micro-batch; ``part`` has the rank's modules. ``phase`` is "forward", "backward",
    or what is done with what a stage made.
    """
    if phase != "backward":
        node = _failing_node(code, error) if phase == "forward" else ""
        return LayerFailure(code.index, node, phase)
    node, failing = _failing_node(code, error), _find_failing(error, part)
    return LayerFailure(code.index, node, phase, given=given, failing=failing)


def _find_failing(error: Exception, part: nn.Module) -> FailingNodes | None:
    # A backward that talks to other ranks must not be run twice: they would not answer.
    talks = any(getattr(module, "process_group", None) for module in part.modules())
    try:
        return find_failing_nodes(error, part, may_run_again=not talks)
    except Exception:  # what failed first is to be told, whatever its graph looks like
        return None


def _failing_node(code: StageCode, error: BaseException) -> str:
    """The node whose line of the generated code the traceback goes through; "" if none.

    In backward such lines are run by what is recomputed.
    """
    lines = {segment.forward.__code__: node_lines(segment) for segment in code.segments}
    for cause in causes(error):
        for frame, number in traceback.walk_tb(cause.__traceback__):
            found = lines.get(frame.f_code)
            if found is not None:
                return found.get(number, "")
    return ""
