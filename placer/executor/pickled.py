"""What a pickled placed module consists of: the model, the plan, and how it was called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from placer.emit import StagedModel, emit_stages
from placer.plan.check import check_plan
from placer.plan.types import Plan
from placer.program import (
    AttributeGuard,
    capture_model,
    guarded_attributes_restored,
    is_torch_leaf,
    rebuild_call,
    training_flags,
    without_hooks,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleCall:
    """The call that a graph was captured from, its tensors on ``meta``, and the modes it ran in."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    modes: tuple[bool, ...]  # the training flag of every module, in the order of ``modules()``
    whole: frozenset[str]  # modules that stayed whole
    guards: tuple[AttributeGuard, ...]  # plain attributes that its program read
    ignore_device_moves: bool = False


def example_call(staged: StagedModel) -> ExampleCall:
    """The call from which ``staged`` can be captured and emitted anew."""
    conditions = staged.conditions
    leaves = [
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in zip(conditions.shapes, conditions.dtypes, strict=True)
    ]
    args, kwargs = rebuild_call(staged.call, leaves)
    return ExampleCall(
        args=args,
        kwargs=kwargs,
        modes=conditions.modes,
        whole=conditions.whole,
        guards=tuple(s for s in conditions.guards if s.is_plain),
        ignore_device_moves=conditions.ignore_device_moves,
    )


@contextmanager
def as_captured(model: nn.Module, call: ExampleCall) -> Iterator[None]:
    """Have ``model`` the modes and guards of ``call`` here, and no hooks on what was looked into."""
    present = training_flags(model)
    looked_into = [
        module
        for path, module in model.named_modules()
        if path and path not in call.whole and not is_torch_leaf(module)
    ]
    _set_modes(model, call.modes)
    try:
        guards = guarded_attributes_restored(dict(model.named_modules()), call.guards)
        with without_hooks(looked_into), guards:
            yield
    finally:
        _set_modes(model, present)


def emit_again(model: nn.Module, plan: Plan, call: ExampleCall) -> StagedModel:
    """The stages of ``model``, which is as it was captured.

    Generated code is not pickled: what is loaded is captured again. Raises ``PlanError`` when the
    model's code gives another graph than it did, and ``CaptureError``.
    """
    program = capture_model(
        model, call.args, call.kwargs, ignore_device_moves=call.ignore_device_moves
    )
    check_plan(plan, program)
    return emit_stages(program, *plan.parts)


def _set_modes(model: nn.Module, modes: Sequence[bool]) -> None:
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode
