"""A plan for one process per device says what each real rank holds."""

from __future__ import annotations

from collections.abc import Callable

import distributed_cases as cases
import pytest
import torch
import torch.distributed as dist
from jobs import Job
from placements import estimated_plan
from torch import nn

import placer

pytestmark = pytest.mark.usefixtures("one_capture")
# The digests of a call, of four ranks and its own, which a rank holds in its first forward: 14 numbers each.
_DIGESTS = 5 * 14 * 8


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("schedule", "stages", "replicas"),
    [("1F1B", 2, 2), ("InterleavedZeroBubble", 4, 1), ("GPipe", 2, 1)],
)
def test_a_rank_peaks_where_its_plan_says(
    job_of: Callable[[int], Job], schedule: str, stages: int, replicas: int
) -> None:
    model, x = cases.memory_case()
    plan = placer.make_plan(
        model, cases.make_spec(stages, replicas, 4, schedule, loss="mean_square"), x, processes=True
    )
    assert not dist.is_initialized()
    predicted = [device.peak for device in plan.devices]
    assert job_of(stages * replicas).run(cases.count_bytes, plan) == pytest.approx(
        predicted, rel=0.001, abs=_DIGESTS
    )


@pytest.mark.matrix(1)
@pytest.mark.parametrize("training", [True, False])
def test_a_rank_that_passes_its_own_part_of_the_input_has_only_that(
    job_of: Callable[[int], Job], *, training: bool
) -> None:
    """On a CPU it is the caller's; of a whole input the rank has a copy of its part."""
    model, x = cases.space_memory_case()
    peaks = {}
    for own in (False, True):
        space = {"shards": 2, "own_boxes": own}
        spec = cases.make_spec(2, 1, 1, "GPipe", space=space, loss="mean_square", training=training)
        plan = placer.make_plan(model, spec, x, processes=True)
        peaks[own] = [device.peak for device in plan.devices]
        found = job_of(2).run(cases.count_bytes, plan, boxes=own)
        assert found == pytest.approx(peaks[own], rel=0.001, abs=_DIGESTS)
    assert all(own < whole for own, whole in zip(peaks[True], peaks[False], strict=True))


def test_a_plan_whose_ranks_do_not_fit_is_made_again() -> None:
    """Of one process's peaks the first stages would fit; the engine holds more than the budget."""
    model, x = cases.memory_case()
    spec = cases.make_spec(2, 1, 4, "1F1B")
    first = placer.make_plan(model, spec, x, processes=True)
    assert [s.memory.peak for s in first.stages] == [d.peak for d in first.devices]
    budget = max(d.peak for d in first.devices) - 1
    devices = [{"name": f"cpu:{i}", "memory": budget} for i in range(2)]
    limited = spec.model_copy(update={"reserve": 0}).with_devices(
        placer.PlacementSpec(devices=devices).devices
    )
    again = placer.make_plan(model, limited, x, processes=True)
    assert again.fits
    assert [d.budget for d in again.devices] == [budget] * 2
    assert [s.nodes for s in again.stages] != [s.nodes for s in first.stages]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
@pytest.mark.parametrize("state", ["gradients", "optimizer"])
@pytest.mark.parametrize("case", ["wide_case", "memory_case"])
def test_sharded_state_takes_what_the_plan_says(
    job_of: Callable[[int], Job], case: str, state: str, schedule: str
) -> None:
    """Gradients and Adam's state, and its step's own tensors, of an even share of the parameters."""
    model, x = getattr(cases, case)()
    spec = cases.make_spec(2, 2, 4, schedule, loss="mean_square")
    none, optimizer, gradients = (
        placer.make_plan(model, spec.model_copy(update={"shard_state": s}), x, processes=True)
        for s in ("none", "optimizer", "gradients")
    )
    plan = optimizer if state == "optimizer" else gradients
    for one, other in zip(none.stages, plan.stages, strict=True):
        assert other.memory.optimizer == one.memory.optimizer / 2 == one.memory.parameters
        share = 2 if state == "gradients" else 1
        assert other.memory.gradients == one.memory.gradients / share
    predicted = [device.peak for device in plan.devices]
    found = job_of(4).run(cases.count_bytes, plan, case)
    weight = 2**20  # of the wide case; a rank has six
    # A thread of gloo that gets no core may hold a weight's gradient for a while after it has arrived.
    held = weight if state == "gradients" and case == "wide_case" else 0
    for nbytes, wanted in zip(found, predicted, strict=True):
        more = 0.001 * wanted + _DIGESTS
        assert wanted - more <= nbytes <= wanted + more + held
    if case == "wide_case":
        most = [max(d.peak for d in each.devices) for each in (none, optimizer, gradients)]
        assert (
            most[0] - most[1] > 5 * weight
        )  # twice its state, and half of a step's temporary tensors
        assert (
            most[1] - most[2] > weight
        )  # three weights, without those of the buckets that are whole


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("stages", "replicas"), [(2, 2), (2, 1)])
def test_a_rank_peaks_in_inference_where_its_plan_says(
    job_of: Callable[[int], Job], stages: int, replicas: int
) -> None:
    """Every rank gets the whole result, which is most of what it holds."""
    model, x = cases.memory_case()
    spec = cases.make_spec(stages, replicas, 2, "GPipe").model_copy(update={"training": False})
    plan = placer.make_plan(model, spec, x, processes=True)
    predicted = [device.peak for device in plan.devices]
    found = job_of(stages * replicas).run(cases.count_bytes, plan)
    assert found == pytest.approx(predicted, rel=0.001, abs=_DIGESTS)


def test_in_a_job_a_plan_fits_when_its_ranks_do(job_of: Callable[[int], Job]) -> None:
    """The second device of a zero-bubble schedule holds more than estimates, or one process, say.

    All layers are pinned, and no plan takes less memory.
    """
    model, x = cases.pinned_case()
    layers = {"**": "cpu:1", **{str(number): "cpu:0" for number in range(4)}}
    fields = {"layers": layers, "reserve": 0, "objective": "memory", "loss": "mean_square"}
    spec = cases.make_spec(2, 1, 2, "InterleavedZeroBubble", **fields)
    ranks = placer.make_plan(model, spec, x, processes=True).devices[1].peak
    assert ranks > 1.5 * estimated_plan(model, spec, x).devices[1].peak

    def limited(nbytes: int) -> placer.PlacementSpec:
        devices = ["cpu:0", {"name": "cpu:1", "memory": nbytes}]
        return spec.with_devices(placer.PlacementSpec(devices=devices).devices)

    job = job_of(2)
    for peaks in job.run(cases.compile_within, limited(ranks)):
        assert peaks[1] == ranks
    plan_of_one = placer.make_plan(model, limited(ranks - 1), x)
    assert plan_of_one.fits
    for wanted, words in ((limited(ranks - 1), "needs"), (plan_of_one, "was made for one process")):
        for text in job.run(cases.compile_within, wanted):
            assert text.startswith("device cpu:1:")
            assert words in text and "1 B more than its" in text


@pytest.mark.matrix(1)
@pytest.mark.parametrize("devices", [["cuda:0", "cuda:1"], ["cpu:0", "cuda:1"]])
def test_ranks_find_the_data_types_of_their_own_devices_autocast(devices: list[str]) -> None:
    """A normalisation under bf16 gives fp32 on a GPU, bf16 on a CPU."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    layers = {"0": devices[0], "1": devices[0], "2": devices[1]}
    spec = {"devices": devices, "layers": layers, "precision": "bf16"}
    report = placer.simulate(model, spec, torch.randn(4, 8), processes=True)
    assert [device.device for device in report.devices] == devices
