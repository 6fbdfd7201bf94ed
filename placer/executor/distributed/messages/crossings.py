"""What goes from stage to stage for inputs of a given shape, found without running the model.

Every rank finds the same answer by running the stages on fake tensors, so no metadata is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from placer.autograd_graph import nodes_behind
from placer.emit import StagedModel
from placer.errors import PlacerError
from placer.executor.place import Place
from placer.executor.programs import Programs
from placer.executor.replica import Replica
from placer.executor.statistics import DeferredStatistics, NormCall, defers_statistics
from placer.plan.types import Plan
from placer.precision import autocast_state
from placer.program import FakeConverter, copy_guarded_attributes, copy_module, tensors_of
from placer.schedule import Flow


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that goes to another stage, as its reader sees it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, kw_only=True)
class CrossingValue:
    """A value of the graph that a later stage reads: a tensor, or a pytree.

    ``leaves`` are what it consists of: a ``TensorSpec`` for a tensor, and anything else itself (sizes are
    the same on every rank). ``gradient_readers`` are, per leaf, the readers through which the model's
    result depends on it, and which hand back a gradient.
    """

    name: str
    maker: int
    readers: tuple[int, ...]
    spec: TreeSpec
    leaves: tuple[Any, ...]
    gradient_readers: tuple[frozenset[int], ...]

    @cached_property
    def tensors(self) -> Mapping[int, TensorSpec]:
        """The tensors among the leaves, by their place."""
        return {i: leaf for i, leaf in enumerate(self.leaves) if isinstance(leaf, TensorSpec)}

    def rebuild(self, tensors: Mapping[int, Tensor]) -> Any:
        """The value from its ``tensors``, by their place among the leaves."""
        leaves = [tensors.get(position, leaf) for position, leaf in enumerate(self.leaves)]
        return tree_unflatten(leaves, self.spec)


@dataclass(frozen=True, kw_only=True)
class Crossings:
    """All that goes between stages for one shape of micro-batch.

    ``staged`` are the stages that serve micro-batches of that shape in the present mode, ``norms``
    their calls that update running statistics, per stage, where these are deferred.
    """

    staged: StagedModel
    values: Mapping[str, CrossingValue]  # in the order in which stages make them
    result: tuple[Any, ...]  # per leaf of the model's result: a ``TensorSpec``, or the leaf itself
    norms: tuple[tuple[NormCall, ...], ...]

    @cached_property
    def flows(self) -> tuple[Flow, ...]:
        """The values that have tensors."""
        return tuple(
            Flow(
                name=value.name,
                maker=value.maker,
                readers=value.readers,
                gradient_readers=frozenset().union(*value.gradient_readers),
            )
            for value in self.values.values()
            if value.tensors
        )

    @cached_property
    def known(self) -> tuple[CrossingValue, ...]:
        """The values without tensors, such as sizes: they do not travel, for every rank knows them."""
        return tuple(value for value in self.values.values() if not value.tensors)

    @cached_property
    def gradients_may_lack(self) -> bool:
        """May a loss leave out a result, so that a gradient that is expected does not come?"""
        wanted = [x for x in self.result if isinstance(x, TensorSpec) and x.requires_grad]
        return len(wanted) > 1


def find_readers(staged: StagedModel) -> Mapping[str, tuple[int, tuple[int, ...]]]:
    """Per value that goes between stages its maker and readers, in the order in which they are made.

    The model's own inputs and its constants do not go anywhere: every rank has them.
    """
    readers: dict[str, list[int]] = {}
    for stage in staged.stages:
        for name in stage.inputs:
            readers.setdefault(name, []).append(stage.index)
    return {
        name: (stage.index, tuple(readers[name]))
        for stage in staged.stages[:-1]
        for name in stage.outputs
        if name in readers
    }


class CrossingFinder:
    """Finds `Crossings` by running a copy of the whole model without data; answers are kept per shape."""

    def __init__(
        self, model: nn.Module, plan: Plan, staged: StagedModel, device: torch.device
    ) -> None:
        self._converter = FakeConverter()
        self.device = device
        self._place = Place(str(device), device)
        meta = torch.device("meta")
        # What is no parameter or buffer is a part of the program, which may look at its values.
        self._shadow = _copy_with(model, lambda t: _empty_like(t, meta), plain=lambda t: t)
        with self._converter.mode, torch.no_grad():
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
        guards = self._programs.guards
        for copied in self._copies:
            if copy_guarded_attributes(guards, modules, copied):
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
        with self._converter.running(staged.conditions.guess), torch.random.fork_rng(devices=[]):
            yield self._replica.with_program(staged), self._fake

    def _run(
        self, staged: StagedModel, shapes: Sequence[tuple[Any, torch.dtype, bool]], grad: bool
    ) -> Crossings:
        values: dict[str, Any] = {}
        norms = []
        links: dict[
            tuple[str, int, int], Node
        ] = {}  # value, leaf, reader: where its gradient starts
        with self.on_fakes(staged) as (replica, part), torch.set_grad_enabled(grad):
            device = self.device
            for name, (shape, dtype, wanted) in zip(staged.graph_inputs, shapes, strict=True):
                leaf = torch.empty(shape, dtype=dtype, device=device, requires_grad=wanted)
                # The model may write to it, as it may not to a leaf.
                values[name] = leaf.view_as(leaf) if wanted else leaf
            for stage in staged.stages:
                inputs = [
                    replica.constant(n, self._place)
                    if n in staged.constants
                    else _linked(values[n], n, stage.index, links)
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
            roots = [x for x in result if isinstance(x, Tensor) and x.requires_grad]
            reached = set(nodes_behind(get_gradient_edge(root).node for root in roots))
        return Crossings(
            staged=staged,
            values={
                name: _describe(
                    name,
                    maker,
                    readers,
                    values[name],
                    {(p, r) for (n, p, r), node in links.items() if n == name and node in reached},
                )
                for name, (maker, readers) in find_readers(staged).items()
            },
            result=tuple(_spec_of(leaf) for leaf in result),
            norms=tuple(norms),
        )

    def _take_norms(self) -> tuple[NormCall, ...]:
        """The calls that update running statistics since this was asked last."""
        if self._statistics is None:
            return ()
        calls = self._statistics.calls
        self._statistics.clear()
        return calls


def _linked(value: Any, name: str, reader: int, links: dict[tuple[str, int, int], Node]) -> Any:
    """``value`` as a stage reads it: what requires gradients through a node of its own, in ``links``."""
    leaves, spec = tree_flatten(value)
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled():
            leaves[position] = leaf.clone()
            links[name, position, reader] = get_gradient_edge(leaves[position]).node
    return tree_unflatten(leaves, spec)


def _describe(
    name: str,
    maker: int,
    readers: tuple[int, ...],
    value: Any,
    gradients: Collection[tuple[int, int]],
) -> CrossingValue:
    """``gradients`` are places of leaves, each with a reader that hands back a gradient of it."""
    leaves, spec = tree_flatten(value)
    return CrossingValue(
        name=name,
        maker=maker,
        readers=readers,
        spec=spec,
        leaves=tuple(map(_spec_of, leaves)),
        gradient_readers=tuple(
            frozenset(reader for place, reader in gradients if place == position)
            for position in range(len(leaves))
        ),
    )


def _spec_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return TensorSpec(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    return leaf


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
