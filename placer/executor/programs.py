"""The programs of a placed model: the captured one, and those of other calls, modes and input sizes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from placer._torch import without_modes, without_transforms
from placer.emit import StagedModel, emit_stages
from placer.errors import CaptureError
from placer.plan.types import Plan
from placer.planner.follow import follow_plan
from placer.program import (
    AttributeGuard,
    BoundCall,
    CallFormat,
    SameProgram,
    bind_arguments,
    call_difference,
    call_tensors,
    capture_model,
    captured_key,
    condition_key,
    failed_guard,
    find_difference,
    is_torch_leaf,
    must_stay_whole,
    rebuild_arguments,
    rebuild_call,
)
from placer.regions import find_regions, region_keys, with_overlap

_MOST_GUARDS = 16  # values of attributes per mode and size for which the program is kept
_MOST_CALLS = 16  # ways to call a model; more of them are a number that changes with every call
_OF_STEP = ("target", "loss_fn", "reduction", "normalizer", "own_rows", "scaler")
_PLAIN = (Tensor, bool, int, float, str, torch.dtype, torch.device, type(None))


def _keyword_hint(name: str, value: Any, *, step: bool) -> str:
    """Where a keyword belongs that ``forward`` does not take."""
    if step:
        shown = repr(value) if isinstance(value, bool | int | float | str) else "…"
        return (
            "step passes other keywords to forward; if it is the loss's, give it there: "
            f"functools.partial(loss_fn, {name}={shown})"
        )
    if name == "own_rows":
        return "own_rows is an argument of step; inference takes the whole batch on every rank"
    return f"{name} is an argument of step" if name in _OF_STEP else ""


class _Known(NamedTuple):
    """Stages, and the values of attributes for which they are the model's program."""

    guards: tuple[AttributeGuard, ...]
    staged: StagedModel


class Programs:
    """Finds the stages that compute what ``model`` computes in its present mode for given inputs.

    A captured graph is the program of one call format, of one mode and of the sizes that it leaves
    open. For another mode, dtype or size, other values of the plain attributes that it reads, or
    where modules were replaced, the model is recorded once more on fake tensors: where the program
    is the same, the captured stages serve; where not, or where hooks or parametrizations were put on
    a module that was looked into, it is captured anew and put on the same stages. Answers are kept,
    for the values of attributes that came last. Weights stay where the plan has them.
    """

    def __init__(self, model: nn.Module, plan: Plan, staged: StagedModel) -> None:
        self._model = model
        self._structure = 0  # how often modules were replaced
        self._note_modules()
        self._plan = plan
        self._captured = staged
        self._whole = self._kept_whole()
        self._captured_buffers = self._buffers
        guards = staged.conditions.guards
        key = captured_key(staged.conditions, staged.call), self._whole, self._structure
        self._known: dict[Hashable, list[_Known]] = {key: [_Known(guards, staged)]}

    @property
    def call(self) -> CallFormat:
        """How the model is called in these programs, and what it returns."""
        return self._captured.call

    @property
    def guards(self) -> list[AttributeGuard]:
        """The plain attributes that any of these programs read."""
        return [setting for known in self._known.values() for one in known for setting in one[0]]

    def find(self, inputs: Sequence[Tensor]) -> StagedModel:
        """The stages for one micro-batch of inputs. Raises ``CaptureError``."""
        return self.find_all([inputs])[0]

    def find_all(self, microbatches: Sequence[Sequence[Tensor]]) -> list[StagedModel]:
        """The stages for every micro-batch of a call, between which nothing is done to the model.

        What the model is like is looked up once, and micro-batches of one size get one answer.
        """
        replaced = any(tuple(m._modules.values()) != children for m, children in self._parents)
        # What a parametrization or an old ``spectral_norm`` changes of a layer of torch.
        changed = any(len(m._buffers) != b or len(m._modules) != c for m, b, c in self._leaves)
        if replaced or changed:
            self._structure += 1
            self._note_modules()
        modes = tuple(module.training for module in self._modules)
        whole = self._kept_whole()
        answers: dict[Hashable, StagedModel] = {}
        found = []
        for inputs in microbatches:
            condition = condition_key(self._captured.conditions, self.call, modes, inputs)
            if condition not in answers:
                answers[condition] = self._find(condition, whole, inputs)
            found.append(answers[condition])
        return found

    def _find(
        self, condition: Hashable, whole: tuple[int, ...], inputs: Sequence[Tensor]
    ) -> StagedModel:
        captured = self._captured
        known = self._known.setdefault((condition, whole, self._structure), [])
        for guards, staged in reversed(known):
            if failed_guard(guards, self._module_at) is None:
                return staged
        with _as_in_compile():
            args, kwargs = rebuild_call(captured.call, _without_data(inputs))
            found = None
            # New buffers may be written by nodes that must then stay together.
            if whole == self._whole and self._buffers == self._captured_buffers:
                found = find_difference(self._model, captured.conditions, args, kwargs)
            if isinstance(found, SameProgram):
                known.append(_Known(found.guards, captured))
            else:
                staged = self._capture(args, kwargs)
                known.append(_Known(staged.conditions.guards, staged))
        del known[:-_MOST_GUARDS]
        return known[-1].staged

    def for_call(self, bound: BoundCall) -> Programs:
        """The programs of another call: other arguments given, other constants among them."""
        with _as_in_compile():
            args, kwargs = rebuild_arguments(bound, _without_data(bound.leaves))
            return Programs(self._model, self._plan, self._capture(args, kwargs))

    def _note_modules(self) -> None:
        self._module_at = dict(self._model.named_modules())
        self._modules = list(self._module_at.values())
        self._buffers = {name for name, _ in self._model.named_buffers(remove_duplicate=False)}
        leaves = [module for module in self._modules if is_torch_leaf(module)]
        self._leaves = [(m, len(m._buffers), len(m._modules)) for m in leaves]
        self._containers = [m for m in self._modules[1:] if not is_torch_leaf(m)]
        lists = nn.ModuleList, nn.ModuleDict
        parents = [m for m in self._modules if isinstance(m, lists) or not is_torch_leaf(m)]
        self._parents = [(module, tuple(module._modules.values())) for module in parents]

    def _kept_whole(self) -> tuple[int, ...]:
        """Of the modules that recording may look into, those that it may not now, by their places."""
        return tuple(i for i, module in enumerate(self._containers) if must_stay_whole(module))

    def _capture(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> StagedModel:
        ignored = self._captured.conditions.ignore_device_moves
        program = capture_model(self._model, args, kwargs, ignore_device_moves=ignored)
        stages = follow_plan(self._plan, program)
        keys = region_keys(program, self._plan.checkpoint, self._plan.offload)
        key_of = dict(zip(program.order, keys, strict=True))
        regions = [find_regions(nodes, key_of) for nodes in stages]
        if self._plan.overlaps:
            regions = [with_overlap(found) for found in regions]
        staged = emit_stages(program, stages, regions)
        # Weights stay where they are; those that a parametrization made since are where they are read.
        return replace(staged, state_stage={**staged.state_stage, **self._captured.state_stage})


class Calls:
    """The ways in which a placed model has been called so far, each with its programs.

    Only the captured one where a process has but a part of the model, and could not capture others.
    """

    def __init__(self, captured: Programs, *, captured_only: bool = False) -> None:
        self._known = [captured]
        self._captured_only = captured_only

    def find(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, step: bool = False
    ) -> tuple[Programs, list[Tensor]]:
        """The programs for a call, and its tensors; a call unlike all before is captured.

        The call is one of ``placed(x)``, or of ``placed.step`` if ``step``.

        Raises ``CaptureError`` for arguments that ``forward`` does not take or cannot run on, for
        objects that are no plain values, and when every call brings constants of its own.
        """
        captured = self._known[0]
        try:
            bound = bind_arguments(captured.call.signature, args, kwargs)
        except CaptureError as error:
            unknown = [name for name in kwargs if name not in captured.call.signature.parameters]
            hint = _keyword_hint(unknown[0], kwargs[unknown[0]], step=step) if unknown else ""
            remedy = "; ".join(filter(None, (error.remedy, hint)))
            raise CaptureError(error.where, error.problem, remedy) from None
        for programs in self._known:
            if call_difference(programs.call, bound) is None:
                return programs, call_tensors(programs.call, bound)
        difference = call_difference(captured.call, bound)
        assert difference is not None
        plain = all(isinstance(leaf, _PLAIN) for leaf in bound.leaves)
        if self._captured_only or not plain:
            raise difference
        if len(self._known) > _MOST_CALLS:
            raise CaptureError(
                difference.where,
                f"{difference.problem}, and {_MOST_CALLS} other calls were captured since",
                "pass what is another number in every call as a tensor",
            )
        self._known.append(captured.for_call(bound))
        return self._known[-1], call_tensors(self._known[-1].call, bound)


@contextmanager
def _as_in_compile() -> Iterator[None]:
    """A capture in the midst of the caller's code: as if nothing were going on there."""
    # The caller's saved-tensor hooks (`torch.utils.checkpoint` counts) are to hear nothing of it.
    own_saving = torch.autograd.graph.saved_tensors_hooks(_same, _same)
    anew = torch.inference_mode(False), torch.enable_grad()
    with without_modes(), without_transforms(), own_saving, anew[0], anew[1]:
        yield


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _without_data(leaves: Sequence[Any]) -> list[Any]:
    """``leaves`` with tensors of the same shapes, dtypes and need of gradients on ``meta``."""

    def shaped(x: Tensor) -> Tensor:
        empty = torch.empty(x.shape, dtype=x.dtype, device="meta")
        return empty.requires_grad_(x.requires_grad)

    return [shaped(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
