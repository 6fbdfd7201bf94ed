"""The law under one process per device: the same loss, gradients, weights and buffers as the plain model."""

from __future__ import annotations

from collections.abc import Callable

import distributed_cases as cases
import pipeline_cases
import pytest
from jobs import Job

import placer
from placer.schedule import SCHEDULES

pytestmark = pytest.mark.usefixtures("one_capture")

SHAPES = [(2, 1), (1, 2), (2, 2), (4, 1)]  # stages, replicas
SPLIT = "InterleavedZeroBubble"
OTHERS = ["keywords and dict results", "3D U-Net, batch norm", "in place", "recurrent"]


def check(
    job_of: Callable[[int], Job],
    name: str,
    shape: tuple[int, int],
    schedules: tuple[str, ...],
    microbatches: int = 4,
    batches: tuple[int, ...] = (8, 5, 3),
    **fields: object,
) -> None:
    """Batches of 8, 5 and 3 rows: 5 does not divide evenly, and 3 leaves micro-batches empty."""
    stages, replicas = shape
    model, args, kwargs = cases.make_case(name, batches[0])
    spec = cases.make_spec(stages, replicas, microbatches).model_copy(update=fields)
    plan = placer.make_plan(model, spec, args, kwargs)
    found = job_of(stages * replicas).run(cases.check_equality, name, plan, schedules, batches)
    assert [rank["stages"] for rank in found] == [(s,) for s in range(stages)] * replicas
    assert {name for rank in found for name in rank["names"]} == set(model.state_dict())


@pytest.mark.matrix(2)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"pp{s[0]}dp{s[1]}")
@pytest.mark.parametrize("name", ["convnet", "3D U-Net", "tied transformer"])
def test_three_steps_equal_the_plain_model(
    job_of: Callable[[int], Job], name: str, shape: tuple[int, int]
) -> None:
    check(job_of, name, shape, SCHEDULES)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", ["convnet", "tied transformer"])
def test_replicas_of_a_stage_may_be_next_to_each_other(
    job_of: Callable[[int], Job], name: str
) -> None:
    model, args, kwargs = cases.make_case(name, 8)
    spec = cases.make_spec(2, 2, 4, node_layout="replicas")
    plan = placer.make_plan(model, spec, args, kwargs)
    found = job_of(4).run(cases.check_equality, name, plan, ("1F1B", SPLIT), (8, 5, 3))
    assert [rank["stages"] for rank in found] == [(0,), (0,), (1,), (1,)]


@pytest.mark.matrix(0)
def test_three_steps_in_chunks(job_of: Callable[[int], Job]) -> None:
    check(job_of, "3D U-Net", (2, 1), ("1F1B", SPLIT), batches=(8, 3), chunks=3)


@pytest.mark.matrix(0)
def test_three_steps_compiled(job_of: Callable[[int], Job]) -> None:
    model, args, kwargs = cases.make_case("convnet", 8)
    plan = placer.make_plan(model, cases.make_spec(2, 1, 2, compile=True), args, kwargs)
    job_of(2).run(cases.check_compiled, "convnet", plan, ("1F1B",), (8, 5))


@pytest.mark.matrix(0)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"pp{s[0]}dp{s[1]}")
def test_three_steps_of_resnet18(job_of: Callable[[int], Job], shape: tuple[int, int]) -> None:
    # Fewer, larger cuts: BatchNorm over a row or two amplifies rounding.
    check(job_of, "resnet18", shape, ("1F1B", SPLIT), microbatches=2, batches=(8, 6))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", OTHERS)
def test_what_splitting_gets_wrong_easily(job_of: Callable[[int], Job], name: str) -> None:
    check(job_of, name, (2, 2), ("GPipe", SPLIT))


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("layers", "stages"),
    [
        ({"**": "cpu:0", "bottleneck": "cpu:1"}, [(0, 2), (1,)]),
        ({"**": "cpu:0", "pool": "cpu:1", "bottleneck": "cpu:1", "head": "cpu:1"}, None),
    ],
    ids=["a U-Net's bottleneck elsewhere", "back and forth"],
)
def test_a_device_may_have_any_stages(
    job_of: Callable[[int], Job], layers: dict[str, str], stages: list[tuple[int, ...]] | None
) -> None:
    """Stages on devices in any order, under every schedule; skips within a device stay there."""
    model, args, kwargs = cases.make_case("3D U-Net", 8)
    spec = cases.make_spec(2, 1, 4, layers=layers)
    plan = placer.make_plan(model, spec, args, kwargs, processes=True)
    found = job_of(2).run(cases.check_equality, "3D U-Net", plan, SCHEDULES, (8, 3))
    if stages is not None:
        assert [rank["stages"] for rank in found] == stages
    assert sum(len(rank["stages"]) for rank in found) == len(plan.stages) > 2
    assert {name for rank in found for name in rank["names"]} == set(model.state_dict())


def test_a_replica_without_rows_has_the_buffers_and_gradients_of_the_others(
    job_of: Callable[[int], Job],
) -> None:
    check(job_of, "in place", (1, 2), ("GPipe", "1F1B"), batches=(8, 1))


def test_a_value_that_skips_stages_travels_once(job_of: Callable[[int], Job]) -> None:
    """For two micro-batches, both ways: 0 to 1 and 2, 1 to 2, 2 to 3; rank 1 relays nothing."""
    sent = job_of(4).run(pipeline_cases.count_messages_of_a_skip)
    assert sent == [(4, 4), (4, 4), (6, 6), (2, 2)]


def test_recomputed_and_offloaded_regions(job_of: Callable[[int], Job]) -> None:
    regions = {"checkpoint": ("encoder.*",), "offload": ("decoder.*",)}
    check(job_of, "3D U-Net", (2, 1), ("1F1B", "InterleavedZeroBubble"), **regions)
