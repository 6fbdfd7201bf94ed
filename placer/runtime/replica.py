"""One replica in this process: its stages on their places, run forward or under a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from placer.capture import find_tensor, is_in
from placer.emit import StageCode, StagedModel
from placer.precision import precision_context
from placer.runtime.mirror import Mirrors
from placer.runtime.pieces import run_pieces, tensors_at
from placer.runtime.place import CALLER, Place, on
from placer.runtime.statistics import DeferredStatistics
from placer.runtime.transfer import (
    WaitingGradients,
    copy_to,
    gradient_root,
    receive,
    transfer,
)
from placer.runtime.tree import build_tree
from placer.schedule import Action


class Replica:
    """The stages of ``staged`` on ``places`` (one per stage), reading the weights of ``model``.

    ``model`` holds the primary weights, each at its home among ``homes`` (the places of replica 0).
    What this replica needs elsewhere it reads through its mirrors. With ``statistics``, those keep
    what the stages' norms would do to running statistics.
    """

    def __init__(
        self,
        staged: StagedModel,
        places: Sequence[Place],
        homes: Sequence[Place],
        precision: str = "fp32",
        statistics: DeferredStatistics | None = None,
    ) -> None:
        self.staged = staged
        self.places = tuple(places)
        self.homes = tuple(homes)
        self.mirrors = Mirrors()
        self.precision = precision
        self.statistics = statistics
        self._constants: dict[tuple[str, Place], torch.Tensor] = {}
        self._attributes: dict[str, tuple[torch.Tensor, int]] = {}  # constants that may change
        self._at_home = tuple(  # stages that find all their weights where they run
            all(self.homes[staged.state_stage[name]] == place for name in stage.state)
            for stage, place in zip(staged.stages, self.places, strict=True)
        )

    def with_program(self, staged: StagedModel) -> Replica:
        """The same replica, its copies of weights too, running other stages."""
        if staged is self.staged:
            return self
        other = Replica(staged, self.places, self.homes, self.precision, self.statistics)
        other.mirrors = self.mirrors
        return other

    @property
    def output_place(self) -> Place:
        return self.places[-1]

    def trees(self, model: nn.Module) -> list[Any]:
        """Per stage, an object that has the stage's modules and tensors on the stage's place."""
        self.follow_attributes(model)
        return [self._tree(model, stage) for stage in self.staged.stages]

    def _tree(self, model: nn.Module, stage: StageCode) -> Any:
        place = self.places[stage.index]
        if self._at_home[stage.index]:
            return model

        def read(name: str, tensor: torch.Tensor) -> torch.Tensor:
            return self.mirrors.read(tensor, self.homes[self._home_of(name)], place)

        return build_tree(model, stage.modules, stage.attributes, read)

    def _home_of(self, name: str) -> int:
        """The stage that owns a parameter or buffer.

        One that came since, with a module that replaced another or with a parametrization, belongs to
        the first stage that runs the module it is in.
        """
        known = self.staged.state_stage.get(name)
        if known is not None:
            return known
        return next(s.index for s in self.staged.stages if is_in((*s.modules, *s.attributes), name))

    def run_stage(self, tree: Any, stage: StageCode, inputs: list[Any]) -> tuple[Any, ...]:
        """The stage's outputs; ``inputs`` are on its place already, and the list is emptied."""
        place = self.places[stage.index]
        precision = precision_context(self.precision, place.device.type)
        with on(place), precision:
            if self.statistics is None:
                return run_pieces(stage, tree, place, inputs)
            written = [name for piece in stage.pieces for name in piece.written]
            with self.statistics.gathering(dict(tensors_at(tree, written)), place):
                return run_pieces(stage, tree, place, inputs)

    def follow_attributes(self, model: nn.Module) -> None:
        """Have constants that attributes of ``model`` hold the values that these have now."""
        for name, path in self.staged.constant_paths.items():
            value = find_tensor(model, path)
            if value is None or value.is_meta:
                continue
            version = 0 if value.is_inference() else value._version
            known = self._attributes.get(name)
            if known is None or known[0] is not value or known[1] != version:
                self._attributes[name] = value, version
                for key in [key for key in self._constants if key[0] == name]:
                    del self._constants[key]

    def constant(self, name: str, place: Place) -> torch.Tensor:
        """A tensor that is part of the program, on ``place``."""
        key = (name, place)
        if key not in self._constants:
            found = self._attributes.get(name)
            tensor = self.staged.constants[name] if found is None else found[0]
            with torch.inference_mode(False):
                self._constants[key] = copy_to(place, tensor.detach())
        return self._constants[key]

    def forward(self, trees: Sequence[Any], leaves: Sequence[torch.Tensor]) -> list[Any]:
        """The result leaves for one micro-batch of input leaves, on ``output_place``.

        A value is copied to a stage when the stage starts and dropped after its last reader.
        """
        staged = self.staged
        values: dict[str, tuple[Any, Place | None]] = {
            name: (leaf, None) for name, leaf in zip(staged.graph_inputs, leaves, strict=True)
        }
        for stage, tree in zip(staged.stages, trees, strict=True):
            place = self.places[stage.index]
            inputs = []
            for name in stage.inputs:
                if name in staged.constants:
                    inputs.append(self.constant(name, place))
                    continue
                value, source = values[name]
                home = source or caller_place(value, place)
                inputs.append(transfer(value, home, place, gradients_wait=source is not None))
                del value
                if staged.last_use[name] == stage.index:
                    del values[name]
            outputs = self.run_stage(tree, stage, inputs)
            values.update((n, (v, place)) for n, v in zip(stage.outputs, outputs, strict=True))
            del outputs
        return [values[x][0] if kind == "value" else x for kind, x in staged.result]


@dataclass(frozen=True, slots=True)
class PlacedMicrobatch:
    """One micro-batch: the stages that serve it, their weights per stage, its inputs."""

    replica: Replica
    trees: Sequence[Any]
    inputs: Sequence[torch.Tensor]


def run_schedule(
    runs: Sequence[PlacedMicrobatch],
    actions: Sequence[Action],
    loss_of: Callable[[int, list[Any]], torch.Tensor],
) -> list[torch.Tensor]:
    """Run ``actions`` over micro-batches; gradients accumulate, and the losses come back detached.

    ``loss_of(m, result leaves)`` gives micro-batch ``m``'s (already weighted) loss.
    """
    started = [_MicrobatchRun(r.replica, r.trees, r.inputs, m) for m, r in enumerate(runs)]
    for action in actions:
        if action.kind == "F":
            started[action.microbatch_index].forward(action.stage_index, loss_of)
        else:
            started[action.microbatch_index].backward(action.stage_index)
    for run in started:
        run.backward_inputs()
    return [run.loss.detach() for run in started if run.loss is not None]


def caller_place(value: Any, like: Place) -> Place:
    """Where an input of the caller's is: on its own device, under no name of the plan's."""
    device = value.device if isinstance(value, torch.Tensor) else like.device
    return Place(CALLER.name, device)


class _MicrobatchRun:
    """One micro-batch on its way through the stages, its autograd graph cut at each boundary.

    Of the values that crossed, the producer's side keeps a root where their gradients enter, the
    consumer's side a node each that hands the gradient over as soon as it is there. Neither keeps
    the value itself alive.
    """

    def __init__(
        self, replica: Replica, trees: Sequence[Any], leaves: Sequence[torch.Tensor], index: int
    ) -> None:
        self.replica = replica
        self.trees = trees
        self.index = index
        self.loss: torch.Tensor | None = None
        named = dict(zip(replica.staged.graph_inputs, leaves, strict=True))
        self._values: dict[str, Any] = dict(named)
        self._homes = {name: Place(CALLER.name, leaf.device) for name, leaf in named.items()}
        self._graph_inputs = {name: leaf for name, leaf in named.items() if leaf.requires_grad}
        # stage -> where its backward starts: (value, which tensor of it) -> root
        self._roots: dict[int, dict[tuple[str, int], torch.Tensor]] = {}
        self._grads: dict[tuple[str, int], WaitingGradients] = {}  # (value, which tensor of it)

    def forward(self, stage_index: int, loss_of: Callable[[int, list[Any]], torch.Tensor]) -> None:
        replica, staged = self.replica, self.replica.staged
        stage, place = staged.stages[stage_index], replica.places[stage_index]
        arguments = []
        for name in stage.inputs:
            if name in staged.constants:
                arguments.append(replica.constant(name, place))
                continue
            arguments.append(self._receive(name, place))
            if staged.last_use[name] == stage_index:
                del self._values[name]
        outputs = replica.run_stage(self.trees[stage_index], stage, arguments)
        for name, value in zip(stage.outputs, outputs, strict=True):
            self._values[name] = value
            self._homes[name] = place
        if stage_index == len(staged.stages) - 1:
            result = [self._values[x] if k == "value" else x for k, x in staged.result]
            self._values.clear()
            with on(place):
                self.loss = loss_of(self.index, result)
        else:
            crossing = {
                (name, position): tensor
                for name, value in zip(stage.outputs, outputs, strict=True)
                for position, tensor in enumerate(_differentiable(value))
            }
            self._grads.update((k, WaitingGradients(place, t)) for k, t in crossing.items())
            with on(place):
                self._roots[stage_index] = {
                    key: gradient_root(tensor, self._grads[key]) for key, tensor in crossing.items()
                }

    def _receive(self, name: str, place: Place) -> Any:
        """The value on ``place``; its gradient waits there."""
        leaves, spec = tree_flatten(self._values[name])
        home = self._homes[name]
        received = []
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.device):
                leaf = place.device
            elif isinstance(leaf, torch.Tensor) and leaf.requires_grad and torch.is_grad_enabled():
                key = (name, sum(1 for x in _differentiable(leaves[:position])))
                leaf = receive(leaf, home, place, partial(self._hold, key, place))
            elif isinstance(leaf, torch.Tensor):
                leaf = transfer(leaf, home, place)
            received.append(leaf)
        return tree_unflatten(received, spec)

    def _hold(self, key: tuple[str, int], place: Place, grad: torch.Tensor) -> None:
        """A gradient waits where it was made; the caller's own tensors get theirs at once."""
        if key[0] in self._graph_inputs:
            home = self._homes[key[0]]
            waiting = self._grads.setdefault(key, WaitingGradients(home, grad))
            waiting.hold(home, transfer(grad, place, home))
        else:
            self._grads[key].hold(place, grad)

    def backward(self, stage_index: int) -> None:
        """Run the stage's backward from the gradients that wait for it.

        A value that got none is no start: what only it depends on has no gradient, as in eager.
        """
        waiting = self._roots.pop(stage_index, {})
        roots = [root for key, root in waiting.items() if self._grads[key]]
        del waiting
        grads: list[torch.Tensor] | None = [torch.empty_like(root) for root in roots]
        if stage_index == len(self.replica.staged.stages) - 1:
            assert self.loss is not None
            roots, grads = [self.loss] if self.loss.requires_grad else [], None
            self.loss = self.loss.detach()
        if roots:
            with on(self.replica.places[stage_index]):
                torch.autograd.backward(roots, grads)

    def backward_inputs(self) -> None:
        """Hand the gradients of the caller's own inputs on to the caller's graph."""
        for name, leaf in self._graph_inputs.items():
            waiting = self._grads.pop((name, 0), None)
            if waiting:
                torch.autograd.backward(leaf, waiting.add_to(None))


def _differentiable(value: Any) -> list[torch.Tensor]:
    leaves = tree_flatten(value)[0]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
