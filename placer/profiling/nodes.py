"""Measure the seconds of every node of a captured model, forward and backward, on a real device.

In forward, the nodes run one after the other between marks of a clock. In backward, hooks on autograd
nodes report whose backward begins; the time until the next one begins is attributed to it. Marks and
hooks take time themselves. So some steps of the captured graph and of the placed model run without them, and
the seconds of the nodes are scaled to add up to those of such a step.

A GPU has two times per node: that of its kernels, and that of the host to launch them. A step takes the
longer of the two sums, and which one that is depends on how a plan divides the model. So they are measured
apart, with the device kept busy while the host launches a node.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx, nn

from placer.autograd_graph import nodes_behind, nodes_of
from placer.cost.loss import ASSUMED
from placer.cost.record import NodeRunner
from placer.precision import precision_context
from placer.profiling.clocks import Clock, Took, time_call
from placer.program import Program, read_state, rows_of
from placer.simulation.optimizers import make_optimizer

LOSS = "loss"
_AHEAD = 5e-3  # seconds that the host has for the launch of a node that it has not launched yet
_MARGIN = 1.5  # for the next launch, relative to the last
_LEAST = 100e-6
Table = dict[str, float]  # node -> seconds


# Of the device forward and backward, and of the host to launch both (0 on a CPU)
_Passes = tuple[Table, Table, Table, Table]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTimes:
    """Medians over the rounds, in seconds.

    ``forward`` and ``backward`` are per node, including the loss (`LOSS`). So are ``forward_launch`` and
    ``backward_launch``, the seconds in which the host launches the node's kernels; empty for a CPU.
    ``optimizer`` is the optimizer's step, ``step`` a whole step: forward, backward and the optimizer.
    """

    forward: Mapping[str, float]
    backward: Mapping[str, float]
    optimizer: float
    step: float
    forward_launch: Mapping[str, float] = field(default_factory=dict)
    backward_launch: Mapping[str, float] = field(default_factory=dict)


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
    constants = {name: t.to(device) for name, t in program.captured.constants.items()}
    context = partial(precision_context, precision, device.type)
    trained = [p for p in model.parameters() if p.requires_grad] if training else []
    step = make_optimizer("adam", trained)
    for group in step.param_groups:
        group["lr"] = 0.0
    state = read_state(
        program.captured, rows_of(program.call.batch_dims, [x.shape for x in leaves])
    )
    leaves = [*leaves, *(x.to(device) if isinstance(x, Tensor) else x for x in state)]
    run = _Run(program, model, constants, context, clock, device)
    passes: list[_Passes] = []
    whole: list[tuple[Took, Took, Took]] = []
    placed: list[Took] = []
    for number in range(warm + rounds):
        with torch.set_grad_enabled(training):
            found = run.with_marks(leaves)
            model.zero_grad()
            plain = run.plain(leaves, step)
            model.zero_grad()
        if placed_step is None:
            together = Took(*map(sum, zip(*plain[:2], strict=True)))
        else:
            together = time_call(clock, placed_step)
        if number >= warm:
            passes.append(found)
            whole.append(plain)
            placed.append(together)
        each_round(number + 1)
    tables = [_medians(column) for column in zip(*passes, strict=True)]
    together = Took(*map(median, zip(*placed, strict=True)))
    forward, backward, optimizer_seconds = (
        median(took.device for took in column) for column in zip(*whole, strict=True)
    )
    optimizer_seconds = optimizer_seconds if trained else 0.0
    if together.host:
        shares = _shares(tables, together)
    else:
        share = together.device / ((forward + backward) or 1.0)
        shares = [
            share * seconds / (sum(table.values()) or 1.0)
            for table, seconds in zip(tables, (forward, backward, 0.0, 0.0), strict=True)
        ]
    scaled = [
        {name: seconds * share for name, seconds in table.items()}
        for table, share in zip(tables, shares, strict=True)
    ]
    return NodeTimes(
        forward=scaled[0],
        backward=scaled[1],
        optimizer=optimizer_seconds,
        step=together.device + optimizer_seconds,
        forward_launch=scaled[2] if together.host else {},
        backward_launch=scaled[3] if together.host else {},
    )


def _medians(rounds: Sequence[Table]) -> Table:
    """The median seconds of every node."""
    return {name: median(r.get(name, 0.0) for r in rounds) for name in rounds[0]}


def _shares(tables: Sequence[Table], together: Took) -> list[float]:
    """What the tables of an asynchronous device are scaled by, so that the longer sum is that of a step.

    ``together`` are the seconds of a step, and of the host until it had launched it. Marks make both sums
    too large. The host's seconds can also be too large in ``together``: they are those of the device if the
    host had to wait for a place in its queue.
    """
    forward, backward, forward_launch, backward_launch = (sum(t.values()) for t in tables)
    device, host = forward + backward, forward_launch + backward_launch
    of_host = min(1.0, together.host / host) if host else 1.0
    with_measured_memory = together.device / device if device else 1.0
    if device < host * of_host:  # the device waits in a step, nobody knows how long
        with_measured_memory = min(1.0, with_measured_memory)
    return [with_measured_memory, with_measured_memory, of_host, of_host]


class _Run(NodeRunner):
    """Runs steps of a captured model, with or without marks between its nodes."""

    def __init__(
        self,
        program: Program,
        model: nn.Module,
        constants: Mapping[str, Tensor],
        context: Callable[[], AbstractContextManager[Any]],
        clock: Clock,
        device: torch.device,
    ) -> None:
        super().__init__(program.graph, model, constants)
        self._program, self._context, self._clock, self._device = program, context, clock, device
        # Seconds in which the host launched each node in the last step, forward and backward
        self._launched: tuple[Table, Table] = ({}, {})

    def with_marks(self, leaves: Sequence[Tensor]) -> _Passes:
        """Seconds of every node of one step, forward and backward."""
        clock = self._clock
        marks: list[tuple[str, Any, Any]] = []
        backward = _BackwardMarks(clock, self._launched[1])

        def between(name: str, run: Callable[[], Any]) -> Any:
            _, start = clock.begin(_ahead(self._launched[0], name))
            result = run()
            marks.append((name, start, clock.mark()))
            backward.claim(result, name)
            return result

        loss = self._forward(leaves, between)
        if loss.requires_grad:
            backward.run(loss)
        clock.wait()
        forward = {name: clock.seconds(start, end) for name, start, end in marks}
        launched = {name: clock.launching(start, end) for name, start, end in marks}
        names = list(forward)
        self._launched = (launched, backward.sums(clock.launching, names))
        return forward, backward.sums(clock.seconds, names), *self._launched

    def plain(
        self, leaves: Sequence[Tensor], step: torch.optim.Optimizer
    ) -> tuple[Took, Took, Took]:
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
        first, second, third = (
            Took(clock.seconds(a, b), clock.launching(a, b)) for a, b in itertools.pairwise(marks)
        )
        return first, second, third

    def _forward(
        self, leaves: Sequence[Tensor], between: Callable[[str, Callable[[], Any]], Any]
    ) -> Tensor:
        """Run all nodes, each through ``between(name, run)``. Returns the loss that plans assume."""
        self._between = between
        visible = self._program.call.result.visible(self.results(leaves))
        loss: Tensor = between(LOSS, partial(ASSUMED, visible))
        return loss

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        # The devices are those of the recording: the CPU's.
        values = super().fetch_args_kwargs_from_env(n)
        return fx.node.map_aggregate(
            values, lambda x: self._device if isinstance(x, torch.device) else x
        )

    def run_operation(self, node: fx.Node) -> Any:
        with self._context():
            return self._between(node.name, partial(super().run_operation, node))


def _ahead(launched: Mapping[str, float], name: str) -> float:
    """Seconds that the host needs to launch the node, with a margin."""
    return max(_LEAST, _MARGIN * launched[name]) if name in launched else _AHEAD


class _BackwardMarks:
    """Records when the backward of each node began and ended.

    ``launched`` has the seconds in which the host launched it in an earlier step.
    """

    def __init__(self, clock: Clock, launched: Mapping[str, float]) -> None:
        self._clock, self._launched = clock, launched
        self._claimed: set[Any] = set()
        self._marks: list[tuple[str, Any, Any]] = []  # name, start, end
        self._running: tuple[str, Any] | None = None  # name, start
        self._hooks: list[Any] = []

    def claim(self, result: Any, name: str) -> None:
        """Attribute the autograd nodes behind ``result`` to ``name``, except those attributed before."""
        for node in nodes_behind(nodes_of(result), stops=self._claimed):
            self._claimed.add(node)
            self._hooks.append(node.register_prehook(partial(self._begin, name)))

    def _begin(self, name: str, _: Any) -> None:
        if self._running is None or self._running[0] != name:
            end, start = self._clock.begin(_ahead(self._launched, name))
            self._end(end)
            self._running = name, start

    def _end(self, mark: Any) -> None:
        if self._running is not None:
            self._marks.append((*self._running, mark))

    def run(self, loss: Tensor) -> None:
        """Run the backward of ``loss``."""
        loss.backward()
        self._end(self._clock.mark())
        for hook in self._hooks:  # parameters keep their autograd nodes, and so the hooks
            hook.remove()

    def sums(self, between: Callable[[Any, Any], float], names: Sequence[str]) -> Table:
        """What ``between`` says of two marks, summed over the backward of each node."""
        found: dict[str, float] = defaultdict(float, dict.fromkeys(names, 0.0))
        for name, start, end in self._marks:
            found[name] += between(start, end)
        return dict(found)
