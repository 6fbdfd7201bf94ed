"""Finds the program for a call of a placed model, and captures new ones for other modes and sizes."""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from placer._torch import saved_tensor_hooks, without_modes, without_transforms
from placer.emit import StagedModel, emit_stages
from placer.errors import CaptureError
from placer.executor.calls.numbers import ENOUGH, ChangingNumbers, Recaptures
from placer.executor.calls.state import refuse_kept_rows
from placer.plan.types import Plan
from placer.planner.follow import follow_plan
from placer.precision import present_autocast, recorded_under
from placer.program import (
    Answers,
    AttributeGuard,
    BatchDim,
    BoundCall,
    SameProgram,
    SplitRules,
    StateInput,
    condition_key,
    example_numbers,
    failed_guard,
    hook_count,
    is_torch_leaf,
    lower,
    must_stay_whole,
    own_hooks,
    rebuild_arguments,
    rebuild_call,
    row_counts,
    same_program,
    strides_of_copy,
)
from placer.program.objects.reachable import ReachableState, find_reachable_state
from placer.program.recording.inside import SOMETHING_ELSE
from placer.spec import PlacementSpec

_MAX_GUARDS = 64  # programs per mode and size, for different values of attributes and arguments
_MAX_REFERENCES = 8  # captured programs with which a new recording is compared


class _CachedProgram(NamedTuple):
    """Stages, and the values of plain attributes for which they compute what the model does.

    ``answers`` are those with which it was recorded, to what the model asks about gradients.
    ``fixed`` are the arguments' numbers for which the program holds, by name, and ``seen`` the values of its
    other numbers for which it was recorded.
    """

    guards: tuple[AttributeGuard, ...]
    staged: StagedModel
    answers: Answers
    any_rows: bool  # for every batch size
    fixed: Mapping[str, Any]
    seen: set[tuple[Any, ...]]

    def differences(
        self, leaves: Mapping[str, Any], modules: Mapping[str, nn.Module]
    ) -> Iterator[str]:
        """The numbers among the arguments, and an attribute, that are not those of this program."""
        yield from (name for name, value in self.fixed.items() if leaves.get(name) != value)
        guard = failed_guard(self.guards, modules)
        if guard is not None:
            yield guard.label


class ProgramCache:
    """Finds the stages that compute what ``model`` computes in its present mode for given inputs.

    A captured graph holds for one call format, one mode, and the input sizes that it was found not to
    depend on. For another mode, dtype or size, for other values of the plain attributes that it reads,
    and after modules were replaced, the model is recorded again on fake tensors. If the recording is
    the same, the captured stages are used. If it differs, or if hooks or parametrizations were added
    to a module whose inside was captured, the model is captured anew and its nodes are assigned to the
    plan's stages. Results are cached. Weights stay where the plan placed them. ``autocast`` is the data type
    of the autocast under which ``staged`` was captured.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, staged: StagedModel, autocast: torch.dtype | None
    ) -> None:
        self.model = model
        self._structure = 0  # how often modules were replaced
        self._note_modules()
        self._plan = plan
        self._is_sliced = plan.replicas * plan.microbatches > 1
        self.captured, self.call = staged, staged.call  # what these programs were captured with
        self._references = [staged]
        self._numbers = ChangingNumbers(model, example_numbers(staged.call))
        self._recaptures = Recaptures()
        self._whole = self._kept_whole()
        self._captured_buffers = self._buffers
        example = staged.example_inputs()
        condition = condition_key(staged.call, staged.conditions.modes, example), autocast
        # By the conditions, and by the rows of a call if the program is not for every batch size.
        self._known: dict[Hashable, list[_CachedProgram]] = {}
        known = self._as_known(staged, example_numbers(staged.call))
        self._remember(condition, self._whole, self._rows(example, {}), known)

    @property
    def guards(self) -> list[AttributeGuard]:
        """The plain attributes that any of these programs reads."""
        return [
            guard
            for programs in self._known.values()
            for program in programs
            for guard in program.guards
        ]

    @property
    def numbers(self) -> list[tuple[str, str]]:
        """The module path and name of each number in an attribute that is an input of a program."""
        return self._numbers.attributes

    def find(self, inputs: Sequence[Tensor], leaves: Mapping[str, Any]) -> StagedModel:
        """The stages for one micro-batch of inputs. Raises ``CaptureError`` if capture fails."""
        return self.find_all([inputs], leaves)[0]

    def find_all(
        self, microbatches: Sequence[Sequence[Tensor]], leaves: Mapping[str, Any]
    ) -> list[StagedModel]:
        """The stages for every micro-batch of a call; the model must not change between them.

        ``leaves`` are those of the call's arguments, by name. The model's state is inspected once, and
        micro-batches of one size share their stages.
        """
        leaves = {**example_numbers(self.call), **leaves}
        if self._children_now() != self._children or self._sizes_now() != self._sizes:
            self._structure += 1
            self._note_modules()
        modes = tuple([module.training for module in self._modules])
        whole = self._kept_whole()
        answers: dict[Hashable, StagedModel] = {}
        found: list[StagedModel] = []
        autocast = present_autocast(self._plan.precision)
        for inputs in microbatches:
            condition = condition_key(self.call, modes, inputs), autocast
            key = condition, row_counts(self.call, inputs)
            if key not in answers:
                answers[key] = self._find(modes, condition, whole, inputs, leaves)
            found.append(answers[key])
        return found

    def _find(
        self,
        modes: tuple[bool, ...],
        condition: Hashable,
        whole: tuple[Hashable, ...],
        inputs: Sequence[Tensor],
        leaves: Mapping[str, Any],
    ) -> StagedModel:
        grad = torch.is_grad_enabled()
        others: list[_CachedProgram] = []  # for other values
        for rows in (None, self._rows(inputs, leaves)):
            key = condition, rows, whole, self._structure
            known: list[_CachedProgram] = self._known.get(key, [])
            for each in known[::-1]:
                if not self._answers(each.answers, inputs, leaves):
                    continue
                if not self._reads(each.staged, leaves) or any(
                    each.differences(leaves, self._module_at)
                ):
                    others.append(each)
                elif self._serves(each, inputs, leaves, grad=grad):
                    return each.staged
                else:
                    known.remove(each)
                    self._numbers.refuse(modes, each.staged.conditions.numbers)
        for each in others:
            self._numbers.note_attributes(each.guards, self._module_at)
        began = time.perf_counter()
        try:
            program = self._make(modes, whole, inputs, leaves, grad=grad)
            self._check_whole(program, inputs, leaves, grad=grad)
        except CaptureError as error:
            if self._is_sliced:
                refuse_kept_rows(self._references, None, error)
            raise
        self._remember(condition, whole, self._rows(inputs, leaves), program)
        if others:
            what = [name for x in others for name in x.differences(leaves, self._module_at)]
            self._recaptures.add(self.model, what, time.perf_counter() - began)
        return program.staged

    def _answers(
        self, answers: Answers, inputs: Sequence[Tensor], leaves: Mapping[str, Any]
    ) -> bool:
        """Does code of the model that asks about gradients get these ``answers`` now?"""
        if len(answers) < 2:
            return answers in ((), (torch.is_grad_enabled(),))
        tensors = *self._uncut(inputs, leaves), *self.model.parameters()
        return answers == (torch.is_grad_enabled(), *(tensor.requires_grad for tensor in tensors))

    def _uncut(self, inputs: Sequence[Tensor], leaves: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of the call of which ``inputs`` are slices, which may require no gradient."""
        named = zip(self.call.inputs, inputs, strict=True)
        return [leaves.get(each.name, own) for each, own in named]

    def _reads(self, staged: StagedModel, leaves: Mapping[str, Any]) -> bool:
        """Are the numbers that ``staged`` reads of the types with which it was captured?"""
        return None not in self._numbers.values(staged.conditions.numbers, leaves)

    def _rows(self, inputs: Sequence[Tensor], leaves: Mapping[str, Any]) -> tuple[Any, Any]:
        """The batch sizes of a slice and of its call."""
        uncut = self._uncut(inputs, leaves)
        return row_counts(self.call, inputs), row_counts(self.call, uncut)

    def _check_whole(
        self,
        program: _CachedProgram,
        inputs: Sequence[Tensor],
        leaves: Mapping[str, Any],
        *,
        grad: bool,
    ) -> None:
        """Raise ``CaptureError`` if the batch, of which ``inputs`` are a slice, needs another program."""
        slice_, batch = self._rows(inputs, leaves)
        rules, names = split_rules(self._plan), [each.name for each in self.call.inputs]
        if program.any_rows or slice_ == batch or rules.says(names, self.call.batch_dims):
            return
        shaped = self._without_data(self._uncut(inputs, leaves), leaves)
        counts = not program.staged.conditions.any_batch_size  # the rows, which `lower` has checked
        if self._same(program.staged, shaped, leaves, grad=grad, any_numbers=counts) is None:
            raise CaptureError(
                type(self.model).__name__,
                f"{SOMETHING_ELSE}: for a slice with {slice_[0]} rows than for all {batch[0]}",
                "use 1 replica and 1 micro-batch; or, if slices may be computed by themselves, as under "
                f'nn.DataParallel, say so in the spec: "inputs": {rules.spell(names, self.call.batch_dims)}',
            )

    def _without_data(self, inputs: Sequence[Tensor], leaves: Mapping[str, Any]) -> list[Tensor]:
        empty = without_data(inputs)
        for each, uncut in zip(empty, self._uncut(inputs, leaves), strict=True):
            each.requires_grad_(uncut.requires_grad)
        return empty

    def _serves(
        self,
        known: _CachedProgram,
        inputs: Sequence[Tensor],
        leaves: Mapping[str, Any],
        *,
        grad: bool,
    ) -> bool:
        """Does a program hold for the present values of the numbers that are its inputs?

        The model is recorded with the first few, which must give the same program.
        """
        values = self._numbers.values(known.staged.conditions.numbers, leaves)
        if not values or values in known.seen or len(known.seen) >= ENOUGH:
            return True
        with isolated_from_caller(self._plan.precision):
            found = self._same(known.staged, self._without_data(inputs, leaves), leaves, grad=grad)
        known.seen.add(values)
        return found is not None

    def _make(
        self,
        modes: tuple[bool, ...],
        whole: tuple[Hashable, ...],
        inputs: Sequence[Tensor],
        leaves: Mapping[str, Any],
        *,
        grad: bool,
    ) -> _CachedProgram:
        """A program for new conditions or values: a captured one if the recording is the same."""
        with isolated_from_caller(self._plan.precision):
            shaped = self._without_data(inputs, leaves)
            # Nodes that write new buffers may have to be on one stage, which needs another capture.
            comparable = whole == self._whole and self._buffers == self._captured_buffers
            # What a rewrite does may depend on sizes, also where the recording does not.
            comparable = comparable and not self._plan.rewrites
            like = [x for x in reversed(self._references) if x.conditions.modes == modes]
            like = [x for x in (*like, self.captured) if self._reads(x, leaves)]
            for reference in like[:1] if comparable else ():
                found = self._same(reference, shaped, leaves, grad=grad)
                if found is not None:
                    known = self._as_known(reference, leaves)
                    return known._replace(
                        guards=found.guards, answers=found.answers, any_rows=found.any_rows
                    )
            args, kwargs = rebuild_call(self.call, shaped, leaves)
            numbers = self._numbers.candidates(modes, leaves)
            staged = self._capture(args, kwargs, grad=grad, numbers=numbers)
            if self._is_sliced:
                refuse_kept_rows(self._references, staged)
        if comparable:
            self._references.append(staged)
            del self._references[1:-_MAX_REFERENCES]
        return self._as_known(staged, leaves)

    def _same(
        self,
        reference: StagedModel,
        shaped: Sequence[Tensor],
        leaves: Mapping[str, Any],
        *,
        grad: bool,
        any_numbers: bool = False,
    ) -> SameProgram | None:
        args, kwargs = rebuild_call(self.call, shaped, leaves)
        conditions, call = reference.conditions, reference.call
        return same_program(
            self.model, conditions, call, args, kwargs, grad=grad, any_numbers=any_numbers
        )

    def _as_known(self, staged: StagedModel, leaves: Mapping[str, Any]) -> _CachedProgram:
        conditions = staged.conditions
        return _CachedProgram(
            guards=conditions.guards,
            staged=staged,
            answers=conditions.answers,
            any_rows=conditions.any_batch_size
            and not (conditions.reads_rows or self._plan.rewrites),
            fixed={name: leaves[name] for name in conditions.fixed},
            seen={self._numbers.values(conditions.numbers, leaves)},
        )

    def _remember(
        self,
        condition: Hashable,
        whole: tuple[Hashable, ...],
        rows: Hashable,
        program: _CachedProgram,
    ) -> None:
        rows = None if program.any_rows else rows
        known = self._known.setdefault((condition, rows, whole, self._structure), [])
        known.append(program)
        del known[:-_MAX_GUARDS]

    def for_call(self, bound: BoundCall) -> ProgramCache:
        """The programs for a call with other arguments or other constants."""
        grad = torch.is_grad_enabled()
        with isolated_from_caller(self._plan.precision):
            args, kwargs = rebuild_arguments(bound, without_data(bound.leaves))
            staged = self._capture(
                args,
                kwargs,
                grad=grad,
                numbers=[
                    StateInput(name=name, argument=name, kind=type(leaf))
                    for name, leaf in zip(bound.leaf_names, bound.leaves, strict=True)
                    if name in bound.numbers
                ],
                changing=bound.numbers,
                said=bound.said,
                method=bound.method,
            )
            autocast = present_autocast(self._plan.precision)
            return ProgramCache(self.model, self._plan, staged, autocast)

    def _note_modules(self) -> None:
        self._module_at = dict(self.model.named_modules())
        self._modules = list(self._module_at.values())
        self._buffers = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        self._leaves = [module for module in self._modules if is_torch_leaf(module)]
        others = [module for module in self._modules if not is_torch_leaf(module)]
        self._tables = [x for m in others for x in (m._parameters, m._buffers) if x]
        self._sizes = self._sizes_now()
        self._containers = [module for module in others if module is not self.model]
        lists = nn.ModuleList, nn.ModuleDict
        self._parents = [m for m in self._modules if isinstance(m, lists) or not is_torch_leaf(m)]
        self._children = self._children_now()

    def _children_now(self) -> list[list[nn.Module | None]]:
        return [list(module._modules.values()) for module in self._parents]

    def _sizes_now(self) -> list[Any]:
        """What parametrizations and the old ``spectral_norm`` change of a torch layer: one of two numbers.

        For other modules, which of their parameters and buffers are None.
        """
        absent = [value is None for table in self._tables for value in table.values()]
        return [*((len(layer._buffers), len(layer._modules)) for layer in self._leaves), *absent]

    def _kept_whole(self) -> tuple[Hashable, ...]:
        """The container modules, by index, and layers that have hooks or parametrizations at present.

        Such a module must be recorded as one node, unless all its hooks are the model's own, which are
        recorded. If there are any, each comes with the number of hooks, which tells when one is added.
        """
        counted = self.captured.conditions.has_own_hooks
        containers = [(i, m) for i, m in enumerate(self._containers) if must_stay_whole(m)]
        layers = [module for module in self._leaves if must_stay_whole(module)]
        found: list[Hashable] = [
            (index, hook_count(module) if counted else 0) for index, module in containers
        ]
        # Hooks of layers run once for every slice, which a capture checks; a single node has copies of them.
        if self._is_sliced or counted or "" in self.captured.conditions.whole:
            found += [(layer, hook_count(layer)) for layer in layers]
        hooked = [*(module for _, module in containers), *layers]
        ids = set(map(id, self._modules)) if hooked else ()
        own = [(m, own_hooks(m, self._code, ids)) for m in hooked]
        found += [each for each in own if each[1]]
        # What a rewrite makes of a layer depends on its hooks, and on its settings.
        if self._plan.rewrites:
            found += [(hook_count(layer), _settings(layer)) for layer in self._leaves]
        return tuple(found)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_code"}

    @cached_property
    def _code(self) -> ReachableState:
        """The code of the model itself, whose hooks are recorded."""
        return find_reachable_state(self.model)

    def _capture(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        grad: bool,
        numbers: Sequence[StateInput],
        changing: Collection[str] | None = None,
        said: Mapping[str, BatchDim] | None = None,
        method: str | None = None,
    ) -> StagedModel:
        captured = self.captured
        return capture_for_plan(
            self.model,
            self._plan,
            args,
            kwargs,
            state_stage=captured.state_stage,
            ignore_device_moves=captured.conditions.ignore_device_moves,
            grad=grad,
            batch_dims={each.name: each.batch_dim for each in captured.call.inputs}
            | dict(said or {}),
            numbers=numbers,
            changing=example_numbers(captured.call) if changing is None else changing,
            method=method or captured.call.method,
            together=captured.together,
        )


def _settings(layer: nn.Module) -> str:
    """The plain attributes of a layer of torch.nn."""
    plain = (int, float, str, list, tuple, type(None))
    return repr([value for value in vars(layer).values() if isinstance(value, plain)])


def capture_for_plan(
    model: nn.Module,
    plan: Plan,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    state_stage: Mapping[str, int],
    ignore_device_moves: bool,
    batch_dims: Mapping[str, BatchDim],
    grad: bool = True,
    numbers: Sequence[StateInput] = (),
    changing: Collection[str] = (),
    method: str = "forward",
    together: bool = True,
) -> StagedModel:
    """The stages of ``plan`` for another program of its model, which has perhaps been changed since.

    ``state_stage`` says which stage each planned weight is on, where it stays, and ``batch_dims`` how inputs
    of these names are split. ``together`` is that of `emit_stages`, and the other four are as for `lower`.
    Raises ``CaptureError``.
    """
    program = lower(
        model,
        args,
        kwargs,
        plan.rewrites,
        rules=split_rules(plan).with_names(batch_dims),
        ignore_device_moves=ignore_device_moves,
        grad=grad,
        numbers=numbers,
        changing=changing,
        method=method,
    )
    staged = emit_stages(program, follow_plan(plan, program), together=together)
    # Weights stay where they are; a weight that a parametrization added since goes to its reader.
    return replace(staged, state_stage={**staged.state_stage, **state_stage})


def split_rules(wanted: PlacementSpec | Plan) -> SplitRules:
    """How the inputs of a spec or plan are split."""
    return SplitRules.of(wanted.batch_dims, wanted.stored, wanted.replicas, wanted.microbatches)


@contextmanager
def isolated_from_caller(precision: str) -> Iterator[None]:
    """Run a capture without the caller's modes, transforms, gradient mode and saved-tensor hooks.

    Autocast is that of stages of this ``precision``.
    """
    # `torch.utils.checkpoint` counts the tensors that its saved-tensor hooks see. Under any such hooks
    # torch.func does not work, so there are none here if the caller has none.
    own_saving: AbstractContextManager[object] = nullcontext()
    if saved_tensor_hooks() is not None:
        own_saving = torch.autograd.graph.saved_tensors_hooks(_same, _same)
    anew = torch.inference_mode(False), torch.enable_grad()
    cast = recorded_under(present_autocast(precision))
    with without_modes(), without_transforms(), own_saving, anew[0], anew[1], cast:
        yield


def _same(tensor: Tensor) -> Tensor:
    return tensor


def without_data(leaves: Sequence[Any]) -> list[Any]:
    """``leaves`` with each tensor replaced by one on ``meta`` of its shape, strides, dtype and flag."""

    def shaped(x: Tensor) -> Tensor:
        empty = torch.empty_strided(x.shape, strides_of_copy(x), dtype=x.dtype, device="meta")
        return empty.requires_grad_(x.requires_grad)

    return [shaped(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
