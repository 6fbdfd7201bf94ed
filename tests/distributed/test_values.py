"""Models that look at values of tensors and attributes, with one process per device."""

from __future__ import annotations

from collections.abc import Callable

import pipeline_cases as cases
import pytest
import torch
from distributed_cases import make_spec
from jobs import Job
from torch import nn

import placer


def test_a_branch_by_values_is_taken_as_in_the_plain_model(job_of: Callable[[int], Job]) -> None:
    job_of(2).run(cases.step_by_values)


def test_attributes_that_are_set_between_steps(job_of: Callable[[int], Job]) -> None:
    job_of(2).run(cases.step_after_attributes_were_set)


def test_shapes_that_depend_on_the_data_are_said_and_not_sent(job_of: Callable[[int], Job]) -> None:
    first, second = job_of(2).run(cases.step_with_shapes_of_the_data)
    assert first.startswith("StageError: stage 0, rank 0 (replica 0), boundary")
    assert second.startswith("PeerError")
    for message in (first, second):
        assert "it depends on the data" in message


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    "spec",
    [
        make_spec(2, 1, 1, layers={"first": "cpu:0", "last": "cpu:1"}),
        make_spec(2, 1, 4, "1F1B", layers={"first": "cpu:0", "last": "cpu:1"}),
        make_spec(2, 1, 2, layers={"first": "cpu:1", "last": "cpu:0"}),
    ],
)
def test_sizes_that_a_later_stage_reads(
    job_of: Callable[[int], Job], spec: placer.PlacementSpec
) -> None:
    job_of(2).run(cases.steps_with_sizes, spec)


def test_ranks_of_a_model_that_passes_sizes_on_are_simulated() -> None:
    spec = make_spec(2, 1, 2, layers={"first": "cpu:0", "last": "cpu:1"})
    report = placer.simulate(cases.Patches(), spec, torch.randn(4, 3, 8, 8), processes=True)
    assert len(report.devices) == 2


def test_weights_that_a_list_holds_are_simulated() -> None:
    inputs = torch.randn(4, 6, 4), torch.tensor([6, 3, 2, 5])
    plan = placer.make_plan(cases.Reads(), {"devices": ["cpu:0"]}, inputs, processes=True)
    assert plan.devices[0].peak > 0


def test_ranks_of_a_model_that_holds_methods_and_partial_functions_are_simulated() -> None:
    """Micro-batches of one row, for which forward leaves an operation out, keep weights where they are."""
    model, x = cases.HoldsFunctions(), torch.randn(2, 3, 4)
    spec = make_spec(2, 1, 2, layers={"first": "cpu:0", "last": "cpu:1"})
    plan = placer.make_plan(model, spec, x, processes=True)
    report = placer.simulate(model, plan, x, processes=True)
    assert [d.peak for d in report.devices] == [d.peak for d in plan.devices]


@pytest.mark.matrix(0)
def test_methods_and_partial_functions_in_attributes(job_of: Callable[[int], Job]) -> None:
    job_of(2).run(cases.steps_with_functions_in_attributes)


def test_a_number_of_the_data_is_the_same_on_all_ranks(job_of: Callable[[int], Job]) -> None:
    job_of(2).run(cases.a_number_of_the_data)


def test_a_loss_reads_an_object(job_of: Callable[[int], Job]) -> None:
    job_of(2).run(cases.step_with_an_object_as_result)


def test_ranks_are_simulated_with_the_guess_that_the_capture_needs() -> None:
    """The table has an entry for the answer 0 only; the plan's peaks are those of the ranks."""
    model = nn.Sequential(nn.Linear(4, 4), cases.LooksAtValues(), nn.Linear(4, 4))
    layers = {"0": "cpu:0", "1": "cpu:0", "2": "cpu:1"}
    x = torch.randn(4, 4)
    spec = make_spec(2, 1, 2, layers=layers, inputs={"input": {"batch_dim": 0}})
    plan = placer.make_plan(model, spec, x, processes=True)
    report = placer.simulate(model, plan, x, processes=True)
    assert [d.peak for d in report.devices] == [d.peak for d in plan.devices]


SAID = {"inputs": {"x": {"batch_dim": 0}}}


@pytest.mark.matrix(1)
@pytest.mark.parametrize("captured_in_training", [True, False])
@pytest.mark.parametrize(
    "spec", [make_spec(1, 2, 1, **SAID), make_spec(2, 2, 1, **SAID)], ids=["1x2", "2x2"]
)
def test_what_forward_writes_is_the_first_replicas(
    job_of: Callable[[int], Job], spec: placer.PlacementSpec, captured_in_training: bool
) -> None:
    world = len(spec.devices) * spec.replicas
    job_of(world).run(cases.share_what_forward_writes, spec, captured_in_training)


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    "spec",
    [
        make_spec(2, 1, 2, layers={"first": "cpu:0", "second": "cpu:1"}),
        make_spec(2, 1, 2, layers={"first": "cpu:1", "second": "cpu:0"}),
        make_spec(1, 2, 1),
    ],
    ids=["forwards", "backwards", "replicas"],
)
def test_tensors_that_are_conjugated_by_a_flag(
    job_of: Callable[[int], Job], spec: placer.PlacementSpec
) -> None:
    job_of(2).run(cases.step_with_conjugated_tensors, spec)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("first", [0, 1])
def test_parameters_that_stages_pass_on_in_inference(
    job_of: Callable[[int], Job], first: int
) -> None:
    layers = {"first": f"cpu:{first}", "last": f"cpu:{1 - first}"}
    job_of(2).run(cases.infer_where_stages_pass_parameters, make_spec(2, 1, 2, layers=layers))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("first", [1, 2])
def test_hooks_that_are_removed(job_of: Callable[[int], Job], first: int) -> None:
    layers = {str(index): f"cpu:{int(index >= first)}" for index in range(3)}
    job_of(2).run(cases.step_where_hooks_are_removed, make_spec(2, 1, 1, layers=layers))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)])
def test_what_forward_leaves_behind_is_on_every_rank(
    job_of: Callable[[int], Job], shape: tuple[int, int, int]
) -> None:
    layers = {"first": "cpu:0", "last": "cpu:1"} if shape[0] == 2 else {}
    job_of(shape[0] * shape[1]).run(cases.leave_values, make_spec(*shape, layers=layers))
