"""The law for stages that are split in space, with one process per shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import distributed_cases as cases
import pytest
from jobs import Job
from space_networks import INPUTS

import placer

SHAPES = [(1, 1, 2), (1, 1, 3), (2, 1, 2), (1, 2, 2)]  # stages, replicas, shards


@pytest.mark.matrix(1)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"pp{s[0]}dp{s[1]}sp{s[2]}")
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "InterleavedZeroBubble"])
@pytest.mark.parametrize("name", ["2D U-Net", "3D U-Net", "3D U-Net, batch norm"])
def test_three_steps_equal_the_plain_model(
    job_of: Callable[[int], Job], name: str, shape: tuple[int, int, int], schedule: str
) -> None:
    stages, replicas, shards = shape
    model, args, kwargs = cases.make_case(name, 8)
    spec = cases.make_spec(stages * shards, replicas, 2, space=shards, chunks=2)
    plan = placer.make_plan(model, spec, args, kwargs)
    assert (len(plan.stages), plan.shards) == (stages, shards)
    job = job_of(stages * replicas * shards)
    found = job.run(cases.check_equality, name, plan, (schedule,), (8, 5))
    assert [rank["stages"] for rank in found] == [
        (s,) for s in range(stages) for _ in range(shards)
    ] * replicas


def test_inputs_that_say_which_dims_are_space(job_of: Callable[[int], Job]) -> None:
    name = "volume, mask and coarse volume"
    model, args, kwargs = cases.make_case(name, 8)
    plan = placer.make_plan(model, cases.make_spec(3, 1, 2, space=3, inputs=INPUTS), args, kwargs)
    job_of(3).run(cases.check_equality, name, plan, ("GPipe",), (8,))


def test_a_padding_that_wraps_around(job_of: Callable[[int], Job]) -> None:
    """The first rank and the last are neighbours."""
    model, args, kwargs = cases.make_case("padding modes", 8)
    plan = placer.make_plan(model, cases.make_spec(3, 1, 1, space=3), args, kwargs)
    assert not any("Gathered" in note for note in plan.notes)
    job_of(3).run(cases.check_equality, "padding modes", plan, ("GPipe",), (8,))


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("volume, mask and coarse volume", {"stages": 2, "inputs": INPUTS}),
        ("3D U-Net", {"stages": 1, "microbatches": 2}),
        ("2D U-Net", {"stages": 1, "replicas": 2}),
    ],
)
def test_ranks_that_pass_their_own_boxes(
    job_of: Callable[[int], Job], name: str, fields: dict[str, Any]
) -> None:
    model, args, kwargs = cases.make_case(name, 4)
    stages, replicas, slices = (fields.pop(n, 1) for n in ("stages", "replicas", "microbatches"))
    spec = cases.make_spec(2 * stages, replicas, slices, space=2, **fields)
    plan = placer.make_plan(model, spec, args, kwargs)
    job_of(2 * stages * replicas).run(cases.check_boxes, name, plan, 4)


def test_what_is_no_box_of_the_rank_is_refused(job_of: Callable[[int], Job]) -> None:
    model, args, kwargs = cases.make_case("3D U-Net", 4)
    plan = placer.make_plan(model, cases.make_spec(2, 1, 1, space=2), args, kwargs)
    for rank, said in enumerate(job_of(2).run(cases.wrong_boxes, "3D U-Net", plan, 4)):
        part, mixed, target = said
        wanted = f"shard {rank} needs [:, :, {4 * rank}:{4 * rank + 4}, :, :] of [4, 1, 8, 8, 8]"
        assert wanted in part and "of shape [4, 1, 3, 8, 8]" in part
        assert (
            "inputs with gradients of a placer.Box: is ['x'] on rank 1, but [] on rank 0" in mixed
        )
        assert "part of a target" in target


def test_a_loss_over_the_whole_batch(job_of: Callable[[int], Job]) -> None:
    """Each shard of the first replica computes it, from the results of the same shard of the others."""
    model, args, kwargs = cases.make_case("2D U-Net", 8)
    spec = cases.make_spec(2, 2, 2, space=2, chunks=2)
    plan = placer.make_plan(model, spec, args, kwargs)
    job_of(4).run(cases.step_over_the_whole_batch, "2D U-Net", plan)


def test_what_is_sent_is_what_the_plan_says(job_of: Callable[[int], Job]) -> None:
    """Pieces of values and of gradients; in the middle of a grid no shard sends more."""
    model, args, kwargs = cases.make_case("3D U-Net", 8)
    spec = cases.make_spec(3, 1, 1, space=3)
    plan = placer.make_plan(model, spec, args, kwargs)
    found = job_of(3).run(cases.count_exchanged, "3D U-Net", plan)
    assert found[1] == plan.stages[0].exchanged_nbytes
