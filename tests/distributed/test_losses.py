"""Losses under torchrun: weighted as those of the whole batch, or refused on every rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import loss_cases as cases
import pytest
from distributed_cases import make_spec
from jobs import Job


def test_wrong_targets_are_said_on_every_rank(job_of: Callable[[int], Job]) -> None:
    found = job_of(2).run(cases.try_targets, make_spec(1, 2, 2))
    for rank, said in enumerate(found):
        last = rank == 1
        assert "PlacerError: target: has 6 rows, the batch has 8" in said["rows"]
        assert "target: has 6 rows" in said["rows of one rank"]
        assert said["rows of one rank"].startswith("PlacerError" if last else "PeerError")
        assert "PlacerError: normalizer: counts" in said["a share"]
        assert "normalizer: raised KeyError" in said["raises"], said["raises"]
        assert "normalizer: is " in said["options"]
        assert "loss_fn: is a mean over rows on some ranks" in said["combination"]
        assert said["good"] == "no error"


REFUSED = {
    "penalty": "reads the model's parameter '3.weight' and 1 more",
    "a call": "placed(x): is called while stages run",
    "a module": "reads a tensor of shape [1, 6] that requires gradients",
    "a tensor with a graph": "that requires gradients and is not the model's",
    "a target": "that requires gradients and is not the model's",
    "no mean": "neither a mean nor a sum over rows",
}


@pytest.mark.matrix(2)
@pytest.mark.parametrize("kind", REFUSED)
def test_a_loss_that_is_wrong_on_one_rank_is_refused_on_all(
    job_of: Callable[[int], Job], kind: str
) -> None:
    found = job_of(2).run(cases.step_once, make_spec(2, 1, 2), kind)
    assert found[0].startswith("PeerError") and found[1].startswith("StageError"), found
    assert all(REFUSED[kind] in said and "rank 1" in said for said in found), found


@pytest.mark.matrix(1)
@pytest.mark.parametrize("kind", ["a frozen module", "activations of a hook", "in place"])
def test_a_loss_that_reads_more_than_the_output_but_trains_no_more(
    job_of: Callable[[int], Job], kind: str
) -> None:
    """What hooks keep is that of the whole batch: with micro-batches they would be refused."""
    spec = make_spec(2, 1, 1 if kind == "activations of a hook" else 2)
    assert job_of(2).run(cases.step_once, spec, kind) == ["no error"] * 2


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_loss_adds_what_layers_of_all_ranks_store(
    job_of: Callable[[int], Job], microbatches: int
) -> None:
    run = functools.partial(cases.add_losses_of_layers, microbatches)
    assert job_of(2).run(run, compiled_in_training=True) == ["no error"] * 2
    found = job_of(2).run(run, compiled_in_training=False)
    assert found[0].startswith("PeerError") and found[1].startswith("StageError"), found
    assert all("is stored with its graph by a layer of another rank" in said for said in found)


def test_parameters_of_a_loss_are_refused_where_replicas_would_train_them_apart(
    job_of: Callable[[int], Job],
) -> None:
    found = job_of(2).run(cases.step_once, make_spec(1, 2, 2), "a module")
    assert all("reads a tensor of shape [1, 6]" in said for said in found), found


def test_torchs_wrappers_are_refused(job_of: Callable[[int], Job]) -> None:
    for messages in job_of(2).run(cases.wrap):
        assert all("DistributedDataParallel: cannot wrap" in said for said in messages)


def test_a_sharded_part_is_refused(job_of: Callable[[int], Job]) -> None:
    for messages in job_of(2).run(cases.shard):
        assert all("fully_shard: cannot shard a placed model" in said for said in messages)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("shape", [(2, 1), (2, 2)])
def test_torchs_clipping_of_a_part_is_refused(
    job_of: Callable[[int], Job], shape: tuple[int, int]
) -> None:
    for found in job_of(math.prod(shape)).run(cases.clip_a_part, make_spec(*shape, 2)):
        for way, said in found.items():
            assert "call placed.clip_grad_norm_" in said, way


def test_what_is_wrong_with_a_loss_over_the_whole_batch_is_said(
    job_of: Callable[[int], Job],
) -> None:
    for rank, said in enumerate(job_of(2).run(cases.fail_over_whole_batches)):
        assert "1F1B begins with backwards before that" in said["schedule"]
        assert "with whole_batch=True there is one loss" in said["reduction"]
        assert "ValueError: 8 rows" in said["raises"], (rank, said["raises"])
        assert "reads the model's parameter" in said["penalty"], (rank, said["penalty"])


def test_every_rank_has_the_report_of_all(job_of: Callable[[int], Job]) -> None:
    first, *others = job_of(4).run(cases.measure, make_spec(2, 2, 2))
    assert [found == first for found in others] == [True] * 3
    ranks = [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    assert [tuple(found[:3]) for found in first] == ranks
    assert all(min(found[3:]) > 0 for found in first)


def test_all_ranks_measure_a_step_or_none(job_of: Callable[[int], Job]) -> None:
    for said in job_of(2).run(cases.measure_on_one_rank, make_spec(2, 1, 2)):
        assert "profile" in said and "with the same options" in said


@pytest.mark.matrix(1)
@pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
def test_gradients_of_replicas_are_summed_at_the_last_of_several_steps(
    job_of: Callable[[int], Job], shape: tuple[int, int]
) -> None:
    for said in job_of(math.prod(shape)).run(cases.accumulate, make_spec(*shape, 2)):
        assert all("not summed over replicas yet" in each for each in said), said
