"""Units without edges ("isolated units"), and a lattice of the other units."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from placer.partition.solver.lattice import Lattice, build_lattice
from placer.partition.solver.problem import PartitionProblem, StageSlot, Vector


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IsolatedUnit:
    """A unit without edges: it may go to any stage, and is left out of the downsets.

    A stage pays at least the smaller of what it costs to have the unit, and not to have it: its
    seconds and the values that others of their units share, or the values that units here share.
    """

    unit: int  # of the problem
    values: tuple[tuple[int, ...], ...]  # the other units of each value, by position
    nbytes: Vector

    @property
    def shared(self) -> tuple[int, ...]:
        """All units that it shares a value with."""
        return tuple(sorted({u for units in self.values for u in units}))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartialLattice(Lattice):
    """A lattice of all units but the isolated ones.

    A value that an isolated unit shares is in ``isolated``. After the first ``num_paid`` values there is one
    per isolated unit: a boundary that parts the units it shares values with costs its cheapest at least,
    of which ``value_nbytes`` has what is not counted with the units of a side (`least_alone`).
    """

    num_paid: int
    isolated: tuple[IsolatedUnit, ...]


def isolated_units(problem: PartitionProblem) -> list[int]:
    """Units without edges that share values with others."""
    tied = {u for edge in problem.edges for u in edge} | {*problem.pins} | problem.auxiliary
    tied |= {u for value in problem.values if value.external for u in value.units}
    free = {u for v in problem.values if len(v.units) > 1 for u in v.units} - tied
    return sorted(free) if len(free) < problem.num_units else []


def without_units(
    problem: PartitionProblem, units: Collection[int]
) -> tuple[PartitionProblem, NDArray[np.int64]]:
    """The problem without ``units``, which have no edges, and each unit's number in it (-1: left out)."""
    kept = [u for u in range(problem.num_units) if u not in units]
    number = np.full(problem.num_units, -1, dtype=np.int64)
    number[kept] = np.arange(len(kept))
    values = []
    for value in problem.values:
        sharing = tuple(int(number[u]) for u in value.units if number[u] >= 0)
        if sharing and (value.external or len(sharing) > 1):
            values.append(replace(value, units=sharing))
    slots = tuple(
        replace(slot, seconds=slot.seconds[kept], nbytes=slot.nbytes[kept])
        for slot in problem.slots
    )
    return PartitionProblem(
        num_units=len(kept),
        edges=tuple((int(number[a]), int(number[b])) for a, b in problem.edges),
        values=tuple(values),
        slots=slots,
        pins={int(number[u]): device for u, device in problem.pins.items()},
        auxiliary=frozenset(int(number[u]) for u in problem.auxiliary),
    ), number


def build_partial_lattice(problem: PartitionProblem, order: Sequence[int]) -> PartialLattice:
    """The lattice of ``problem`` along ``order``, a topological order of all but its isolated units."""
    loose = set(range(problem.num_units)) - set(order)
    own = tuple(value for value in problem.values if loose.isdisjoint(value.units))
    plain = build_lattice(replace(problem, values=own), order)
    place = np.full(problem.num_units, -1, dtype=np.int64)
    place[plain.order] = np.arange(plain.num_units)
    isolated = _isolated(problem, place)
    values_of = [list(values) for values in plain.values_of]
    for e, f in enumerate(isolated, len(plain.values)):
        for u in f.shared:
            values_of[u].append(e)
    rest = [_rest_of_cheapest(f, problem.slots) for f in isolated]
    return PartialLattice(
        problem=problem,
        order=plain.order,
        preds=plain.preds,
        succs=plain.succs,
        values=(*plain.values, *(f.shared for f in isolated)),
        value_nbytes=np.array([*plain.value_nbytes, *rest]),
        values_of=tuple(map(tuple, values_of)),
        external=plain.external,
        external_nbytes=plain.external_nbytes,
        standalone=plain.standalone,
        num_paid=len(plain.values),
        isolated=isolated,
    )


def least_alone(isolated: IsolatedUnit, slots: Sequence[StageSlot]) -> float:
    """The least seconds that ``isolated`` costs ``slots`` if one has units that it shares values with.

    It is on one of them, or elsewhere, and its cheapest value crosses.
    """
    factor = min(slot.seconds_per_byte for slot in slots)
    cheapest = factor * float(isolated.nbytes.min())
    return min(*(float(slot.seconds[isolated.unit]) for slot in slots), cheapest)


def _rest_of_cheapest(isolated: IsolatedUnit, slots: Sequence[StageSlot]) -> float:
    """The bytes of its cheapest value that `least_alone` counts on neither side of any boundary."""
    cheapest = rest = float(isolated.nbytes.min())
    for q in range(1, len(slots)):
        for side in (slots[:q], slots[q:]):
            factor = min(slot.seconds_per_byte for slot in side)
            left = cheapest - least_alone(isolated, side) / factor if factor else 0.0
            rest = min(rest, left)
    return rest


def _isolated(problem: PartitionProblem, place: NDArray[np.int64]) -> tuple[IsolatedUnit, ...]:
    """The isolated units that share values with units of the lattice and no other isolated unit.

    Of what several isolated units share nothing is certain, and nothing is paid.
    """
    shared: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    for value in problem.values:
        units = tuple(sorted({int(place[u]) for u in value.units} - {-1}))
        isolated = [u for u in value.units if place[u] < 0]
        if units and len(isolated) == 1:
            shared.setdefault(isolated[0], []).append((units, value.nbytes))
    return tuple(
        IsolatedUnit(
            unit=u,
            values=tuple(units for units, _ in shared[u]),
            nbytes=np.array([nbytes for _, nbytes in shared[u]]),
        )
        for u in sorted(shared)
    )
