"""Cuts and windows are integers: every position has one owner, and every shard gets what it reads."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placer.space.layout import Cuts, Layout, Window, even_grid, is_empty, meet, sizes

grids = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@given(grids, st.data())
def test_parts_cover_a_value_once(grid: list[int], data: st.DataObject) -> None:
    lengths = tuple(data.draw(st.integers(parts, 9)) for parts in grid)
    cuts = Cuts(tuple(grid), lengths)
    shape = (2, 3, *(data.draw(st.integers(1, 9)) for _ in grid))
    layout = Layout(cuts, shape, tuple(range(2, 2 + len(grid))))
    assert sum(math.prod(sizes(box)) for box in layout.boxes) == math.prod(shape)
    for a, b in itertools.combinations(layout.boxes, 2):
        assert is_empty(meet(a, b))


@given(st.integers(1, 8), st.integers(8, 40), st.integers(1, 40))
def test_cuts_depend_on_the_length_alone_and_are_even(parts: int, whole: int, length: int) -> None:
    bounds = Cuts((parts,), (whole,)).bounds(0, length)
    assert bounds[0] == 0 and bounds[-1] == length and sorted(bounds) == list(bounds)
    found = [b - a for a, b in itertools.pairwise(Cuts((parts,), (whole,)).bounds(0, whole))]
    assert max(found) - min(found) <= 1


@given(st.integers(1, 5), st.integers(5, 12), st.data())
def test_pieces_are_what_a_shard_reads_of_others(
    parts: int, length: int, data: st.DataObject
) -> None:
    layout = Layout(Cuts((parts,), (length,)), (1, 1, length), (2,))
    needed = []
    for own in layout.boxes:
        first = data.draw(st.integers(-3, own[2][0]))
        end = data.draw(st.integers(own[2][1], length + 3))
        needed.append((*own[:2], (first, end)))
    window = Window(layout, tuple(needed))
    for shard, box in enumerate(needed):
        inside = set(range(max(0, box[2][0]), min(length, box[2][1])))
        own = set(range(*layout.boxes[shard][2]))
        got = [
            set(range(*piece[2])) for (_, target), piece in window.pieces.items() if target == shard
        ]
        assert set().union(own, *got) >= inside
        assert sum(map(len, got)) == len(inside - own)
    assert window.is_local == (not window.pieces and tuple(needed) == layout.boxes)


@pytest.mark.parametrize(
    ("shards", "lengths", "grid"),
    [
        (8, (64, 64, 64), (2, 2, 2)),
        (4, (64, 64, 64), (2, 2, 1)),
        (3, (64, 64, 64), (3, 1, 1)),
        (4, (9, 256), (1, 4)),
        (6, (64, 64), (3, 2)),
    ],
)
def test_a_grid_has_the_least_faces(
    shards: int, lengths: tuple[int, ...], grid: tuple[int, ...]
) -> None:
    assert even_grid(shards, lengths) == grid
