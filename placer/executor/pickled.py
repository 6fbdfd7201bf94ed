"""Saves and restores a placed module: the model, the plan, and the call that was captured."""

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
    """The call from which a graph was captured, with tensors on ``meta``, and the state of the model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    modes: tuple[bool, ...]  # the training flag of every module, in the order of ``modules()``
    whole: frozenset[str]  # paths of modules that were captured as one node
    guards: tuple[AttributeGuard, ...]  # plain attributes that the program read
    ignore_device_moves: bool = False


def example_call(staged: StagedModel) -> ExampleCall:
    """The call from which ``staged`` can be captured and emitted again."""
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
    """In this block, give ``model`` the modes and guarded attributes of ``call``, and disable hooks.

    Hooks are disabled on modules whose inside was captured; others run as part of the model.
    """
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
    """Capture ``model`` with the call of a pickled module, and emit its stages.

    Generated code is not pickled. Raises ``PlanError`` if the graph is not the one that was planned,
    and ``CaptureError`` if capture fails. Call it inside `as_captured`.
    """
    program = capture_model(
        model, call.args, call.kwargs, ignore_device_moves=call.ignore_device_moves
    )
    check_plan(plan, program)
    return emit_stages(program, *plan.parts)


def _set_modes(model: nn.Module, modes: Sequence[bool]) -> None:
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode
