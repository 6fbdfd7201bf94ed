"""What crosses from stage to stage for inputs of a given shape, found without running the model.

Boundaries are a chain: a value that skips stages is relayed by those between. Every rank finds the
same answer by running the stages on fake tensors, so no metadata is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from placer.capture import FakeWorld, copy_module, copy_settings, tensors_of
from placer.emit import StagedModel
from placer.errors import PlacerError
from placer.plan.types import Plan
from placer.precision import autocast_state
from placer.runtime.place import Place
from placer.runtime.programs import Programs
from placer.runtime.replica import Replica
from placer.runtime.statistics import DeferredStatistics, NormCall, defers_statistics


@dataclass(frozen=True, slots=True)
class Wire:
    """A tensor that crosses a boundary, as its receiver sees it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, kw_only=True)
class CrossingValue:
    """A value of the graph that crosses: a tensor, or a pytree; what is no tensor does not travel."""

    name: str
    spec: TreeSpec
    leaves: tuple[Any, ...]  # a ``Wire``, or the leaf itself: sizes are the same on every rank

    @cached_property
    def wires(self) -> tuple[Wire, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Wire))


@dataclass(frozen=True, kw_only=True)
class Crossings:
    """All boundaries for one shape of micro-batch; ``boundaries[s]`` is between stage s and s + 1.

    ``staged`` are the stages that serve micro-batches of that shape in the present mode, ``norms``
    their calls that update running statistics, per stage, where these are deferred.
    """

    staged: StagedModel
    boundaries: tuple[tuple[CrossingValue, ...], ...]
    result: tuple[Any, ...]  # per leaf of the model's result: a ``Wire``, or the leaf itself
    norms: tuple[tuple[NormCall, ...], ...]

    @cached_property
    def wires(self) -> tuple[tuple[Wire, ...], ...]:
        """Per boundary the tensors that cross, in the order in which they are sent."""
        return tuple(
            tuple(wire for value in values for wire in value.wires) for values in self.boundaries
        )


def crossing_names(staged: StagedModel) -> tuple[tuple[str, ...], ...]:
    """Per boundary the values that cross it, in the order in which stages make them.

    The model's own inputs do not cross: every rank has them.
    """
    local = {*staged.graph_inputs, *staged.constants}
    made = [(stage.index, name) for stage in staged.stages for name in stage.outputs]
    return tuple(
        tuple(
            name
            for index, name in made
            if index <= boundary and name not in local and staged.last_use.get(name, 0) > boundary
        )
        for boundary in range(len(staged.stages) - 1)
    )


class BoundaryFinder:
    """Finds `Crossings` by running a copy of the whole model without data; answers are kept per shape."""

    def __init__(
        self, model: nn.Module, plan: Plan, staged: StagedModel, device: torch.device
    ) -> None:
        self._world = FakeWorld()
        self.device = device
        self._place = Place(str(device), device)
        meta = torch.device("meta")
        # What is no parameter or buffer is a part of the program, which may look at its values.
        self._shadow = _copy_with(model, lambda t: _empty_like(t, meta), plain=lambda t: t)
        with self._world.mode, torch.no_grad():
            empty = partial(_empty_like, device=device)
            self._fake = _copy_with(self._shadow, empty, plain=empty)
        self._copies = [dict(model.named_modules()) for model in (self._shadow, self._fake)]
        self._programs = Programs(self._shadow, plan, staged)
        places = [self._place] * len(staged.stages)
        self._statistics = DeferredStatistics() if defers_statistics(plan) else None
        self._replica = Replica(staged, places, places, plan.precision, self._statistics)
        self._modes: tuple[bool, ...] = ()  # of the part that was followed last
        self._found: dict[Any, Crossings] = {}

    def follow(self, part: nn.Module) -> None:
        """Take over the training flags of ``part``, and the plain attributes that programs read.

        Flags of modules that it lacks follow its own; their attributes stay.
        """
        modules = dict(part.named_modules())
        settings = self._programs.settings
        for copied in self._copies:
            if copy_settings(settings, modules, copied):
                self._found.clear()
        modes = tuple(module.training for module in modules.values())
        if modes == self._modes:
            return
        self._modes = modes
        for copied in self._copies:
            for path, module in copied.items():
                module.training = modules.get(path, part).training

    def find(self, leaves: Sequence[Tensor], *, grad: bool) -> Crossings:
        """What crosses for a micro-batch shaped like ``leaves`` (the flattened tensor inputs).

        Values that the model looks at are guessed, as when it was captured; stages compare what
        they hand on with what is said here. Raises ``PlacerError`` when a stage does not run.
        """
        shapes = tuple((leaf.shape, leaf.dtype, grad and leaf.requires_grad) for leaf in leaves)
        key = (shapes, self._modes, grad, autocast_state(self.device.type))
        if key not in self._found:
            staged = self._programs.find([leaf.detach() for leaf in leaves])
            self._found[key] = self._run(staged, shapes, grad)
        return self._found[key]

    @contextmanager
    def on_fakes(self, staged: StagedModel) -> Iterator[tuple[Replica, nn.Module]]:
        """What runs ``staged`` on tensors without data, and the whole model of such; for this block."""
        with self._world.running(staged.conditions.guess), torch.random.fork_rng(devices=[]):
            yield self._replica.with_program(staged), self._fake

    def _run(
        self, staged: StagedModel, shapes: Sequence[tuple[Any, torch.dtype, bool]], grad: bool
    ) -> Crossings:
        values: dict[str, Any] = {}
        norms = []
        with self.on_fakes(staged) as (replica, part), torch.set_grad_enabled(grad):
            device = self.device
            for name, (shape, dtype, wanted) in zip(staged.graph_inputs, shapes, strict=True):
                leaf = torch.empty(shape, dtype=dtype, device=device, requires_grad=wanted)
                # The model may write to it, as it may not to a leaf.
                values[name] = leaf.view_as(leaf) if wanted else leaf
            for stage in staged.stages:
                inputs = [
                    replica.constant(n, self._place) if n in staged.constants else values[n]
                    for n in stage.inputs
                ]
                try:
                    outputs = replica.run_stage(part, stage, inputs)
                except (DataDependentOutputException, DynamicOutputShapeException) as error:
                    raise PlacerError(
                        f"stage {stage.index}",
                        f"what it hands on depends on the data, not on shapes alone ({error})",
                        "place the layers that do so, and all after them, on the last device",
                    ) from error
                except Exception as error:
                    raise PlacerError(
                        f"stage {stage.index}",
                        f"fails for a micro-batch of inputs {[list(s) for s, *_ in shapes]}: "
                        f"{type(error).__name__}: {error}",
                        "see whether the plain model takes such inputs in this mode; a batch that is "
                        "cut into fewer micro-batches or replicas has larger ones (drop_last=True "
                        "leaves a small last batch out)",
                    ) from error
                values.update(zip(stage.outputs, outputs, strict=True))
                norms.append(self._take_norms())
        result = [values[x] if kind == "value" else x for kind, x in staged.result]
        return Crossings(
            staged=staged,
            boundaries=tuple(
                tuple(_describe(name, values[name]) for name in names)
                for names in crossing_names(staged)
            ),
            result=tuple(_wire(leaf) for leaf in result),
            norms=tuple(norms),
        )

    def _take_norms(self) -> tuple[NormCall, ...]:
        """The calls that update running statistics since this was asked last."""
        if self._statistics is None:
            return ()
        calls = self._statistics.calls
        self._statistics.clear()
        return calls


def _describe(name: str, value: Any) -> CrossingValue:
    leaves, spec = tree_flatten(value)
    return CrossingValue(name=name, spec=spec, leaves=tuple(_wire(leaf) for leaf in leaves))


def _wire(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return Wire(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    return leaf


def rebuild(value: CrossingValue, tensors: Sequence[Tensor]) -> Any:
    """The value from its received tensors."""
    remaining = iter(tensors)
    leaves = [next(remaining) if isinstance(leaf, Wire) else leaf for leaf in value.leaves]
    return tree_unflatten(leaves, value.spec)


def _copy_with(
    model: nn.Module, make: Callable[[Tensor], Tensor], *, plain: Callable[[Tensor], Tensor]
) -> nn.Module:
    """A deep copy whose parameters and buffers are what ``make`` makes of them, and ``plain`` of others."""
    memo: dict[int, Any] = {id(tensor): plain(tensor) for tensor in tensors_of(model)}
    for tensor in [*model.parameters(), *model.buffers()]:
        twin = make(tensor)
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = twin
    return copy_module(model, memo)


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.layout != torch.strided:
        return torch.empty(tensor.size(), dtype=tensor.dtype, device=device)
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
