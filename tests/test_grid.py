"""The numbering of ranks."""

from __future__ import annotations

import itertools

import pytest
import torch

from placer.grid import AXES, Axis, Coordinates, Grid

GRIDS = [
    Grid(),
    Grid(replicas=3),
    Grid(replicas=2, devices=3),
    Grid(replicas=2, devices=2, shards=4),
    Grid(replicas=2, devices=3, shards=2, order=("pp", "sp", "dp")),
]


@pytest.mark.parametrize("grid", GRIDS)
def test_ranks_and_coordinates_are_inverse(grid: Grid) -> None:
    found = [grid.coordinates(rank) for rank in range(grid.size)]
    assert len(set(found)) == grid.size == grid.replicas * grid.devices * grid.shards
    assert [grid.rank(**at._asdict()) for at in found] == list(range(grid.size))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("axes", [x for n in range(4) for x in itertools.combinations(AXES, n)])
def test_groups_are_those_of_a_device_mesh(grid: Grid, axes: tuple[Axis, ...]) -> None:
    """As ``DeviceMesh`` makes them: the mesh with the other axes in front, and a row for each group."""
    mesh = torch.arange(grid.size).view(grid.shape)
    inside = [grid.order.index(axis) for axis in grid.order if axis in axes]
    outside = [i for i in range(3) if i not in inside]
    count = grid.size
    for i in inside:
        count //= grid.shape[i]
    rows = mesh.permute(*outside, *inside).reshape(count, -1).tolist()
    assert grid.groups(*axes) == sorted(tuple(sorted(row)) for row in rows)
    for group in grid.groups(*axes):
        assert all(grid.group(rank, *axes) == group for rank in group)


def test_the_numbering_of_a_job() -> None:
    grid = Grid(replicas=2, devices=3)
    assert grid.coordinates(4) == Coordinates(dp=1, pp=1)
    assert grid.ranks_of([0, 2]) == (0, 2, 3, 5)
    assert grid.groups("dp", "pp", size=4) == [(0, 1, 2, 3), (4, 5)]
    with pytest.raises(ValueError, match=r"rank 6 is not in 0 … 5"):
        grid.coordinates(6)
