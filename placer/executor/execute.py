"""Runs micro-batches through the stages in the order of a schedule, in one process or in many.

If the schedule has backwards, each stage has an autograd graph of its own, which begins and ends where
values cross to another stage. The stage that makes a value keeps a root from which its backward starts;
each stage that reads the value has a node that delivers its gradient as soon as it is computed. Neither
keeps the value itself alive. If the schedule has forwards only, the graph is left whole, for the caller's
own backward.

Within a process a value is copied when its reader starts; between processes a `Transport` carries it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_leaves

from placer.executor.places.place import Place, on
from placer.executor.places.transfer import PendingGradients, gradient_root, receive, transfer
from placer.executor.stages.replica import Replica, caller_place
from placer.executor.stages.split_backward import SplitBackward
from placer.executor.task import doing
from placer.executor.watch import kind_of, timed
from placer.precision import casts_kept
from placer.program import unflatten
from placer.schedule import Action
from placer.timeline import Task

TensorKey = tuple[str, int]  # the name of a value, and the index of one of its pytree leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedMicrobatch:
    """One micro-batch, and the stages that run it.

    ``trees`` has for each stage the objects from which its shards' code reads modules and weights. ``leaves``
    are all inputs of the model, ``inputs`` those that the stages read, by name. ``input_places`` has the
    places of inputs that a stage there reads without a copy. Every other input belongs to the caller
    and is copied. ``counted`` is what the loss's normalizer counts in ``target``. ``numbers`` are leaves of
    the call by name, for hooks.
    """

    replica: Replica
    trees: Sequence[Sequence[Any]]
    leaves: Sequence[torch.Tensor]
    inputs: Mapping[str, Any]
    input_places: Mapping[str, Place] = field(default_factory=dict)
    target: Any = None
    counted: float | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)
    replica_index: int = 0


class Transport(Protocol):
    """Exchanges values and gradients with the stages that other processes run."""

    def receive(self, action: Action, run: MicrobatchRun) -> None:
        """Put what ``action`` needs from other processes into ``run``."""

    def check(self, action: Action, run: MicrobatchRun) -> None:
        """Raise ``ValueError`` when results of ``action`` are not what other processes expect."""

    def send(self, action: Action, run: MicrobatchRun) -> None:
        """Start to send the results of ``action`` that other processes need."""

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""


Explain = Callable[[Action, "MicrobatchRun", Exception], Exception]
LossOfSlice = Callable[[int, list[Any]], torch.Tensor | None]
_RESULT = "the result"  # in place of a value's name


class ScheduleRun:
    """Runs ``actions`` over micro-batches, all at once or forwards and backwards apart.

    ``loss_of(m, result leaves)`` returns the weighted loss of micro-batch ``m``, or None if there is
    no backward. Backwards start from ``scale`` times the losses. If there are only forwards, no graph is
    cut, so the results have the graph of all stages. Without ``loss_of``, results are kept after the
    forwards (`MicrobatchRun.receive_result`), and backwards start from their gradients.

    If ``actions`` are those of some stages only, ``transport`` connects them with the others.
    ``explain`` turns an exception of a stage into the one that is raised.
    """

    def __init__(
        self,
        microbatches: Mapping[int, PlacedMicrobatch],
        actions: Sequence[Action],
        loss_of: LossOfSlice | None,
        *,
        transport: Transport | None = None,
        explain: Explain | None = None,
        scale: float = 1.0,
    ) -> None:
        split = {action.stage_index for action in actions if action.kind == "W"}
        local = frozenset(action.stage_index for action in actions)
        has_backward = any(action.kind != "F" for action in actions)
        self._microbatches, self._actions, self._loss_of = microbatches, actions, loss_of
        self._transport, self._explain, self._has_backward = transport, explain, has_backward
        self.runs = {
            index: MicrobatchRun(
                given, index, local=local, split=split, cuts_graph=has_backward, scale=scale
            )
            for index, given in microbatches.items()
        }

    def do(self, kinds: str = "FBIW") -> None:
        """Run the actions of these kinds, in their order."""
        with self._casts_kept():
            for action in self._actions:
                if action.kind in kinds:
                    given = self._microbatches[action.microbatch_index]
                    device = given.replica.places[action.stage_index].device
                    with doing(task := Task(action, given.replica_index)):
                        self._do(action, self.runs[action.microbatch_index], task, device)

    def _casts_kept(self) -> AbstractContextManager[None]:
        given = list(self._microbatches.values())  # none in a replica without rows
        # One backward through several micro-batches would add their gradients up in the cast's precision.
        kept = len(given) > 1 and self._has_backward
        return casts_kept(given[0].replica.precision) if kept else nullcontext()

    def _do(self, action: Action, run: MicrobatchRun, task: Task, device: torch.device) -> None:
        transport = self._transport
        if transport is not None:
            with timed("waiting", task, device):
                transport.receive(action, run)
        try:
            with timed(kind_of(action), task, device):
                run.do(action, self._loss_of)
            if transport is not None:
                transport.check(action, run)
        except Exception as error:
            if self._explain is None:
                raise
            raise self._explain(action, run, error) from error
        if transport is not None:
            with timed("sending", task, device):
                transport.send(action, run)
        run.outputs = {}

    def finish(self) -> list[torch.Tensor]:
        """Wait for messages, continue the backward in the caller's graph; returns the detached losses."""
        if self._transport is not None:
            self._transport.finish()
        for run in self.runs.values():
            run.backward_inputs()
        return [run.loss.detach() for run in self.runs.values() if run.loss is not None]


def run_schedule(
    microbatches: Mapping[int, PlacedMicrobatch],
    actions: Sequence[Action],
    loss_of: LossOfSlice,
    **options: Any,
) -> list[torch.Tensor]:
    """Make a `ScheduleRun` and do all its actions; accumulates gradients and returns the detached losses."""
    run = ScheduleRun(microbatches, actions, loss_of, **options)
    run.do()
    return run.finish()


def run_forward(microbatch: PlacedMicrobatch, index: int = 0) -> list[Any]:
    """The result leaves of micro-batch ``index``, on the place of the last stage, with their whole graph."""
    result: list[Any] = []

    def keep(_: int, leaves: list[Any]) -> None:
        result.extend(leaves)

    stages = microbatch.replica.staged.stages
    forwards = [Action(stage_index=s.index, kind="F", microbatch_index=index) for s in stages]
    run_schedule({index: microbatch}, forwards, keep)
    return result


class MicrobatchRun:
    """One micro-batch on its way through the stages that this process runs.

    With ``cuts_graph`` every stage has an autograd graph of its own, else they share one. ``outputs``
    has the values that the last forward made, until they are sent. ``phase`` says what is running now,
    for error messages: "forward", "boundary", "loss_fn", "result" or "backward".
    """

    def __init__(
        self,
        given: PlacedMicrobatch,
        index: int,
        *,
        local: frozenset[int],
        split: set[int],
        cuts_graph: bool = True,
        scale: float = 1.0,
    ) -> None:
        self.index = index
        self.loss: torch.Tensor | None = None
        self.outputs: Mapping[str, Any] = {}
        self.result: list[Any] = []  # its leaves, if the loss is computed later
        self.phase = "forward"
        self._replica = given.replica
        self._trees = given.trees
        self._split = split  # stages whose backward has two halves
        self._cuts_graph = cuts_graph
        self._scale = scale
        self._last_read = given.replica.last_reads(local)
        self._values: dict[str, Any] = dict(given.inputs)
        self._places = {
            name: given.input_places.get(name) or caller_place(leaf)
            for name, leaf in given.inputs.items()
        }
        self._inputs = {
            name: leaf
            for name, leaf in given.inputs.items()
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        }
        # For each stage: where its backward starts, the values that it received, and its split backward.
        self._roots: dict[int, dict[TensorKey, torch.Tensor | GradientEdge]] = {}
        self._received: dict[int, list[tuple[GradientEdge, Callable[[torch.Tensor], None]]]] = {}
        self._split_backwards: dict[int, SplitBackward] = {}
        self._gradients: dict[TensorKey, PendingGradients] = {}

    def do(self, action: Action, loss_of: LossOfSlice | None) -> None:
        """Run ``action``; everything that it needs must have been received."""
        if action.kind == "F":
            self._forward(action.stage_index, loss_of)
        elif action.kind == "B":
            self._backward(action.stage_index)
        elif action.kind == "I":
            self._backward_for_inputs(action.stage_index)
        else:
            self.phase = "backward"
            self._split_backwards.pop(action.stage_index).run_weights()

    def put(self, name: str, value: Any, place: Place) -> None:
        """Store ``value``, which another process made and which is on ``place`` now, for stages here."""
        self._values[name] = value
        self._places[name] = place
        self._gradients.update(self._pending_gradients(name, value, place))

    def take_gradient(self, key: TensorKey) -> torch.Tensor | None:
        """The sum of the gradients that stages here computed for a tensor of another process.

        None if they computed none.
        """
        return self._gradients.pop(key).add_to(None)

    def add_gradient(self, key: TensorKey, gradient: torch.Tensor, place: Place) -> None:
        """Store a gradient that another process sent for a tensor that was made here."""
        self._gradients[key].hold(place, gradient, may_modify=True)

    def receive_result(self, home: Place) -> list[Any]:
        """The leaves of the result on ``home``, cut from the graph; the backward needs their gradients."""
        place, leaves, self.result = self._replica.output_place, self.result, []
        differentiable = dict(_differentiable(leaves))

        def hold(position: int, gradient: torch.Tensor) -> None:
            self._gradients[_RESULT, position].hold(home, gradient)

        return [
            receive(leaf, place, home, partial(hold, position))
            if position in differentiable
            else transfer(leaf, place, home)
            for position, leaf in enumerate(leaves)
        ]

    def add_result_gradient(self, position: int, gradient: torch.Tensor) -> None:
        """Store the gradient of a leaf of the result, which another process computed."""
        self.add_gradient((_RESULT, position), gradient, self._replica.output_place)

    def _keep_result(self, index: int, result: list[Any]) -> None:
        """Keep the result for a loss that is computed later, from whose gradients the backward starts."""
        self.result, roots = result, self._roots.setdefault(index, {})
        for position, leaf in _differentiable(result):
            key = _RESULT, position
            self._gradients[key] = PendingGradients(self._replica.output_place, leaf)
            roots[key] = gradient_root(leaf, self._gradients[key])

    def _forward(self, index: int, loss_of: LossOfSlice | None) -> None:
        self.phase = "forward"
        replica, staged = self._replica, self._replica.staged
        stage, place = staged.stages[index], replica.places[index]
        arguments = []
        for name in stage.inputs:
            if name in staged.constants:
                arguments.append(replica.constant(name, replica.place_of(index, name)))
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
                if loss_of is None:
                    self._keep_result(index, result)
                else:
                    self.phase = "loss_fn" if torch.is_grad_enabled() else "result"
                    self.loss = loss_of(self.index, result)
            return
        for name, value in outputs.items():
            if name in self._last_read:
                self._values[name], self._places[name] = value, replica.place_of(index, name)
        if self._cuts_graph:
            self._roots[index] = self._make_roots(index, outputs)
        self.outputs = outputs
        self.phase = "boundary"

    def _make_roots(
        self, index: int, outputs: Mapping[str, Any]
    ) -> dict[TensorKey, torch.Tensor | GradientEdge]:
        """Where the backward of stage ``index`` will start: one root per tensor of its ``outputs``."""
        for name, value in outputs.items():
            place = self._replica.place_of(index, name)
            self._gradients.update(self._pending_gradients(name, value, place))
        return {
            (name, position): self._root(index, (name, position), leaf)
            for name, value in outputs.items()
            for position, leaf in _differentiable(value)
        }

    def _pending_gradients(
        self, name: str, value: Any, place: Place
    ) -> Mapping[TensorKey, PendingGradients]:
        return {
            (name, position): PendingGradients(place, leaf)
            for position, leaf in _differentiable(value)
        }

    def _root(
        self, index: int, key: TensorKey, tensor: torch.Tensor
    ) -> torch.Tensor | GradientEdge:
        if index in self._split:
            return get_gradient_edge(tensor)
        with on(self._replica.place_of(index, key[0])):
            return gradient_root(tensor, self._gradients[key])

    def _read(self, name: str, index: int) -> Any:
        """The value on the place of stage ``index``; its gradient is kept there until it is needed."""
        place, home = self._replica.place_of(index, name), self._places[name]
        if not self._cuts_graph:
            # The gradient of a caller's input goes to its own device at once.
            from_stage = name not in self._inputs
            return transfer(self._values[name], home, place, defer_gradients=from_stage)
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
        return unflatten(read, spec)

    def _hold(self, key: TensorKey, place: Place, gradient: torch.Tensor) -> None:
        """Keep a gradient where it was computed; that of a caller's input goes to its device at once."""
        name, _ = key
        if name in self._inputs:
            home = self._places[name]
            pending = self._gradients.setdefault(key, PendingGradients(home, gradient))
            pending.hold(home, transfer(gradient, place, home))
        else:
            self._gradients[key].hold(place, gradient)

    def _backward(self, index: int) -> None:
        """Run the stage's backward from the gradients that have been kept for its outputs.

        An output without a gradient is no root, so parameters that only it depends on get none, as in
        eager mode.
        """
        self.phase = "backward"
        roots_by_key = self._roots.pop(index, {})
        roots = [root for key, root in roots_by_key.items() if self._gradients[key]]
        del roots_by_key
        gradients: list[torch.Tensor] | None = [torch.empty_like(root) for root in roots]  # type: ignore[arg-type]
        if self.loss is not None and index == len(self._replica.staged.stages) - 1:
            roots, gradients = self._loss_root(), None
        if roots:
            with on(self._replica.places[index]):
                torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]

    def _backward_for_inputs(self, index: int) -> None:
        """The first half of a split backward: the gradients of the values that the stage received."""
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
            self._split_backwards[index] = SplitBackward(
                roots, gradients, self._received.pop(index, [])
            )
            self._split_backwards[index].run_inputs()

    def _loss_root(self) -> list[Any]:
        assert self.loss is not None
        loss = self.loss
        self.loss = loss.detach()  # without the scale, which may make it too large for 16 bits
        if not loss.requires_grad:
            return []
        with on(self._replica.output_place):
            return [loss if self._scale == 1.0 else loss * self._scale]

    def backward_inputs(self) -> None:
        """Continue the backward of the caller's graph from the gradients of the inputs."""
        for name, leaf in self._inputs.items():
            pending = self._gradients.pop((name, 0), None)
            if pending:
                with on(self._places[name]):
                    torch.autograd.backward(leaf, pending.add_to(None))


def _differentiable(value: Any) -> list[tuple[int, torch.Tensor]]:
    """The leaves of ``value`` that require gradients, each with its index among all leaves.

    There are none while gradients are disabled, although parameters still have ``requires_grad`` then.
    """
    if not torch.is_grad_enabled():
        return []
    return [
        (position, leaf)
        for position, leaf in enumerate(tree_leaves(value))
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
