"""Sums the bytes of parameters, buffers and optimizer state, for stages and for units of a model.

A stage has a copy of each parameter and buffer that its nodes read. The first stage that reads a trained
parameter owns it: it receives the gradients of all copies and has the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placer.cost import CostTable, StateTensor
from placer.partition.rectangles import Rectangles, Table
from placer.partition.stage_cost.optimizer import OptimizerMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """Bytes of the state of all stages along an order, in tables like those of `IntervalTables`."""

    parameters: Table  # with their copies in half precision
    buffers: Table
    trained: Table  # gradients of the parameters that get one here
    owned: Table  # the trained parameters whose gradient and optimizer state are kept here
    kept_gradients: Table  # the gradients of those
    being_divided: Table  # gradients that are whole still, where ranks keep pieces of them
    updating: Table  # temporary tensors of Adam's loop over the parameters

    def kept(self, optimizer: OptimizerMemory | None) -> Table:
        """Bytes of parameters, buffers and optimizer state, which exist throughout the step.

        Without ``optimizer``: of a replica other than the first, which has no optimizer state.
        """
        copies = self.parameters + self.buffers
        return copies if optimizer is None else copies + optimizer.state * self.owned

    def while_updating(self, optimizer: OptimizerMemory) -> Table:
        """Bytes during the optimizer's step: the state, all gradients, and what the step allocates."""
        made = optimizer.together * self.kept_gradients + optimizer.each * self.updating
        return self.kept(optimizer) + self.kept_gradients + made


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRectangles:
    """Bytes of parameters and buffers along an order.

    ``sent_home`` are gradients received from the copies of parameters on later stages, ``casts`` copies of
    parameters in half precision that all micro-batches read. ``trained_at`` lists
    (position of the first use, bytes of the gradient) of each trained parameter, in the order of
    `CostTable.state`.
    """

    parameters: Rectangles
    buffers: Rectangles
    trained: Rectangles
    owned: Rectangles
    kept_gradients: Rectangles
    sent_home: Rectangles
    casts: Rectangles
    trained_at: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitState:
    """Bytes of parameters, buffers and optimizer state of each unit of a model."""

    # What the unit is the first to read, and the optimizer state of what only it reads
    static: Table
    gradients: Table  # of the parameters that no other unit reads


def state_rectangles(costs: CostTable, place: NDArray[np.int64]) -> StateRectangles:
    """The state of stages along an order; ``place`` maps each node to its position."""
    parameters, buffers, trained, owned, kept_gradients, sent_home = (
        Rectangles() for _ in range(6)
    )
    trained_at: list[tuple[int, int]] = []
    for tensor, uses in _uses(costs, place):
        copies = buffers if tensor.is_buffer else parameters
        if not uses:  # the first stage has it
            copies.add(0, 0, 0, tensor.nbytes)
            continue
        copies.add_if_any_inside(uses, tensor.nbytes)
        if tensor.trained:
            gradient = tensor.gradient_nbytes
            trained_at.append((uses[0], gradient))
            trained.add_if_any_inside(uses, gradient)
            owned.add(0, uses[0], uses[0], tensor.nbytes)
            kept_gradients.add(0, uses[0], uses[0], gradient)
            # A later stage's copy sends its gradient before this stage's backward.
            sent_home.add(0, uses[0], uses[0], gradient, until=uses[-1])
    casts = Rectangles()
    for node, cost in enumerate(costs.nodes):
        if cost.cast_nbytes:
            casts.add_if_any_inside([int(place[node])], cost.cast_nbytes)
    return StateRectangles(
        parameters=parameters,
        buffers=buffers,
        trained=trained,
        owned=owned,
        kept_gradients=kept_gradients,
        sent_home=sent_home,
        casts=casts,
        trained_at=tuple(trained_at),
    )


def unit_state(
    costs: CostTable, unit_of: NDArray[np.int64], count: int, optimizer: OptimizerMemory
) -> UnitState:
    """The state of ``count`` units of a model; ``unit_of`` has the unit of each node.

    If several units read a parameter, its optimizer state may be on the device of any of them, so it is
    counted for none. Takes O(uses of parameters and buffers) time.
    """
    static, gradients = np.zeros(count), np.zeros(count)
    for tensor, units in _uses(costs, unit_of):
        if units:
            static[units[0]] += tensor.nbytes
        if tensor.trained and len(units) == 1:
            static[units[0]] += optimizer.state * tensor.nbytes
            gradients[units[0]] += tensor.gradient_nbytes
    for node, cost in enumerate(costs.nodes[: len(unit_of)]):
        static[unit_of[node]] += cost.cast_nbytes
    return UnitState(static=static, gradients=gradients)


def _uses(costs: CostTable, place: NDArray[np.int64]) -> Iterator[tuple[StateTensor, list[int]]]:
    """Every parameter and buffer with the distinct positions (or units) of its readers, ascending."""
    for tensor in costs.state:
        yield tensor, sorted({int(place[node]) for node in tensor.readers})
