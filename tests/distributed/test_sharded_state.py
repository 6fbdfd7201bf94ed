"""The law for sharded optimizer state: weights, gradients and checkpoints as without, and less memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import checkpoint_cases
import distributed_cases as cases
import pytest
import sharded_cases
from jobs import Job

import placer

SPLIT = "InterleavedZeroBubble"


def make_plan(name: str, shape: tuple[int, int, int], schedule: str, rows: int = 8) -> placer.Plan:
    stages, replicas, shards = shape
    model, args, kwargs = cases.make_case(name, rows)
    spec = cases.make_spec(
        stages * shards, replicas, 2, schedule, space=shards, shard_state="optimizer"
    )
    return placer.make_plan(model, spec, args, kwargs, processes=True)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("make", sharded_cases.OPTIMIZERS)
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", SPLIT])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("convnet", (1, 3, 1)),
        ("convnet", (2, 2, 1)),
        ("tied transformer", (2, 2, 1)),
        ("tied transformer", (4, 1, 1)),
        ("3D U-Net", (1, 2, 2)),
        ("3D U-Net", (2, 1, 2)),
    ],
)
def test_weights_equal_the_plain_models(
    job_of: Callable[[int], Job], name: str, shape: tuple[int, int, int], schedule: str, make: str
) -> None:
    """With 3 rows some replicas have fewer micro-batches, with one row most have none."""
    plan = make_plan(name, shape, schedule)
    job = job_of(shape[0] * shape[1] * shape[2])
    found = job.run(sharded_cases.train, name, plan, make, (8, 3, 1))
    assert sum(own for own, _ in found) == found[0][1]  # each element's state is on one rank


def test_accumulation_and_clipping(job_of: Callable[[int], Job]) -> None:
    plan = make_plan("tied transformer", (2, 2, 1), SPLIT)
    job_of(4).run(sharded_cases.train, "tied transformer", plan, "adam", (8, 5), 2, 0.01)


@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((2, 2, "optimizer"), (2, 2, "optimizer")),
        ((2, 2, "optimizer"), (1, 3, "optimizer")),
        ((1, 4, "optimizer"), (2, 2, "none")),
        ((2, 2, "none"), (1, 4, "optimizer")),
        ((1, 3, "optimizer"), (2, 1, "optimizer")),
    ],
)
def test_checkpoints_of_every_layout(
    job_of: Callable[[int], Job],
    tmp_path: Path,
    saved: sharded_cases.Layout,
    loaded: sharded_cases.Layout,
) -> None:
    """The plain model, too, goes on from what a job with sharded state has saved."""
    path = tmp_path / "c"
    expected = job_of(saved[0] * saved[1]).run(sharded_cases.save_and_go_on, saved, path)
    found = job_of(loaded[0] * loaded[1]).run(sharded_cases.load_and_go_on, loaded, path)
    for rank in found:
        assert rank["losses"] == pytest.approx(expected[0]["losses"], rel=1e-10)
    plain = checkpoint_cases.make_plain(1).eval()
    optimizer = checkpoint_cases.make_optimizer(plain)
    placer.load(plain, optimizer, path)
    losses = checkpoint_cases.train(plain, optimizer, 2)
    assert losses == pytest.approx(expected[0]["losses"], rel=1e-10)
    whole = sharded_cases.count_elements(optimizer)
    for layout, ranks in ((saved, expected), (loaded, found)):
        if layout[2] == "optimizer":
            assert sum(rank["elements"] for rank in ranks) == whole
