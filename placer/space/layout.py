"""Which part of a value each shard has, and which pieces of others it needs. Integers only, no tensors.

A grid of shards cuts some dimensions of the model's inputs. The cuts of a dimension of any other length
follow from the same fractions, so they depend on the length alone: two values of one length have the same
cuts, whatever happened between, and joins (skip connections) never move data.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

Span: TypeAlias = tuple[int, int]
"""The positions ``[first, end)`` of one dimension."""
Box: TypeAlias = tuple[Span, ...]
"""A span per dimension of a tensor."""


@dataclass(frozen=True)
class Cuts:
    """How a grid of ``shape`` cuts values: ``lengths`` are those of the inputs, one per axis of the grid.

    >>> Cuts(shape=(4,), lengths=(10,)).bounds(0, 10)
    (0, 2, 5, 7, 10)
    """

    shape: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def shards(self) -> int:
        """The number of shards."""
        return math.prod(self.shape)

    @property
    def middle(self) -> int:
        """A shard in the middle of the grid, which has the most neighbours."""
        found = 0
        for parts in self.shape:
            found = found * parts + parts // 2
        return found

    @cached_property
    def coordinates(self) -> tuple[tuple[int, ...], ...]:
        """Where each shard is in the grid; the last axis is the inner one."""
        return tuple(itertools.product(*map(range, self.shape)))

    def bounds(self, axis: int, length: int) -> tuple[int, ...]:
        """Where a dimension of ``length`` is cut: the end of each part, after a 0. Parts may be empty."""
        parts, whole = self.shape[axis], self.lengths[axis]
        even = (whole * i // parts for i in range(parts + 1))
        return tuple((2 * end * length + whole) // (2 * whole) for end in even)


@dataclass(frozen=True)
class Layout:
    """A value of ``shape`` in parts: axis ``k`` of the grid cuts its dimension ``dims[k]``."""

    cuts: Cuts
    shape: tuple[int, ...]
    dims: tuple[int, ...]

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """The part of each shard."""
        found = []
        for at in self.cuts.coordinates:
            box = [(0, length) for length in self.shape]
            for axis, dim in enumerate(self.dims):
                bounds = self.cuts.bounds(axis, self.shape[dim])
                box[dim] = bounds[at[axis]], bounds[at[axis] + 1]
            found.append(tuple(box))
        return tuple(found)

    def shape_of(self, box: Box, like: Sequence[int]) -> tuple[int, ...]:
        """The shape of the part ``box``; other dimensions are those of a tensor of the shape ``like``.

        The number of rows may be another one in every call.
        """
        found = list(like)
        for dim in self.dims:
            found[dim] = max(0, box[dim][1] - box[dim][0])
        return tuple(found)

    @property
    def whole(self) -> Box:
        """The box of the whole value."""
        return tuple((0, length) for length in self.shape)

    @property
    def can_be_cut(self) -> bool:
        """Is every cut dimension at least as long as there are parts?"""
        lengths = (self.shape[dim] for dim in self.dims)
        return all(n >= parts for n, parts in zip(lengths, self.cuts.shape, strict=True))


@dataclass(frozen=True)
class Window:
    """The box of a value that each shard needs, of which it has its own part.

    Positions below 0 or beyond the value's length belong to no shard: they are padding. Dimensions that
    ``wraps`` names go on with the other end of the value instead.
    """

    layout: Layout
    needed: tuple[Box, ...]
    wraps: tuple[int, ...] = ()

    @cached_property
    def pieces(self) -> dict[tuple[int, int], Box]:
        """``(from, to)`` -> what a shard gets of another one. No piece is empty."""
        return {key: found[0] for key, found in self._found.items() if key[0] != key[1]}

    @cached_property
    def images(self) -> dict[tuple[int, int], Box]:
        """``(from, to)`` -> where what a shard gets is in the box that it needs."""
        return {key: found[1] for key, found in self._found.items() if key[0] != key[1]}

    @property
    def is_simple(self) -> bool:
        """Does every shard get at most one piece of each other one, and none of its own other end?"""
        return all(
            len(found) == 2 and (source != target or found[0] == found[1])
            for (source, target), found in self._found.items()
        )

    @cached_property
    def _found(self) -> dict[tuple[int, int], tuple[Box, ...]]:
        """``(from, to)`` -> for each piece, where it is in the value, and where in the box."""
        found: dict[tuple[int, int], tuple[Box, ...]] = {}
        lengths = self.layout.shape
        turns = [(0, -n, n) if d in self.wraps else (0,) for d, n in enumerate(lengths)]
        for target, box in enumerate(self.needed):
            for source, own in enumerate(self.layout.boxes):
                for by in itertools.product(*turns):
                    at = meet(_moved(own, by) if any(by) else own, box)
                    if not is_empty(at):
                        here = _moved(at, [-n for n in by])
                        found[source, target] = (*found.get((source, target), ()), here, at)
        return found

    @property
    def is_local(self) -> bool:
        """Does every shard need just its own part?"""
        return self.needed == self.layout.boxes


def meet(a: Box, b: Box) -> Box:
    """The box that is in both; it may be empty."""
    return tuple((max(i, k), min(j, n)) for (i, j), (k, n) in zip(a, b, strict=True))


def _moved(box: Box, by: Sequence[int]) -> Box:
    return tuple((first + n, end + n) for (first, end), n in zip(box, by, strict=True))


def sizes(box: Box) -> tuple[int, ...]:
    """The length of each span."""
    return tuple(max(0, end - first) for first, end in box)


def is_empty(box: Box) -> bool:
    """Has it no position?"""
    return any(first >= end for first, end in box)


def even_grid(shards: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """The grid of ``shards`` over dimensions of ``lengths`` that has the least faces between parts.

    The planes next to a cut are what neighbours exchange. Among equal grids the first dimensions are cut,
    because their planes are contiguous.

    >>> even_grid(8, (64, 64, 64)), even_grid(2, (64, 64, 64)), even_grid(4, (256, 16, 16))
    ((2, 2, 2), (2, 1, 1), (4, 1, 1))
    """

    def faces(grid: tuple[int, ...]) -> float:
        return sum((parts - 1) / length for parts, length in zip(grid, lengths, strict=True))

    options = _factorizations(shards, len(lengths))
    return min(options, key=lambda grid: (faces(grid), tuple(-parts for parts in grid)))


def _factorizations(number: int, count: int) -> list[tuple[int, ...]]:
    """All ways to write ``number`` as a product of ``count`` factors."""
    if count == 1:
        return [(number,)]
    return [
        (first, *rest)
        for first in range(1, number + 1)
        if number % first == 0
        for rest in _factorizations(number // first, count - 1)
    ]
