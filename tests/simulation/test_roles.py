"""Ranks with the same role have the same timeline, so one of them is run for all."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import placer
from placer.planner.build import build_plan
from placer.program import lower
from placer.simulation import ranks
from placer.simulation.roles import Role
from placer.simulation.simulate import dry_run
from placer.simulation.usage import DeviceTimeline

X = torch.empty(8, 16, device="meta")
STAGES = 6


def chain(change: Callable[[nn.Sequential], object] = lambda layers: None) -> nn.Module:
    """A layer for each of six stages, of which the first and the last always differ from the others."""
    with torch.device("meta"):
        layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1)) for _ in range(STAGES))
        )
    change(layers)
    return layers


def plan_for(model: nn.Module, device: str = "cpu", **fields: Any) -> tuple[Any, placer.Plan]:
    names = [f"{device}:{i}" for i in range(STAGES)]
    layers = {str(i): name for i, name in enumerate(names)}
    program = lower(model, (X,))
    spec = placer.load_spec({"devices": names, "layers": layers, **fields})
    return program, build_plan(program, spec, [X], processes=True)


def run(program: Any, plan: placer.Plan) -> tuple[list[DeviceTimeline], int]:
    """The timeline of every rank, and the number of ranks that were run."""
    made: list[int] = []
    run_rank = ranks._FakeReplica.run_rank

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return run_rank(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks._FakeReplica, "run_rank", counted)
        found = dry_run(program, plan, [X], processes=True).found
    return list(found), len(made)


def of_every_rank(program: Any, plan: placer.Plan) -> list[DeviceTimeline]:
    numbers = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "find_role", lambda *_: Role(key=next(numbers), names=()))
        found, ran = run(program, plan)
    assert ran == STAGES
    return found


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("fields", "roles"),
    [
        ({"microbatches": 2}, 3),
        # One of the middle stages has three micro-batches in flight, the next one two.
        ({"microbatches": 3, "schedule": "1F1B"}, 5),
        ({"microbatches": 2, "schedule": "InterleavedZeroBubble", "device": "cuda"}, 4),
        ({"microbatches": 2, "replicas": 2, "checkpoint": ["*"], "offload": ["*"]}, 3),
        ({"training": False, "device": "cuda"}, 3),
    ],
)
def test_the_timeline_of_a_role_is_that_of_each_of_its_ranks(
    fields: dict[str, Any], roles: int
) -> None:
    """Also the names of nodes and layers in it, block by block and event by event."""
    program, plan = plan_for(chain(), **fields)
    made, ran = run(program, plan)
    assert ran == roles
    for found, expected in zip(made, of_every_rank(program, plan), strict=True):
        assert tuple(found.timeline.blocks) == tuple(expected.timeline.blocks)
        assert tuple(found.timeline.events) == tuple(expected.timeline.events)


def _tie(layers: nn.Sequential) -> None:
    layers[3][0].weight = layers[2][0].weight


def _freeze(layers: nn.Sequential) -> None:
    layers[2][0].weight.requires_grad_(False)


def _let_pass(layers: nn.Sequential) -> None:
    layers[2][1].p = 0.0


def _widen(layers: nn.Sequential) -> None:
    with torch.device("meta"):
        layers[2][0], layers[3][0] = nn.Linear(16, 32), nn.Linear(32, 16)


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("change", "roles"), [(_tie, 5), (_freeze, 4), (_let_pass, 4), (_widen, 5)]
)
def test_ranks_of_other_roles_are_run(
    change: Callable[[nn.Sequential], object], roles: int
) -> None:
    program, plan = plan_for(chain(change))
    made, ran = run(program, plan)
    assert ran == roles
    for found, expected in zip(made, of_every_rank(program, plan), strict=True):
        assert tuple(found.timeline.blocks) == tuple(expected.timeline.blocks)
        assert tuple(found.timeline.events) == tuple(expected.timeline.events)
