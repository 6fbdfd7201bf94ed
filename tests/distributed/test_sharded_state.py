"""The law for sharded optimizer state: weights, gradients and checkpoints as without, and less memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import checkpoint_cases
import distributed_cases as cases
import pytest
import sharded_cases
import torch
from jobs import Job
from sharded_cases import Layout

import placer
from placer.plan.step_spans import step_spans

SPLIT = "InterleavedZeroBubble"


def make_plan(
    name: str,
    shape: tuple[int, int, int],
    schedule: str,
    over: int | str = "auto",
    state: str = "optimizer",
    microbatches: int = 2,
) -> placer.Plan:
    stages, replicas, shards = shape
    model, args, kwargs = cases.make_case(name, 8)
    fields = {"space": shards, "shard_state": state, "shard_over": over}
    spec = cases.make_spec(stages * shards, replicas, microbatches, schedule, **fields)
    return placer.make_plan(model, spec, args, kwargs, processes=True)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("state", ["optimizer", "gradients"])
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
    job_of: Callable[[int], Job],
    name: str,
    shape: tuple[int, int, int],
    schedule: str,
    make: str,
    state: str,
) -> None:
    """With 3 rows some replicas have fewer micro-batches, with one row most have none."""
    plan = make_plan(name, shape, schedule, state=state)
    job = job_of(shape[0] * shape[1] * shape[2])
    found = job.run(sharded_cases.train, name, plan, make, (8, 3, 1))
    elements, whole = [own for own, _ in found], found[0][1]
    assert sum(elements) == whole  # each element's state is on one rank
    if shape[0] == 1:  # and a rank has at most one of a parameter more than another
        values = 3 * len(list(cases.make_case(name, 8)[0].parameters()))
        assert max(elements) <= whole / len(elements) + values


@pytest.mark.matrix(1)
@pytest.mark.parametrize("state", ["optimizer", "gradients"])
@pytest.mark.parametrize(
    ("name", "shape", "over"),
    [("convnet", (1, 4, 1), 2), ("3D U-Net", (1, 2, 2), 1), ("tied transformer", (2, 2, 1), 1)],
)
def test_some_replicas_divide_the_state_between_them(
    job_of: Callable[[int], Job], name: str, shape: tuple[int, int, int], over: int, state: str
) -> None:
    plan = make_plan(name, shape, "1F1B", over, state)
    found = job_of(4).run(sharded_cases.train, name, plan, "adam", (8, 3, 1), 1, 0.01)
    assert sum(own for own, _ in found) == found[0][1] * shape[1] // over


@pytest.mark.matrix(1)
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", SPLIT])
@pytest.mark.parametrize(
    ("microbatches", "shape"), [(1, (2, 2, 1)), (4, (2, 2, 1)), (4, (4, 1, 1))]
)
def test_gradients_are_divided_after_every_microbatch(
    job_of: Callable[[int], Job], microbatches: int, shape: tuple[int, int, int], schedule: str
) -> None:
    """With 5 rows or one, replicas have other numbers of micro-batches."""
    plan = make_plan("tied transformer", shape, schedule, "auto", "gradients", microbatches)
    job_of(4).run(sharded_cases.train, "tied transformer", plan, "adamw", (8, 5, 1))


def test_replicas_that_cannot_divide_the_state() -> None:
    with pytest.raises(placer.SpecError, match=r"/shard_over: 3 does not divide .* replicas, 4"):
        make_plan("convnet", (1, 4, 1), "1F1B", 3)
    model, args, _ = cases.make_case("convnet", 8)
    devices = [{"name": f"cuda:{i}", "kind": "a100"} for i in range(4)]
    with pytest.raises(placer.SpecError, match=r"/shard_over: 3 does not divide .* replicas, 4"):
        given = {"devices": devices, "shard_state": "auto", "shard_over": 3}
        placer.auto_plan(model, args, **given, replicas=4, processes=True)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("state", ["optimizer", "gradients"])
@pytest.mark.parametrize("over", ["auto", 1])
def test_accumulation_and_clipping(
    job_of: Callable[[int], Job], state: str, over: int | str
) -> None:
    plan = make_plan("tied transformer", (2, 2, 1), SPLIT, over, state)
    job_of(4).run(sharded_cases.train, "tied transformer", plan, "adam", (8, 5), 2, 0.01)


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (Layout(1, 3), Layout(2, 1)),
        (Layout(2, 2), Layout(2, 2, node_layout="replicas")),
        (Layout(2, 2, node_layout="replicas"), Layout(1, 3)),
        (Layout(1, 4), Layout(2, 2, "none")),
        (Layout(2, 2, "none", "replicas"), Layout(1, 4)),
        (Layout(1, 4, shard_over=2), Layout(2, 2)),
        (Layout(2, 2), Layout(1, 4, shard_over=2)),
        (Layout(2, 2, "gradients"), Layout(1, 3)),
        (Layout(1, 4, "gradients", shard_over=2), Layout(2, 2, "gradients")),
        (Layout(2, 2, "none"), Layout(1, 3, "gradients")),
        (Layout(1, 3), Layout(1, 4, "gradients", shard_over=2)),
        (Layout(2, 2, "gradients"), Layout(2, 1, "none")),
    ],
)
def test_checkpoints_of_every_layout(
    job_of: Callable[[int], Job],
    tmp_path: Path,
    saved: Layout,
    loaded: Layout,
) -> None:
    """The plain model, too, goes on from what a job with sharded state has saved."""
    path = tmp_path / "c"
    expected = job_of(saved.stages * saved.replicas).run(sharded_cases.save_and_go_on, saved, path)
    found = job_of(loaded.stages * loaded.replicas).run(sharded_cases.load_and_go_on, loaded, path)
    for rank in found:
        assert rank["losses"] == pytest.approx(expected[0]["losses"], rel=1e-10)
    plain = checkpoint_cases.make_plain(1).eval()
    optimizer = checkpoint_cases.make_optimizer(plain)
    placer.load(plain, optimizer, path)
    losses = checkpoint_cases.train(plain, optimizer, 2)
    assert losses == pytest.approx(expected[0]["losses"], rel=1e-10)
    whole = sharded_cases.count_elements(optimizer)
    for layout, ranks in ((saved, expected), (loaded, found)):
        if layout.shard_state != "none":
            copies = 1 if layout.shard_over == "auto" else layout.replicas // int(layout.shard_over)
            assert sum(rank["elements"] for rank in ranks) == whole * copies


def test_optimizers_that_cannot_update_pieces_are_refused(job_of: Callable[[int], Job]) -> None:
    spec = cases.make_spec(1, 2, 1, shard_state="optimizer")
    for messages in job_of(2).run(sharded_cases.refused, spec):
        kinds = ("Muon", "Adafactor", "LBFGS")
        for message, kind in zip(messages, kinds, strict=False):
            assert f"{kind}: does not update each number by itself" in message
        assert "is in the optimizer on some of the ranks that have it" in messages[3]


def test_a_step_of_the_optimizer_that_fails_ends_the_job(job_of: Callable[[int], Job]) -> None:
    spec = cases.make_spec(1, 2, 1, shard_state="optimizer")
    for first, second, third in job_of(2).run(sharded_cases.fail_in_a_step, spec):
        assert "size" in first
        assert "optimizer.step(): has failed before" in second
        assert "optimizer.step(): has failed before" in third


def test_divided_gradients_are_read_whole_or_not_at_all(job_of: Callable[[int], Job]) -> None:
    spec = cases.make_spec(1, 2, 2, shard_state="gradients")
    for messages in job_of(2).run(sharded_cases.read_divided_gradients, spec):
        operations = "linalg_vector_norm", "sum", "add_", "mul", "equal"
        for message, operation in zip(messages, operations, strict=True):
            problem = f"is divided over ranks (\"shard_state\": 'gradients'), and {operation} needs"
            assert ".grad: " in message and problem in message, message
            assert "placed.clip_grad_norm_" in message and ".grad.full_tensor()" in message


@pytest.mark.matrix(1)
@pytest.mark.parametrize("state", ["optimizer", "gradients"])
def test_one_process_has_one_copy(state: str) -> None:
    model, args, _ = cases.make_case("convnet", 8)
    spec = cases.make_spec(1, 2, 1, shard_state=state)
    plan = placer.make_plan(model, spec, args, processes=True)
    for run in (
        lambda: placer.make_plan(model, spec, args),
        lambda: placer.compile(model, plan, args),
        lambda: placer.simulate(model, plan, args),
    ):
        with pytest.raises(placer.PlacerError, match="one copy of the optimizer's state"):
            run()


def test_values_to_come_are_named() -> None:
    with pytest.raises(placer.SpecError, match="/shard_state: 'parameters' is not possible yet"):
        placer.PlacementSpec(devices=["cpu"], shard_state="parameters")  # type: ignore[arg-type]


def test_torch_divides_whole_parameters(job_of: Callable[[int], Job]) -> None:
    """What the documentation says to do for optimizers that cannot update pieces."""
    found = job_of(2).run(sharded_cases.divide_whole_parameters, cases.make_spec(1, 2, 1))
    assert sum(own for own, _ in found) == found[0][1]


def test_dividing_gradients_takes_time_after_every_microbatch() -> None:
    """Each takes half of what a sum takes, and only the last is not hidden by computations."""
    model, x = torch.nn.Linear(4096, 4096), torch.randn(4, 4096)
    fields = {"devices": [{"name": "cuda:0", "kind": "a100"}], "replicas": 2, "microbatches": 2}
    plans = [
        placer.make_plan(model, {**fields, "shard_state": state}, x, processes=True)
        for state in ("optimizer", "gradients")
    ]
    whole, divided = (plan.stages[0].sum_seconds for plan in plans)
    assert divided == pytest.approx(whole / 2)
    nbytes = [[span.nbytes for span in step_spans(plan) if span.kind == "sum"] for plan in plans]
    gradients = sum(p.nbytes for p in model.parameters())
    assert sum(nbytes[0]) == pytest.approx(2 * gradients)  # on two devices
    assert sum(nbytes[1]) == pytest.approx(2 * 2 * gradients)


def test_gathering_the_weights_takes_time() -> None:
    """Half of what the sums of gradients take; the update itself is that of a half."""
    model, x = torch.nn.Linear(4096, 4096), torch.randn(4, 4096)
    fields = {"devices": [{"name": "cuda:0", "kind": "a100"}], "replicas": 2}
    whole, sharded = (
        placer.make_plan(model, {**fields, "shard_state": state}, x, processes=True)
        for state in ("none", "optimizer")
    )
    (stage,) = whole.stages
    assert whole.optimizer_seconds and sharded.optimizer_seconds and stage.sum_seconds
    update = sharded.optimizer_seconds - stage.sum_seconds / 2
    assert update == pytest.approx(whole.optimizer_seconds / 2, rel=0.1)
