"""Runs micro-batches through the stages by a table of actions; the same code in every runtime.

Autograd's graph is cut where a value leaves its stage: the maker's side keeps a root where gradients
enter, each reader's side a node that hands its gradient over as soon as it is there. Neither keeps
the value itself alive. How a value gets from one stage to another is the business of a `Transport`:
within a process it is copied when its reader starts, and between processes it is a message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from placer.executor.place import Place, on
from placer.executor.replica import Replica, caller_place
from placer.executor.split_backward import SplitBackward
from placer.executor.transfer import WaitingGradients, gradient_root, receive, transfer
from placer.schedule import Action

TensorKey = tuple[str, int]  # a value, and which leaf of it


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedMicrobatch:
    """One micro-batch: the stages that serve it, and what has their weights, per stage.

    ``leaves`` are all of the model's inputs, ``inputs`` those that the stages read, by name. An input
    in ``input_places`` is read where it is; of others, which are the caller's, a stage gets a copy.
    """

    replica: Replica
    trees: Sequence[Any]
    leaves: Sequence[torch.Tensor]
    inputs: Mapping[str, torch.Tensor]
    input_places: Mapping[str, Place] = field(default_factory=dict)


class Transport(Protocol):
    """Brings values and gradients from stages that other processes run, and takes them there."""

    def receive(self, action: Action, run: MicrobatchRun) -> None:
        """Bring what ``action`` needs into ``run``."""

    def check(self, action: Action, run: MicrobatchRun) -> None:
        """Raise ``ValueError`` when ``action`` has made other tensors than other processes expect."""

    def send(self, action: Action, run: MicrobatchRun) -> None:
        """Send what ``action`` has made for other processes."""

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""


Explain = Callable[[Action, "MicrobatchRun", Exception], Exception]


def run_schedule(
    microbatches: Mapping[int, PlacedMicrobatch],
    actions: Sequence[Action],
    loss_of: Callable[[int, list[Any]], torch.Tensor | None],
    *,
    transport: Transport | None = None,
    explain: Explain | None = None,
) -> list[torch.Tensor]:
    """Run ``actions`` over micro-batches; gradients accumulate, and the losses come back detached.

    ``loss_of(m, result leaves)`` gives micro-batch ``m``'s (already weighted) loss, or None where
    there is no backward. ``actions`` may be those of some stages only: the ``transport`` connects
    them with the others. What a stage raises becomes what ``explain`` makes of it.
    """
    split = {action.stage_index for action in actions if action.kind == "W"}
    local = frozenset(action.stage_index for action in actions)
    runs = {
        index: MicrobatchRun(given, index, local=local, split=split)
        for index, given in microbatches.items()
    }
    for action in actions:
        run = runs[action.microbatch_index]
        if transport is not None:
            transport.receive(action, run)
        try:
            run.do(action, loss_of)
            if transport is not None:
                transport.check(action, run)
        except Exception as error:
            if explain is None:
                raise
            raise explain(action, run, error) from error
        if transport is not None:
            transport.send(action, run)
        run.outputs = {}
    if transport is not None:
        transport.finish()
    for run in runs.values():
        run.backward_inputs()
    return [run.loss.detach() for run in runs.values() if run.loss is not None]


class MicrobatchRun:
    """One micro-batch on its way through the stages that this process runs.

    ``outputs`` are the values that the last forward made, until they are sent; ``phase`` is what is being
    done, in the words of errors.
    """

    def __init__(
        self,
        given: PlacedMicrobatch,
        index: int,
        *,
        local: frozenset[int],
        split: set[int],
    ) -> None:
        self.index = index
        self.loss: torch.Tensor | None = None
        self.outputs: Mapping[str, Any] = {}
        self.phase = "forward"
        self._replica = given.replica
        self._trees = given.trees
        self._split = split  # stages whose backward has two halves
        self._last_read = given.replica.last_reads(local)
        self._values: dict[str, Any] = dict(given.inputs)
        self._places = {
            name: given.input_places.get(name) or caller_place(leaf)
            for name, leaf in given.inputs.items()
        }
        self._inputs = {name: leaf for name, leaf in given.inputs.items() if leaf.requires_grad}
        # By stage: where its backward starts, what it received, and what is left of a split backward.
        self._roots: dict[int, dict[TensorKey, torch.Tensor | GradientEdge]] = {}
        self._received: dict[int, list[tuple[GradientEdge, Callable[[torch.Tensor], None]]]] = {}
        self._halves: dict[int, SplitBackward] = {}
        self._gradients: dict[TensorKey, WaitingGradients] = {}

    def do(self, action: Action, loss_of: Callable[[int, list[Any]], torch.Tensor | None]) -> None:
        """Do ``action``, for which everything is here."""
        if action.kind == "F":
            self._forward(action.stage_index, loss_of)
        elif action.kind == "B":
            self._backward(action.stage_index)
        elif action.kind == "I":
            self._backward_for_inputs(action.stage_index)
        else:
            self.phase = "backward"
            self._halves.pop(action.stage_index).run_weights()

    def put(self, name: str, value: Any, place: Place) -> None:
        """Have ``value``, which another process made and ``place`` now has, read by stages here."""
        self._values[name] = value
        self._places[name] = place
        self._gradients.update(self._waiting(name, value, place))

    def take_gradient(self, key: TensorKey) -> torch.Tensor | None:
        """The sum of the gradients that stages here have for a tensor of another process; None if none."""
        return self._gradients.pop(key).add_to(None)

    def add_gradient(self, key: TensorKey, gradient: torch.Tensor, place: Place) -> None:
        """Keep a gradient, which another process has sent, for a tensor that was made here."""
        self._gradients[key].hold(place, gradient, ours=True)

    def roots(self, index: int) -> list[torch.Tensor | GradientEdge]:
        """Where the backward of stage ``index`` will start."""
        return list(self._roots.get(index, {}).values())

    def _forward(
        self, index: int, loss_of: Callable[[int, list[Any]], torch.Tensor | None]
    ) -> None:
        self.phase = "forward"
        replica, staged = self._replica, self._replica.staged
        stage, place = staged.stages[index], replica.places[index]
        arguments = []
        for name in stage.inputs:
            if name in staged.constants:
                arguments.append(replica.constant(name, place))
                continue
            arguments.append(self._read(name, index))
            if self._last_read[name] == index:
                del self._values[name]
        made = replica.run_stage(self._trees[index], stage, arguments)
        outputs = dict(zip(stage.outputs, made, strict=True))
        del made
        if index == len(staged.stages) - 1:
            result = [outputs[x] if kind == "value" else x for kind, x in staged.result]
            self._values.clear()
            del outputs
            with on(place):
                self.phase = "loss_fn" if torch.is_grad_enabled() else "result"
                self.loss = loss_of(self.index, result)
            return
        for name, value in outputs.items():
            if name in self._last_read:
                self._values[name], self._places[name] = value, place
            self._gradients.update(self._waiting(name, value, place))
        self._roots[index] = {
            (name, position): self._root(index, (name, position), leaf)
            for name, value in outputs.items()
            for position, leaf in _differentiable(value)
        }
        self.outputs = outputs
        self.phase = "boundary"

    def _waiting(self, name: str, value: Any, place: Place) -> Mapping[TensorKey, WaitingGradients]:
        if not torch.is_grad_enabled():
            return {}
        return {
            (name, position): WaitingGradients(place, leaf)
            for position, leaf in _differentiable(value)
        }

    def _root(
        self, index: int, key: TensorKey, tensor: torch.Tensor
    ) -> torch.Tensor | GradientEdge:
        if index in self._split:
            return get_gradient_edge(tensor)
        with on(self._replica.places[index]):
            return gradient_root(tensor, self._gradients[key])

    def _read(self, name: str, index: int) -> Any:
        """The value on the place of stage ``index``, whose gradient of it waits there."""
        place, home = self._replica.places[index], self._places[name]
        leaves, spec = tree_flatten(self._values[name])
        read = []
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.device):
                leaf = place.device
            elif isinstance(leaf, torch.Tensor) and leaf.requires_grad and torch.is_grad_enabled():
                deliver = partial(self._hold, (name, position), place)
                leaf = receive(leaf, home, place, deliver)
                if index in self._split:
                    edge = get_gradient_edge(leaf)
                    self._received.setdefault(index, []).append((edge, deliver))
            elif isinstance(leaf, torch.Tensor):
                leaf = transfer(leaf, home, place)
            read.append(leaf)
        return tree_unflatten(read, spec)

    def _hold(self, key: TensorKey, place: Place, gradient: torch.Tensor) -> None:
        """A gradient waits where it was made; the caller's own tensors get theirs at once."""
        if key[0] in self._inputs:
            home = self._places[key[0]]
            waiting = self._gradients.setdefault(key, WaitingGradients(home, gradient))
            waiting.hold(home, transfer(gradient, place, home))
        else:
            self._gradients[key].hold(place, gradient)

    def _backward(self, index: int) -> None:
        """Run the stage's backward from the gradients that wait for it.

        A value that got none is no start: what only it depends on has no gradient, as in eager.
        """
        self.phase = "backward"
        waiting = self._roots.pop(index, {})
        roots = [root for key, root in waiting.items() if self._gradients[key]]
        del waiting
        gradients: list[torch.Tensor] | None = [torch.empty_like(root) for root in roots]  # type: ignore[arg-type]
        if index == len(self._replica.staged.stages) - 1:
            roots, gradients = self._loss_root(), None
        if roots:
            with on(self._replica.places[index]):
                torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]

    def _backward_for_inputs(self, index: int) -> None:
        """The first half of a split backward: gradients of what the stage received."""
        self.phase = "backward"
        roots: list[torch.Tensor | GradientEdge] = []
        gradients: list[torch.Tensor | None] = []
        for key, root in self._roots.pop(index, {}).items():
            gradient = self._gradients.pop(key).add_to(None)
            if gradient is not None:
                roots.append(root)
                gradients.append(gradient)
        if index == len(self._replica.staged.stages) - 1:
            roots = list(self._loss_root())
            gradients = [None] * len(roots)
        with on(self._replica.places[index]):
            self._halves[index] = SplitBackward(roots, gradients, self._received.pop(index, []))
            self._halves[index].run_inputs()

    def _loss_root(self) -> list[Any]:
        assert self.loss is not None
        root = self.loss
        self.loss = root.detach()
        return [root] if root.requires_grad else []

    def backward_inputs(self) -> None:
        """Hand the gradients of the caller's own inputs on to the caller's graph."""
        for name, leaf in self._inputs.items():
            waiting = self._gradients.pop((name, 0), None)
            if waiting:
                with on(self._places[name]):
                    torch.autograd.backward(leaf, waiting.add_to(None))


def _differentiable(value: Any) -> list[tuple[int, torch.Tensor]]:
    """The leaves of ``value`` that take part in backward, with their places among all leaves."""
    return [
        (position, leaf)
        for position, leaf in enumerate(tree_leaves(value))
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
