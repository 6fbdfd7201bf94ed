"""What forward changes of the model itself is the same on every rank, also in modules that a rank lacks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import state_cases as cases
from jobs import Job
from torch import nn


@pytest.mark.matrix(3)
@pytest.mark.parametrize("spec", cases.SPECS)
@pytest.mark.parametrize(
    "make",
    [cases.Counts, cases.SetsModes, cases.Initialises, cases.Layers, cases.ReplacesBuffers],
)
def test_state_that_forward_changes(
    job_of: Callable[[int], Job], make: type[nn.Module], spec: str
) -> None:
    job_of(2).run(cases.call_in_both_modes, make, spec)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("spec", ["stages", "recomputed"])
def test_weights_that_the_first_batch_sets(job_of: Callable[[int], Job], spec: str) -> None:
    job_of(2).run(cases.call_in_both_modes, cases.NormsByData, spec)


@pytest.mark.matrix(4)  # each model once
@pytest.mark.parametrize("spec", ["stages", "recomputed"])
@pytest.mark.parametrize(
    "make", [cases.Remembers, cases.GrowsBuffers, cases.HoldsLayers, cases.KeepsFeatures]
)
def test_state_of_modules_that_a_rank_lacks(
    job_of: Callable[[int], Job], make: type[nn.Module], spec: str
) -> None:
    job_of(2).run(cases.call_in_both_modes, make, spec)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("spec", cases.SPECS)
def test_a_variable_that_holds_a_part(job_of: Callable[[int], Job], spec: str) -> None:
    job_of(2).run(cases.call_a_part_in_a_variable, spec)


def test_results_are_copies_of_inputs_and_weights(job_of: Callable[[int], Job]) -> None:
    job_of(2).run(cases.results_are_copies)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("in_eval", [False, True])
def test_a_forward_that_freezes_parameters_is_refused(
    job_of: Callable[[int], Job], *, in_eval: bool
) -> None:
    for message in job_of(2).run(cases.freeze, in_eval=in_eval):
        assert message.startswith("c.weight: forward sets its requires_grad")


@pytest.mark.parametrize(
    ("layer", "keeps", "said"),
    [
        ("1", False, "equal"),
        ("0.0", True, "seen: is set by a module that stays whole"),
        ("0", False, "0: hooks were put on it"),
    ],
)
def test_hooks_that_are_put_on_layers_later(
    job_of: Callable[[int], Job], layer: str, said: str, *, keeps: bool
) -> None:
    for found in job_of(2).run(cases.hook_later, layer, keeps=keeps):
        assert found.startswith(said)
