"""Saves and restores a placed module: the model, the plan, and the call that was captured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from placer.emit import StagedModel, emit_stages
from placer.errors import PlacerError
from placer.executor.calls.program_cache import split_rules
from placer.plan.check import check_plan
from placer.plan.types import Plan
from placer.precision import planned_autocast, recorded_under
from placer.program import (
    AttributeGuard,
    BatchDim,
    guarded_attributes_restored,
    is_torch_leaf,
    lower,
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
    guards: tuple[AttributeGuard, ...]  # plain attributes of the model that the program read
    batch_dims: Mapping[str, BatchDim]  # name of an input -> dimension of the batch
    ignore_device_moves: bool = False


def example_call(staged: StagedModel) -> ExampleCall:
    """The call from which ``staged`` can be captured and emitted again."""
    conditions = staged.conditions
    args, kwargs = rebuild_call(staged.call, staged.example_inputs())
    return ExampleCall(
        args=args,
        kwargs=kwargs,
        modes=conditions.modes,
        whole=conditions.whole,
        guards=tuple(s for s in conditions.guards if s.is_plain and s.is_in_model),
        batch_dims={each.name: each.batch_dim for each in staged.call.inputs},
        ignore_device_moves=conditions.ignore_device_moves,
    )


def model_signature(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The modules of ``model`` with their classes, and its tensors with their shapes and dtypes."""
    modules = [
        f"{path} {type(m).__module__}.{type(m).__qualname__}" for path, m in model.named_modules()
    ]
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return tuple(modules), tuple(f"{name} {list(t.shape)} {t.dtype}" for name, t in tensors)


def check_unchanged(model: nn.Module, signature: tuple[tuple[str, ...], ...]) -> None:
    """Raise ``PlacerError`` if ``model`` has other modules or tensors than when it had this signature."""
    if model_signature(model) != signature:
        raise PlacerError(
            "pickle",
            "the modules or tensors of the model were changed after it was placed, and loading follows the "
            "plan of the model as it was",
            "place the changed model, or save placed.state_dict()",
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
    with recorded_under(planned_autocast(plan.precision)):
        program = lower(
            model,
            call.args,
            call.kwargs,
            plan.rewrites,
            rules=split_rules(plan).with_names(call.batch_dims),
            ignore_device_moves=call.ignore_device_moves,
        )
    check_plan(plan, program)
    return emit_stages(program, plan)


def _set_modes(model: nn.Module, modes: Sequence[bool]) -> None:
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode
