"""The numbering of ranks."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from placer.grid import AXES, Axis, Coordinates, Grid

GRIDS = [
    Grid(),
    Grid(replicas=3),
    Grid(replicas=2, devices=3),
    Grid(replicas=2, devices=2, shards=4),
    Grid(replicas=2, devices=3, shards=2),
    Grid(replicas=2, devices=3, shards=2, node_layout="replicas"),
    Grid(replicas=4, devices=3, node_layout="replicas"),
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
    shape = grid.replicas, grid.devices, grid.shards
    inside = [i for i, axis in enumerate(AXES) if axis in axes]
    outside = [i for i in range(3) if i not in inside]
    count = math.prod(shape[i] for i in outside)
    if grid.node_layout == "stages":
        mesh = torch.arange(grid.size).view(shape)
    else:
        mesh = torch.arange(grid.size).view(shape[1], shape[0], shape[2]).transpose(0, 1)
    rows = mesh.permute(*outside, *inside).reshape(count, -1).tolist()
    assert grid.groups(*axes) == sorted(tuple(sorted(row)) for row in rows)


def test_the_numbering_of_a_job() -> None:
    grid = Grid(replicas=2, devices=3)
    assert grid.coordinates(4) == Coordinates(dp=1, pp=1)
    assert grid.ranks_of([0, 2]) == (0, 2, 3, 5)
    with pytest.raises(ValueError, match=r"rank 6 is not in 0 … 5"):
        grid.coordinates(6)


def test_where_copies_of_a_stage_are() -> None:
    for layout, found, stride in (("stages", (1, 4), 3), ("replicas", (2, 3), 1)):
        grid = Grid(replicas=2, devices=3, node_layout=layout)  # type: ignore[arg-type]
        assert grid.ranks_of([1]) == found
        assert grid.stride == stride == found[1] - found[0]
