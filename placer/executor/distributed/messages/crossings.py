"""Finds the values that cross from one stage to another, with their shapes, for inputs of given shapes.

Every rank finds the same answer by running all stages on fake tensors, so ranks exchange no metadata.
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
from torch.utils._pytree import TreeSpec, tree_flatten

from placer._torch import hooks_of, share_hooks
from placer.autograd_graph import nodes_behind
from placer.emit import StagedModel
from placer.errors import PlacerError
from placer.executor.calls.call_cache import Call, CallCache
from placer.executor.calls.program_cache import ProgramCache
from placer.executor.distributed.job.ownership import Ownership
from placer.executor.places.place import Place
from placer.executor.stages.replica import Replica
from placer.plan.types import Plan
from placer.precision import autocast_state, planned_autocast
from placer.program import (
    FakeConverter,
    Held,
    Target,
    copy_guarded_attributes,
    copy_module,
    example_numbers,
    store,
    unflatten,
)
from placer.program.leaves import has_hooks, is_torch_leaf
from placer.program.objects.originals import note_originals, originals_of
from placer.program.objects.paths import hidden_modules
from placer.program.objects.reachable import find_reachable_state
from placer.schedule import Flow
from placer.space import Alone

NUMBERS: Mapping[type, torch.dtype] = {int: torch.int64, float: torch.float64}
"""How numbers are sent."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The metadata of a tensor that goes to another stage."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    number: int | float | None = None  # if it is a number: that of the run on fake tensors


@dataclass(frozen=True, kw_only=True)
class CrossingValue:
    """A value of the graph that a later stage reads: a tensor, or a pytree.

    ``maker`` and ``readers`` are stage indices. ``leaves`` has a ``TensorSpec`` for each tensor in the
    value, and for each number if the program has inputs that are numbers, on which it may depend; and other
    leaves themselves (sizes are the same on every rank). ``gradient_readers`` has for each leaf those readers
    that send a gradient back, because the model's result depends on the leaf through them.
    """

    name: str
    maker: int
    readers: tuple[int, ...]
    spec: TreeSpec
    leaves: tuple[Any, ...]
    gradient_readers: tuple[frozenset[int], ...]

    @cached_property
    def tensors(self) -> Mapping[int, TensorSpec]:
        """The tensors among the leaves, by their index."""
        return {i: leaf for i, leaf in enumerate(self.leaves) if isinstance(leaf, TensorSpec)}

    def rebuild(self, tensors: Mapping[int, Tensor]) -> Any:
        """The value with the given ``tensors``, keyed by their index among the leaves."""
        leaves = [tensors.get(position, leaf) for position, leaf in enumerate(self.leaves)]
        return unflatten(leaves, self.spec)


@dataclass(frozen=True, kw_only=True)
class Crossings:
    """All values that cross between stages, for one shape of micro-batch.

    ``staged`` has the stages that run micro-batches of that shape in the present mode.
    """

    staged: StagedModel
    values: Mapping[str, CrossingValue]  # in the order in which stages make them
    # For each leaf of the model's result a ``TensorSpec``, or the leaf itself.
    result: tuple[Any, ...]

    @cached_property
    def flows(self) -> tuple[Flow, ...]:
        """The values with tensors, which travel in messages."""
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
        """The values without tensors, such as sizes, which every rank knows."""
        return tuple(value for value in self.values.values() if not value.tensors)

    @cached_property
    def gradients_may_lack(self) -> bool:
        """Whether an expected gradient may be missing, because the loss does not use all results."""
        wanted = [x for x in self.result if isinstance(x, TensorSpec) and x.requires_grad]
        return len(wanted) > 1


def find_value_readers(staged: StagedModel) -> Mapping[str, tuple[int, tuple[int, ...]]]:
    """The maker and the readers of each value that crosses between stages, in the order of the makers.

    Does not include the model's inputs and constants, which every rank has.
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


def find_pairs(staged: StagedModel, rank_of: Sequence[int]) -> set[tuple[int, int]]:
    """The pairs of ranks between which values cross, the lower rank first."""
    return {
        (min(ends), max(ends))
        for maker, readers in find_value_readers(staged).values()
        for reader in readers
        if len(ends := {rank_of[maker], rank_of[reader]}) == 2
    }


class CrossingFinder:
    """Finds `Crossings` by running a copy of the whole model on fake tensors; caches them by shape.

    ``calls`` has the programs of that copy, for each way in which the model has been called. ``part`` is
    this rank's part of the model, and ``whole`` all of it, without data.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        staged: StagedModel,
        *,
        part: nn.Module,
        ownership: Ownership,
        device: torch.device,
        shard: int = 0,
    ) -> None:
        self._converter = FakeConverter()
        self.device = device
        self._place = Place(str(device), device)
        meta = torch.device("meta")
        # Tensors that are no parameters or buffers keep their values, which the program may read.
        self.whole = _copy_with(model, lambda t: _empty_like(t, meta), plain=lambda t: t)
        with self._converter.mode, torch.no_grad():
            empty = partial(_empty_like, device=device)
            self._fake = _copy_with(self.whole, empty, plain=empty)
        self._models = (
            (self.whole, partial(_empty_like, device=meta)),
            (self._fake, self._make_fake),
        )
        self._converter.reachable.extend(find_reachable_state(self._fake))
        self._copies = [dict(model.named_modules()) for model in (self.whole, self._fake)]
        self.part = part
        originals = {id(x): p for p, m in self._copies[0].items() for x in originals_of(m)}
        self._absent = {
            originals[id(x)]: module
            for module in hidden_modules(part).values()
            for x in originals_of(module)
            if id(x) in originals
        }
        # Of hooks that are put on a layer later, a capture finds out whether they may run for every slice.
        modules = dict(part.named_modules())
        # Those from before are copies, which keep what they do in the copy of the model.
        self._hooks_of = {path: hooks_of(m) for path, m in modules.items() if is_torch_leaf(m)}
        for path in (path for path, hooks in self._hooks_of.items() if not hooks):
            share_hooks(modules[path], self._copies[0][path])
        self._had_no_hooks = [
            x for x, m in modules.items() if x and not (has_hooks(m) or is_torch_leaf(m))
        ]
        self._dtypes = {
            (path, name): parameter.dtype
            for path, module in modules.items()
            for name, parameter in module._parameters.items()
            if parameter is not None
        }
        self._ownership = ownership
        programs = ProgramCache(self.whole, plan, staged, planned_autocast(plan.precision))
        self.calls = CallCache(programs, before_capture=self.follow)
        places = [self._place] * len(staged.stages)
        shards = [[place] for place in places]
        exchange = Alone(plan.shards, shard) if plan.shards > 1 else None
        self._replica = Replica(staged, shards, places, plan.precision, exchange=exchange)
        self._modes: tuple[bool, ...] = ()  # training flags that were copied last
        self._found: dict[Any, Crossings] = {}

    def follow(self) -> None:
        """Copy the training flags of this rank's part, and the plain attributes that programs read.

        A module that the part lacks keeps what `train` and `store` have set. Raises ``PlacerError`` for hooks
        that were put on a module of several layers, and for another dtype: other ranks do not have them.
        """
        modules = dict(self.part.named_modules())
        for (path, name), dtype in self._dtypes.items():
            parameter = modules[path]._parameters.get(name) if path in modules else None
            if parameter is not None and parameter.dtype != dtype:
                raise PlacerError(
                    f"{path}.{name}".lstrip("."),
                    f"is {parameter.dtype}, and was {dtype} when the model was placed",
                    'cast the model before placer.compile, or use "precision" in the spec',
                )
        for path, hooks in self._hooks_of.items():
            layer = modules.get(path)
            if layer is not None and (hooks or has_hooks(layer)) and hooks_of(layer) != hooks:
                share_hooks(layer, self._copies[0][path])
        for path in self._had_no_hooks:
            if path in modules and has_hooks(modules[path]):
                raise PlacerError(
                    path,
                    "hooks were put on it after it was placed, which works in one process only: it is no "
                    "layer of torch, and other ranks do not run it as one operation",
                    "put them on the model before placer.compile, or on the layers inside",
                )
        guards = self.calls.guards
        for copied in self._copies:
            if copy_guarded_attributes(guards, modules, copied, self._absent):
                self._found.clear()
            for path, name in self.calls.numbers:
                if path in modules and name in vars(modules[path]):
                    setattr(copied[path], name, getattr(modules[path], name))
            for path, module in modules.items():
                if path in copied and copied[path].training != module.training:  # to set it is slow
                    copied[path].training = module.training
        self._modes = tuple(module.training for module in self._copies[0].values())

    def _make_fake(self, tensor: Tensor) -> Tensor:
        with self._converter.mode, torch.no_grad():
            return _empty_like(tensor, self.device)

    def train(self, mode: bool) -> None:
        """Set the mode of modules that this rank's part lacks, too."""
        for model in (self.whole, self._fake):
            model.train(mode)

    def store(self, staged: StagedModel, leaves: Sequence[Any]) -> None:
        """Set what a call has stored in modules, of which the part lacks some; tensors without their data."""
        rest = list(leaves)
        for each in staged.stored:
            own, rest = rest[: each.count], rest[each.count :]
            if each.root != "model" or each.kind == "write":
                continue
            if each.path[1:2] == ("_buffers",):  # of another shape: others are written in place
                self._found.clear()
            for model, without_data in self._models:
                empty = [without_data(leaf) if isinstance(leaf, Tensor) else leaf for leaf in own]
                store([each], empty, Target(model=model))

    def find(self, call: Call, leaves: Sequence[Tensor], *, grad: bool) -> Crossings:
        """The values that cross for a micro-batch with the shapes of ``leaves`` (flattened inputs).

        ``call`` is from ``calls``. If the model reads a value of a tensor, the
        guess made at capture is used again; in a real run, stages compare their outputs with what is
        found here. Raises ``PlacerError`` if a stage fails, or needs weights that its rank does not have.
        """
        shapes = tuple((leaf.shape, leaf.dtype, grad and leaf.requires_grad) for leaf in leaves)
        staged = call.programs.find([leaf.detach() for leaf in leaves], call.leaves_by_name)
        kept = [each.read(self._fake, {}) for each in staged.state if each.kind is Tensor]
        state = tuple(map(_spec_of, kept))
        key = (id(staged), shapes, state, self._modes, grad, autocast_state(self.device.type))
        if key not in self._found:
            self._check_weights(staged)
            self.check_flags(staged)
            self._found[key] = self._run(staged, shapes, grad)
        return self._found[key]

    def _check_weights(self, staged: StagedModel) -> None:
        """Raise ``PlacerError``, the same on every rank, if a rank lacks a weight that its stage reads.

        Each has the weights that its stages read in the call, and the mode, of `placer.compile`.
        """
        for stage in staged.stages:
            device = self._ownership.device_of[stage.index]
            for name in sorted(set(stage.state) - set(self._ownership.names[device])):
                raise PlacerError(
                    name,
                    f"is read by stage {stage.index} in this call, but not in the one that placer.compile "
                    "was given, or not in the mode that the model was in, so the rank of that stage does "
                    "not have it",
                    "call placer.compile with an example, and in a mode, in which all layers are used",
                )

    def check_flags(self, staged: StagedModel) -> None:
        """Raise ``PlacerError``, the same on every rank, if forward changes which parameters are trained."""
        for each in staged.stored:
            if each.flag is None or each.root != "model":
                continue
            path, _, name = each.path
            if self.whole.get_submodule(path).get_parameter(name).requires_grad != each.flag:
                raise PlacerError(
                    f"{path}.{name}".lstrip("."),
                    "forward sets its requires_grad, which works in one process only",
                    "set it on the model before placer.compile, or leave it as it is in forward",
                )

    @contextmanager
    def _on_fakes(self, staged: StagedModel) -> Iterator[tuple[Replica, nn.Module]]:
        """In this block, a replica that runs ``staged`` on fake tensors, and the whole fake model."""
        with self._converter.running(staged.conditions.guess), torch.random.fork_rng(devices=[]):
            yield self._replica.with_program(staged), self._fake

    def _run(
        self, staged: StagedModel, shapes: Sequence[tuple[Any, torch.dtype, bool]], grad: bool
    ) -> Crossings:
        values: dict[str, Any] = {}
        # By value, leaf and reader: the autograd node through which the reader uses the leaf.
        links: dict[tuple[str, int, int], Node] = {}
        with self._on_fakes(staged) as (replica, part), torch.set_grad_enabled(grad):
            device = self.device
            for each, name in zip(staged.state, staged.graph_inputs[len(shapes) :], strict=True):
                values[name] = each.read(self._fake, example_numbers(staged.call))
            for name, (shape, dtype, wanted) in zip(staged.graph_inputs, shapes, strict=False):
                leaf = torch.empty(shape, dtype=dtype, device=device, requires_grad=wanted)
                # A view, because the model may write to an input in place, but not to a leaf.
                values[name] = leaf.view_as(leaf) if wanted else leaf
            for stage in staged.stages:
                inputs = [
                    replica.constant(n, self._place)
                    if n in staged.constants
                    else _linked(values[n], n, stage.index, links)
                    for n in stage.inputs
                ]
                try:
                    outputs = replica.run_stage([part], stage, inputs)
                except (DataDependentOutputException, DynamicOutputShapeException) as error:
                    raise PlacerError(
                        f"stage {stage.index}",
                        f"the shapes of its outputs depend on the data ({error})",
                        "place the layers that make them, and all after them, on the last device",
                    ) from error
                except Exception as error:
                    raise PlacerError(
                        f"stage {stage.index}",
                        f"fails for a micro-batch of inputs {[list(s) for s, *_ in shapes]}: "
                        f"{type(error).__name__}: {error}",
                        "check that the plain model accepts such inputs in this mode; with fewer "
                        "micro-batches or replicas each has more rows (drop_last=True skips a small "
                        "last batch)",
                    ) from error
                values.update(zip(stage.outputs, outputs, strict=True))
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
                    numbers=bool(staged.state),
                )
                for name, (maker, readers) in find_value_readers(staged).items()
            },
            result=tuple(_spec_of(leaf) for leaf in result),
        )


def _linked(value: Any, name: str, reader: int, links: dict[tuple[str, int, int], Node]) -> Any:
    """``value`` with leaves that require gradients cloned for ``reader``; adds their nodes to ``links``."""
    leaves, spec = tree_flatten(value)
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled():
            leaves[position] = leaf.clone()
            links[name, position, reader] = get_gradient_edge(leaves[position]).node
    return unflatten(leaves, spec)


def _describe(
    name: str,
    maker: int,
    readers: tuple[int, ...],
    value: Any,
    gradients: Collection[tuple[int, int]],
    *,
    numbers: bool,
) -> CrossingValue:
    """The crossing value; ``gradients`` are pairs of a leaf's index and a reader that sends a gradient.

    With ``numbers``, numbers are sent.
    """
    leaves, spec = tree_flatten(value)
    return CrossingValue(
        name=name,
        maker=maker,
        readers=readers,
        spec=spec,
        leaves=tuple(_spec_of(leaf, numbers=numbers) for leaf in leaves),
        gradient_readers=tuple(
            frozenset(reader for index, reader in gradients if index == position)
            for position in range(len(leaves))
        ),
    )


def _spec_of(leaf: Any, *, numbers: bool = False) -> Any:
    if isinstance(leaf, Tensor):
        return TensorSpec(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    if numbers and type(leaf) in (int, float):
        return TensorSpec((), NUMBERS[type(leaf)], requires_grad=False, number=leaf)
    return leaf


def _copy_with(
    model: nn.Module, make: Callable[[Tensor], Tensor], *, plain: Callable[[Tensor], Tensor]
) -> nn.Module:
    """A deep copy with ``make`` applied to parameters and buffers, and ``plain`` to other tensors."""
    held = Held.by(model)
    memo: dict[int, Any] = {id(tensor): plain(tensor) for tensor in held.tensors}
    for tensor in [*model.parameters(), *model.buffers()]:
        twin = make(tensor)
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = twin
    copied = copy_module(model, memo, held=held)
    note_originals(model, copied)
    return copied


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.layout != torch.strided:
        return torch.empty(tensor.size(), dtype=tensor.dtype, device=device)
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
