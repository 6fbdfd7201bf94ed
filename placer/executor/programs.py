"""Finds the program for a call of a placed model, and captures new ones for other modes and sizes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from placer._torch import saved_tensor_hooks, without_modes, without_transforms
from placer.emit import StagedModel, emit_stages
from placer.errors import CaptureError
from placer.plan.types import Plan
from placer.planner.follow import follow_plan
from placer.program import (
    AttributeGuard,
    BatchDim,
    BoundCall,
    CallFormat,
    SplitRules,
    bind_arguments,
    call_difference,
    call_tensors,
    capture_model,
    condition_key,
    failed_guard,
    hook_count,
    is_torch_leaf,
    must_stay_whole,
    rebuild_arguments,
    rebuild_call,
    row_counts,
    same_program,
)

_MAX_GUARDS = 16  # programs kept per mode and size, for different values of plain attributes
_MAX_CALLS = 16  # call formats; if there are more, an argument is probably new in every call
_STEP_ARGUMENTS = ("target", "loss_fn", "reduction", "normalizer", "own_rows", "scaler")
_PLAIN_TYPES = (Tensor, bool, int, float, str, torch.dtype, torch.device, type(None))


def _keyword_hint(name: str, value: Any, *, step: bool) -> str:
    """A hint where to pass a keyword that ``forward`` does not accept."""
    if step:
        shown = repr(value) if isinstance(value, bool | int | float | str) else "…"
        return (
            "step passes other keywords to forward; if it is for the loss, bind it: "
            f"functools.partial(loss_fn, {name}={shown})"
        )
    if name == "own_rows":
        return "own_rows is an argument of step; inference takes the whole batch on every rank"
    return f"{name} is an argument of step" if name in _STEP_ARGUMENTS else ""


class _KnownProgram(NamedTuple):
    """Stages, and the values of plain attributes for which they compute what the model does.

    ``grad`` says with which answer, if the model asks whether gradients are enabled (None: it does not).
    """

    guards: tuple[AttributeGuard, ...]
    staged: StagedModel
    grad: bool | None
    any_rows: bool  # for every batch size


def _known(staged: StagedModel) -> _KnownProgram:
    conditions = staged.conditions
    any_rows = conditions.any_batch_size and not conditions.reads_rows
    return _KnownProgram(conditions.guards, staged, conditions.grad, any_rows)


class Programs:
    """Finds the stages that compute what ``model`` computes in its present mode for given inputs.

    A captured graph holds for one call format, one mode, and the input sizes that it was found not to
    depend on. For another mode, dtype or size, for other values of the plain attributes that it reads,
    and after modules were replaced, the model is recorded again on fake tensors. If the recording is
    the same, the captured stages are used. If it differs, or if hooks or parametrizations were added
    to a module whose inside was captured, the model is captured anew and its nodes are assigned to the
    plan's stages. Results are cached. Weights stay where the plan placed them.
    """

    def __init__(self, model: nn.Module, plan: Plan, staged: StagedModel) -> None:
        self._model = model
        self._structure = 0  # how often modules were replaced
        self._note_modules()
        self._plan = plan
        self._captured = staged
        self._whole = self._kept_whole()
        self._captured_buffers = self._buffers
        # The inputs, on ``meta``, for which the model was recorded last:
        self.latest = staged.example_inputs()
        example = self.latest
        condition = condition_key(staged.call, staged.conditions.modes, example)
        # By the conditions, and by the rows of a call if the program is not for every batch size.
        self._known: dict[Hashable, list[_KnownProgram]] = {}
        self._remember(condition, self._whole, example, _known(staged))

    @property
    def captured(self) -> StagedModel:
        """The stages for the call that these programs were captured with."""
        return self._captured

    @property
    def call(self) -> CallFormat:
        """The call format of these programs: the model's arguments and what it returns."""
        return self._captured.call

    @property
    def guards(self) -> list[AttributeGuard]:
        """The plain attributes that any of these programs reads."""
        return [
            guard
            for programs in self._known.values()
            for program in programs
            for guard in program.guards
        ]

    def find(self, inputs: Sequence[Tensor]) -> StagedModel:
        """The stages for one micro-batch of inputs. Raises ``CaptureError`` if capture fails."""
        return self.find_all([inputs])[0]

    def find_all(self, microbatches: Sequence[Sequence[Tensor]]) -> list[StagedModel]:
        """The stages for every micro-batch of a call; the model must not change between them.

        The model's state is inspected once, and micro-batches of one size share their stages.
        """
        replaced = any(tuple(m._modules.values()) != children for m, children in self._parents)
        # Parametrizations and the old ``spectral_norm`` change a torch layer in one of these two ways.
        changed = any(len(m._buffers) != b or len(m._modules) != c for m, b, c in self._leaves)
        if replaced or changed:
            self._structure += 1
            self._note_modules()
        modes = tuple(module.training for module in self._modules)
        whole = self._kept_whole()
        answers: dict[Hashable, StagedModel] = {}
        found = []
        for inputs in microbatches:
            condition = condition_key(self.call, modes, inputs)
            key = condition, row_counts(self.call, inputs)
            if key not in answers:
                answers[key] = self._find(condition, whole, inputs)
            found.append(answers[key])
        return found

    def _find(
        self, condition: Hashable, whole: tuple[tuple[int, int], ...], inputs: Sequence[Tensor]
    ) -> StagedModel:
        captured = self._captured
        grad = torch.is_grad_enabled()
        for rows in (None, row_counts(self.call, inputs)):
            key = condition, rows, whole, self._structure
            for known in reversed(self._known.get(key, [])):
                if (
                    known.grad in (None, grad)
                    and failed_guard(known.guards, self._module_at) is None
                ):
                    return known.staged
        with isolated_from_caller():
            shaped = _without_data(inputs)
            args, kwargs = rebuild_call(captured.call, shaped)
            found = None
            # Nodes that write new buffers may have to be on one stage, which needs another capture.
            if whole == self._whole and self._buffers == self._captured_buffers:
                found = same_program(
                    self._model, captured.conditions, captured.call, args, kwargs, grad=grad
                )
            if found is not None:
                program = _KnownProgram(found.guards, captured, found.grad, found.any_rows)
            else:
                program = _known(self._capture(args, kwargs, grad=grad))
        self.latest = shaped
        self._remember(condition, whole, inputs, program)
        return program.staged

    def _remember(
        self,
        condition: Hashable,
        whole: tuple[tuple[int, int], ...],
        inputs: Sequence[Tensor],
        program: _KnownProgram,
    ) -> None:
        rows = None if program.any_rows else row_counts(self.call, inputs)
        known = self._known.setdefault((condition, rows, whole, self._structure), [])
        known.append(program)
        del known[:-_MAX_GUARDS]

    def for_call(self, bound: BoundCall) -> Programs:
        """The programs for a call with other arguments or other constants."""
        grad = torch.is_grad_enabled()
        with isolated_from_caller():
            args, kwargs = rebuild_arguments(bound, _without_data(bound.leaves))
            return Programs(self._model, self._plan, self._capture(args, kwargs, grad=grad))

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

    def _kept_whole(self) -> tuple[tuple[int, int], ...]:
        """Indices of the container modules that have hooks or parametrizations at present.

        Such a module must be recorded as one node, unless forward itself installs all its hooks. If
        forward installs any, each index comes with the number of hooks, which tells when one is added.
        """
        counted = self._captured.conditions.hooked_by_forward
        return tuple(
            (index, hook_count(module) if counted else 0)
            for index, module in enumerate(self._containers)
            if must_stay_whole(module)
        )

    def _capture(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, grad: bool
    ) -> StagedModel:
        captured = self._captured
        return capture_for_plan(
            self._model,
            self._plan,
            args,
            kwargs,
            state_stage=captured.state_stage,
            ignore_device_moves=captured.conditions.ignore_device_moves,
            grad=grad,
            batch_dims={each.name: each.batch_dim for each in captured.call.inputs},
        )


def capture_for_plan(
    model: nn.Module,
    plan: Plan,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    state_stage: Mapping[str, int],
    ignore_device_moves: bool,
    grad: bool = True,
    batch_dims: Mapping[str, BatchDim],
) -> StagedModel:
    """The stages of ``plan`` for another program of its model, which has perhaps been changed since.

    ``state_stage`` says which stage each planned weight is on, where it stays, and ``batch_dims`` how inputs
    of these names are split. ``grad`` is as for `capture_model`. Raises ``CaptureError``.
    """
    program = capture_model(
        model,
        args,
        kwargs,
        ignore_device_moves=ignore_device_moves,
        grad=grad,
        rules=plan_rules(plan).with_names(batch_dims),
    )
    staged = emit_stages(program, follow_plan(plan, program))
    # Weights stay where they are; a weight that a parametrization added since goes to its reader.
    return replace(staged, state_stage={**staged.state_stage, **state_stage})


def plan_rules(plan: Plan) -> SplitRules:
    """How the inputs of ``plan`` are split."""
    return SplitRules.of(plan.batch_dims, plan.replicas, plan.microbatches)


class ProgramsByCall:
    """The programs of a placed model for each way in which it has been called.

    ``before_capture`` is called before the model is captured for another way.
    """

    def __init__(
        self, captured: Programs, *, before_capture: Callable[[], object] = lambda: None
    ) -> None:
        self._known = [captured]
        self._before_capture = before_capture

    @property
    def captured(self) -> Programs:
        """The programs for the call with which the model was placed."""
        return self._known[0]

    @property
    def guards(self) -> list[AttributeGuard]:
        """The plain attributes that any of these programs reads."""
        return [guard for programs in self._known for guard in programs.guards]

    def find(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, step: bool = False
    ) -> tuple[Programs, list[Tensor]]:
        """The programs for a call, and its tensors; a new kind of call is captured.

        ``step`` says whether ``placed.step`` was called or ``placed(x)``, for error messages.

        Raises ``CaptureError`` for arguments that ``forward`` does not accept or fails on, for new
        arguments that are not plain values, and when too many calls had new constants.
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
        plain = all(isinstance(leaf, _PLAIN_TYPES) for leaf in bound.leaves)
        if not plain:
            raise difference
        if len(self._known) > _MAX_CALLS:
            raise CaptureError(
                difference.where,
                f"{difference.problem}, and {_MAX_CALLS} other calls have been captured already",
                "pass a number that changes with every call as a tensor",
            )
        self._before_capture()
        self._known.append(captured.for_call(bound))
        return self._known[-1], call_tensors(self._known[-1].call, bound)


@contextmanager
def isolated_from_caller() -> Iterator[None]:
    """Run a capture without the caller's modes, transforms, gradient mode and saved-tensor hooks."""
    # `torch.utils.checkpoint` counts the tensors that its saved-tensor hooks see. Under any such hooks
    # torch.func does not work, so there are none here if the caller has none.
    own_saving: AbstractContextManager[object] = nullcontext()
    if saved_tensor_hooks() is not None:
        own_saving = torch.autograd.graph.saved_tensors_hooks(_same, _same)
    anew = torch.inference_mode(False), torch.enable_grad()
    with without_modes(), without_transforms(), own_saving, anew[0], anew[1]:
        yield


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _without_data(leaves: Sequence[Any]) -> list[Any]:
    """``leaves`` with each tensor replaced by one on ``meta`` of its shape, dtype and requires_grad."""

    def shaped(x: Tensor) -> Tensor:
        empty = torch.empty(x.shape, dtype=x.dtype, device="meta")
        return empty.requires_grad_(x.requires_grad)

    return [shaped(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
