"""Models that look at values of tensors and attributes, with one process per device."""

from __future__ import annotations

from collections.abc import Callable

import pipeline_cases as cases
import torch
from distributed_cases import make_spec
from jobs import Job
from torch import nn

import placer


def test_shapes_that_depend_on_the_data_are_said_and_not_sent(job_of: Callable[[int], Job]) -> None:
    first, second = job_of(2).run(cases.step_with_shapes_of_the_data)
    assert first.startswith("StageError: stage 0, rank 0 (replica 0), boundary")
    assert second.startswith("PeerError")
    for message in (first, second):
        assert "it depends on the data" in message


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


def test_ranks_are_simulated_with_the_guess_that_the_capture_needs() -> None:
    """The table has an entry for the answer 0 only; the plan's peaks are those of the ranks."""
    model = nn.Sequential(nn.Linear(4, 4), cases.LooksAtValues(), nn.Linear(4, 4))
    layers = {"0": "cpu:0", "1": "cpu:0", "2": "cpu:1"}
    x = torch.randn(4, 4)
    spec = make_spec(2, 1, 2, layers=layers, inputs={"input": {"batch_dim": 0}})
    plan = placer.make_plan(model, spec, x, processes=True)
    report = placer.simulate(model, plan, x, processes=True)
    assert [d.peak for d in report.devices] == [d.peak for d in plan.devices]
