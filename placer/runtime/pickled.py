"""What a pickled placed module consists of: the model, the plan, and how it was called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from placer.capture import capture_model, rebuild_call, training_flags
from placer.emit import StagedModel, emit_stages
from placer.plan.check import check_fingerprint
from placer.plan.types import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleCall:
    """The call that a graph was captured from, its tensors on ``meta``, and the modes it ran in."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    modes: tuple[bool, ...]  # the training flag of every module, in the order of ``modules()``


def example_call(staged: StagedModel) -> ExampleCall:
    """The call from which ``staged`` can be captured and emitted anew."""
    conditions = staged.conditions
    leaves = [
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in zip(conditions.shapes, conditions.dtypes, strict=True)
    ]
    args, kwargs = rebuild_call(staged.call, leaves)
    return ExampleCall(args=args, kwargs=kwargs, modes=conditions.modes)


def emit_again(model: nn.Module, plan: Plan, call: ExampleCall) -> StagedModel:
    """The stages of ``model`` as they were when it was pickled; its modes are left as they are.

    Generated code is not pickled: what is loaded is captured again. Raises ``PlanError`` when the
    model's code gives another graph than it did, and ``CaptureError``.
    """
    modules = list(model.modules())
    present = training_flags(model)
    _set_modes(modules, call.modes)
    try:
        capture = capture_model(model, call.args, call.kwargs)
    finally:
        _set_modes(modules, present)
    check_fingerprint(plan, capture)
    return emit_stages(capture, *plan.parts)


def _set_modes(modules: Sequence[nn.Module], modes: Sequence[bool]) -> None:
    for module, mode in zip(modules, modes, strict=True):
        module.training = mode
