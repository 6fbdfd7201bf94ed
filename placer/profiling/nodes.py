"""Measure the seconds of every node of a captured model, forward and backward, on a real device.

In forward, the nodes run one after the other between marks of a clock. In backward, hooks on autograd
nodes report whose backward begins; the time until the next one begins is attributed to it. Marks and
hooks take time themselves. So some steps of the captured graph and of the placed model run without them, and
the seconds of the nodes are scaled to add up to those of such a step.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx, nn

from placer.autograd_graph import nodes_behind, nodes_of
from placer.cost.record import NodeRunner, stand_in_loss
from placer.precision import precision_context
from placer.profiling.clocks import Clock, time_call
from placer.program import Program
from placer.simulation.optimizers import make_optimizer

LOSS = "loss"
Passes = tuple[dict[str, float], dict[str, float]]  # node -> seconds, forward and backward


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTimes:
    """Medians over the rounds, in seconds.

    ``forward`` and ``backward`` are per node, including the loss (`LOSS`). ``optimizer`` is the
    optimizer's step, ``step`` a whole step: forward, backward and the optimizer.
    """

    forward: Mapping[str, float]
    backward: Mapping[str, float]
    optimizer: float
    step: float


def measure_nodes(
    program: Program,
    model: nn.Module,
    leaves: Sequence[Tensor],
    *,
    device: torch.device,
    clock: Clock,
    precision: str = "fp32",
    training: bool = True,
    rounds: int = 5,
    warm: int = 2,
    placed_step: Callable[[], Any] | None = None,
    each_round: Callable[[int], None] = lambda _: None,
) -> NodeTimes:
    """Measure ``rounds`` steps of ``program``, after ``warm`` steps that are not counted.

    ``leaves`` are the input tensors; they and the weights of ``model`` are on ``device``. The steps
    train ``model`` by Adam with a learning rate of 0, so that only its buffers change. ``placed_step``
    runs forward and backward of the placed model; the seconds of the nodes are then scaled to its time.
    ``each_round`` is called with the number of every step that has ended.
    """
    constants = {name: t.to(device) for name, t in program.constants.items()}
    context = partial(precision_context, precision, device.type)
    trained = [p for p in model.parameters() if p.requires_grad] if training else []
    step = make_optimizer("adam", trained)
    for group in step.param_groups:
        group["lr"] = 0.0
    run = _Run(program, model, constants, context, clock)
    passes: list[Passes] = []
    whole: list[tuple[float, float, float]] = []
    placed: list[float] = []
    for number in range(warm + rounds):
        with torch.set_grad_enabled(training):
            found = run.with_marks(leaves)
            model.zero_grad()
            plain = run.plain(leaves, step)
            model.zero_grad()
        together = sum(plain[:2]) if placed_step is None else time_call(clock, placed_step)
        if number >= warm:
            passes.append(found)
            whole.append(plain)
            placed.append(together)
        each_round(number + 1)
    forward, backward, optimizer_seconds = (median(column) for column in zip(*whole, strict=True))
    optimizer_seconds = optimizer_seconds if trained else 0.0
    together = median(placed)
    share = together / ((forward + backward) or 1.0)
    return NodeTimes(
        forward=_scaled([p[0] for p in passes], share * forward),
        backward=_scaled([p[1] for p in passes], share * backward),
        optimizer=optimizer_seconds,
        step=together + optimizer_seconds,
    )


def _scaled(rounds: Sequence[Mapping[str, float]], total: float) -> dict[str, float]:
    """The median seconds of every node, scaled so that they add up to ``total``."""
    found = {name: median(r.get(name, 0.0) for r in rounds) for name in rounds[0]}
    scale = total / (sum(found.values()) or 1.0)
    return {name: seconds * scale for name, seconds in found.items()}


class _Run(NodeRunner):
    """Runs steps of a captured model, with or without marks between its nodes."""

    def __init__(
        self,
        program: Program,
        model: nn.Module,
        constants: Mapping[str, Tensor],
        context: Callable[[], AbstractContextManager[Any]],
        clock: Clock,
    ) -> None:
        super().__init__(program.graph, model, constants)
        self._program, self._context, self._clock = program, context, clock

    def with_marks(self, leaves: Sequence[Tensor]) -> Passes:
        """Seconds of every node of one step, forward and backward."""
        clock = self._clock
        marks: list[tuple[str, Any, Any]] = []
        backward = _BackwardMarks(clock)

        def between(name: str, run: Callable[[], Any]) -> Any:
            start = clock.mark()
            result = run()
            marks.append((name, start, clock.mark()))
            backward.claim(result, name)
            return result

        loss = self._forward(leaves, between)
        if loss.requires_grad:
            backward.run(loss)
        clock.wait()
        forward = {name: clock.seconds(start, end) for name, start, end in marks}
        return forward, backward.seconds(list(forward))

    def plain(
        self, leaves: Sequence[Tensor], step: torch.optim.Optimizer
    ) -> tuple[float, float, float]:
        """Seconds of forward with the loss, of backward, and of the optimizer's step."""
        clock = self._clock
        clock.wait()
        marks = [clock.mark()]
        loss = self._forward(leaves, lambda _, run: run())
        marks.append(clock.mark())
        if loss.requires_grad:
            loss.backward()
        marks.append(clock.mark())
        if loss.requires_grad:
            step.step()
        marks.append(clock.mark())
        clock.wait()
        first, second, third = (clock.seconds(a, b) for a, b in itertools.pairwise(marks))
        return first, second, third

    def _forward(
        self, leaves: Sequence[Tensor], between: Callable[[str, Callable[[], Any]], Any]
    ) -> Tensor:
        """Run all nodes, each through ``between(name, run)``. Returns a stand-in loss of the results."""
        self._between = between
        visible = self._program.call.result.visible(self.results(leaves))
        loss: Tensor = between(LOSS, partial(stand_in_loss, visible))
        return loss

    def run_operation(self, node: fx.Node) -> Any:
        with self._context():
            return self._between(node.name, partial(super().run_operation, node))


class _BackwardMarks:
    """Records when the backward of each node began."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._claimed: set[Any] = set()
        self._marks: list[tuple[str, Any]] = []
        self._hooks: list[Any] = []

    def claim(self, result: Any, name: str) -> None:
        """Attribute the autograd nodes behind ``result`` to ``name``, except those attributed before."""
        for node in nodes_behind(nodes_of(result), stops=self._claimed):
            self._claimed.add(node)
            self._hooks.append(node.register_prehook(partial(self._begin, name)))

    def _begin(self, name: str, _: Any) -> None:
        if not self._marks or self._marks[-1][0] != name:
            self._marks.append((name, self._clock.mark()))

    def run(self, loss: Tensor) -> None:
        """Run the backward of ``loss``."""
        loss.backward()
        self._marks.append(("", self._clock.mark()))
        for hook in self._hooks:  # parameters keep their autograd nodes, and so the hooks
            hook.remove()

    def seconds(self, names: Sequence[str]) -> dict[str, float]:
        """Seconds per node, from the beginning of its backward to that of the next node."""
        found: dict[str, float] = defaultdict(float, dict.fromkeys(names, 0.0))
        for (name, start), (_, end) in itertools.pairwise(self._marks):
            found[name] += self._clock.seconds(start, end)
        return dict(found)
