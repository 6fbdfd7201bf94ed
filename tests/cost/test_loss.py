"""The loss that plans count: its names, what is assumed without one, its bytes in estimates and dry runs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from placements import estimated_plan
from torch import Tensor, nn
from torch.nn import functional as F

import placer
from benchmarks.allocator import allocator_peaks
from placer.cost import find_loss
from placer.plan.store import plan_from_json, plan_to_json
from placer.program import lower
from placer.simulation.judge import JudgingPlanner
from placer.spec.loss import LOSSES, LossSpec

CLASSES = 24
LOSSES_PY = """
import torch
from torch.nn import functional as F

def dice_ce(output, target):
    target = target.squeeze(1)
    one_hot = F.one_hot(target, output.size(1)).movedim(-1, 1).to(output.dtype)
    dims = torch.arange(2, output.dim()).tolist()  # as MONAI's losses do
    scores = output.softmax(1)
    overlap = (scores * one_hot).sum(dims) / (scores + one_hot).sum(dims)
    return (1 - 2 * overlap).mean() + F.cross_entropy(output, target)

def of_result(output):
    return output.square().mean()

def two(output, target):
    return F.l1_loss(output, target["image"]) * target["weight"].mean()

def rows(output):
    return output.flatten(1).mean(1)

class Dice:
    pass
"""


@pytest.fixture
def losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "losses.py").write_text(LOSSES_PY)
    return tmp_path


def segmenter(classes: int = CLASSES, depth: int = 1) -> tuple[nn.Module, Tensor]:
    def convolution(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv3d(before, after, 3, padding=1), nn.ReLU())

    inner = [convolution(8, 8) for _ in range(depth)]
    with torch.device("meta"):
        model = nn.Sequential(convolution(1, 8), *inner, nn.Conv3d(8, classes, 1))
        return model, torch.empty(4, 1, 16, 16, 16)


DICE = {"function": "losses.py:dice_ce", "target": "4x1x16x16x16:int64<24"}


@pytest.mark.parametrize("name", LOSSES)
def test_every_named_loss_is_one_of_torch_and_runs_without_a_target(name: str) -> None:
    loss = find_loss(LossSpec(function=name))
    assert name == "mean_square" or callable(getattr(F, name))
    result = torch.rand(4, 3, 5, requires_grad=True)
    assert loss(result).requires_grad
    assert loss((result, {"other": torch.rand(4, requires_grad=True)})).dim() == 0


def test_without_a_loss_the_plan_says_which_is_assumed_and_what_it_takes() -> None:
    model, x = segmenter()
    plan = placer.make_plan(model, {"devices": ["cuda:0"]}, x)
    assert plan.loss is not None and plan.loss.assumed and plan.loss.function == "cross_entropy"
    # Its logarithms of probabilities, their gradient and that of the result, and the classes
    result = 4 * 16**3 * CLASSES * 4
    assert 3 * result < plan.loss.nbytes < 3.3 * result
    assert any("assumed to be cross_entropy, which takes" in note for note in plan.notes)
    one, x = segmenter(classes=1)
    plan = placer.make_plan(one, {"devices": ["cuda:0"]}, x)
    assert plan.loss is not None and plan.loss.assumed and plan.loss.function == "mean_square"
    plan = placer.make_plan(one, {"devices": ["cuda:0"], "training": False}, x)
    assert plan.loss is None and not any("loss" in note for note in plan.notes)


CASES: list[tuple[int, int, str, dict[str, Any]]] = [
    (1, 1, "cuda", {}),
    (2, 4, "cuda", {"schedule": "1F1B", "optimizer": "sgd"}),
    (2, 3, "cuda", {"precision": "bf16"}),
    (3, 2, "cpu", {"replicas": 2}),
    (2, 2, "cuda", {"checkpoint": ["**"]}),
]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("loss", [None, "mean_square", "cross_entropy", "mse_loss", DICE])
def test_estimates_and_dry_runs_count_the_same_loss(loss: Any, losses: Path) -> None:
    """Per micro-batch in flight, outside of autocast, with the micro-batch's part of the target."""
    model, x = segmenter()
    found = set()
    for stages, microbatches, device, fields in CASES:
        devices = [f"{device}:{i}" for i in range(stages)]
        spec = {"devices": devices, "microbatches": microbatches, "loss": loss, **fields}
        plan = estimated_plan(model, spec, (x,))
        for each in placer.simulate(model, plan, x).devices:
            assert each.peak == pytest.approx(each.predicted, rel=0.01), (spec, each)
        found.add(plan.devices[stages - 1].peak)
    assert len(found) == len(CASES)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_ranks_count_it_too(schedule: str, losses: Path) -> None:
    model, x = segmenter()
    spec = {"devices": ["cuda:0", "cuda:1"], "microbatches": 4, "schedule": schedule}
    light = placer.make_plan(model, {**spec, "loss": "cross_entropy"}, x, processes=True)
    heavy = placer.make_plan(model, {**spec, "loss": DICE}, x, processes=True)
    assert light.loss is not None and heavy.loss is not None
    in_flight = 4 if schedule == "GPipe" else 1
    more = heavy.devices[1].peak - light.devices[1].peak
    assert more > 0.5 * (heavy.loss.nbytes - light.loss.nbytes) * in_flight
    # A plan of one process is judged again in a job, by the loss that it names.
    program = lower(model, (x,))
    alone = placer.make_plan(model, {**spec, "loss": DICE}, x)
    again = JudgingPlanner(program, [x], processes=True).judge(alone)
    assert again.devices[1].peak == pytest.approx(heavy.devices[1].peak, rel=0.1)


def test_a_real_step_takes_what_the_plan_says(losses: Path) -> None:
    torch.manual_seed(0)
    model, x = segmenter()
    model, x = model.to_empty(device="cpu"), torch.randn(x.shape)
    target = torch.randint(CLASSES, (4, 1, 16, 16, 16))
    spec = {"devices": ["cpu"], "loss": DICE, "optimizer": "sgd"}
    plan = placer.make_plan(model, spec, x)
    loss = find_loss(LossSpec.model_validate(DICE))
    measured = allocator_peaks(model, plan, (x,), loss_fn=lambda y: loss(y, target)).tensors
    assert plan.devices[0].peak == pytest.approx(measured, rel=0.02)


def test_a_plan_carries_the_loss_of_its_spec(losses: Path) -> None:
    model, x = segmenter()
    plan = placer.make_plan(model, {"devices": ["cuda:0"], "loss": DICE}, x)
    again = plan_from_json(json.loads(json.dumps(plan_to_json(plan))))
    assert again == plan
    assert plan_to_json(plan)["loss"]["target"] == ["4x1x16x16x16:int64<24"]
    (device,) = placer.simulate(model, again, x).devices
    assert device.peak == plan.devices[0].peak


def test_a_function_and_a_target_in_python(losses: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = segmenter()
    monkeypatch.syspath_prepend(str(losses))
    monkeypatch.delitem(sys.modules, "losses", raising=False)
    import losses as module  # type: ignore[import-not-found]

    target = torch.zeros(4, 1, 16, 16, 16, dtype=torch.int64)
    spec = {"devices": ["cuda:0"]}
    named = placer.make_plan(model, {**spec, "loss": DICE}, x)
    plan = placer.make_plan(model, spec, x, loss_fn=module.dice_ce, target=target)
    assert plan.devices[0].peak == named.devices[0].peak
    assert plan.loss is not None and plan.loss.function == "losses:dice_ce"
    assert plan.loss.target == ("4x1x16x16x16:int64",)
    own = placer.make_plan(
        model,
        spec,
        x,
        loss_fn=lambda y, t: module.dice_ce(y, t[0]),
        target=(target, placer.Whole(3)),
    )
    assert own.loss is not None and own.loss.function == "<lambda>" and own.loss.spec is None
    assert own.devices[0].peak == named.devices[0].peak
    report = placer.simulate(model, spec, x, loss_fn=module.dice_ce, target=target)
    assert report.devices[0].peak == named.devices[0].peak
    found = placer.auto_spec(
        model,
        x,
        devices=[{"name": "cuda:0", "memory": "8GiB"}],
        objective="devices",
        microbatches=1,
        loss_fn=module.dice_ce,
        target=target,
    )
    assert found.loss == LossSpec(function="losses:dice_ce", target=("4x1x16x16x16:int64",))
    assert placer.make_plan(model, found, x).devices[0].peak == named.devices[0].peak


def test_a_target_may_be_a_dict(losses: Path) -> None:
    model, x = segmenter()
    target = ["image=4x24x16x16x16", "weight=4x3"]
    spec = {"devices": ["cuda:0"], "loss": {"function": "losses.py:two", "target": target}}
    plan = placer.make_plan(model, {**spec, "microbatches": 2}, x)
    (device,) = placer.simulate(model, plan, x).devices
    assert device.peak == plan.devices[0].peak
    assert placer.load_spec(json.loads(placer.load_spec(spec).to_json())) == placer.load_spec(spec)


@pytest.mark.parametrize(
    ("loss", "place", "said"),
    [
        ("crossentropy", "/loss", "did you mean 'cross_entropy'"),
        ("losses.py", "/loss", "known are mean_square, cross_entropy"),
        (7, "/loss", "the name of a loss or an object"),
        ({"function": "a.py:f", "target": "4y4"}, "/loss/target", "'4y4' is not a shape"),
        ({"function": "a.py:f", "target": ["x=4", "4"]}, "/loss/target", "name all of them"),
        ({"function": "a.py:f", "targets": "4"}, "/loss/targets", "did you mean 'target'"),
        ({"function": "a.py:f", "whole": True}, "/loss/whole", "did you mean 'whole_batch'"),
        ({"target": "4"}, "/loss/function", "is required"),
        ({"function": "mean_square", "target": "4"}, "/loss", "has no target"),
    ],
)
def test_a_wrong_loss_in_a_spec(loss: Any, place: str, said: str) -> None:
    with pytest.raises(placer.SpecError) as caught:
        placer.load_spec({"devices": ["cuda:0"], "loss": loss})
    ((where, problem, remedy),) = caught.value.problems
    assert where == place and said in f"{problem} {remedy}"


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("losses.py:dice_ce", "takes a target, and none is given"),
        ("losses.py:dice", "has no callable 'dice'.*did you mean losses.py:Dice"),
        ("losses.py:Dice", "is a class.*name an instance"),
        ("losses.py:rows", r"returned a tensor of \[4\], not a scalar"),
        ({"function": "losses.py:dice_ce", "target": "2x1x16x16x16:int64"}, "has 2 rows.*has 4"),
        (
            {"function": "losses.py:dice_ce", "target": "4x1x8x8x8:int64"},
            r"fails on results without.*losses.py:\d+\)",
        ),
        (
            {"function": "losses.py:of_result", "target": "4"},
            r"takes 1 positional argument.*called as loss\(result, target\)",
        ),
    ],
)
def test_a_loss_that_cannot_be_counted(loss: Any, said: str, losses: Path) -> None:
    model, x = segmenter()
    with pytest.raises(placer.PlacerError) as caught:
        placer.make_plan(model, {"devices": ["cuda:0"], "loss": loss}, x)
    message = str(caught.value).replace("\n", " ")
    assert re.search(said, message), message


def test_a_target_needs_a_function() -> None:
    with pytest.raises(placer.PlacerError, match="target: is given without a loss"):
        placer.make_plan(nn.Linear(2, 2), {"devices": ["cuda:0"]}, torch.empty(2, 2), target=3)


def test_verify_compares_with_the_spec_s_loss(losses: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 5, 1)).double()
    x = torch.randn(4, 1, 6, 6, 6, dtype=torch.float64)
    loss = {"function": "losses.py:dice_ce", "target": "4x1x6x6x6:int64<5"}
    spec = {"devices": ["cpu:0", "cpu:1"], "layers": {"0": "cpu:0", "1": "cpu:1"}, "loss": loss}
    seen: list[Tensor] = []

    def counting(output: Tensor, target: Tensor) -> Tensor:
        seen.append(target)
        return find_loss(LossSpec.model_validate(loss))(output, target)

    assert placer.verify(model, spec, x).ok
    target = torch.randint(5, (4, 1, 6, 6, 6))
    assert placer.verify(model, spec, x, loss_fn=counting, target=target).ok
    # In both models: the example, other values, and those in a step
    assert len(seen) == 6 and all(part is not None and part.equal(target) for part in seen)


def test_a_loss_in_float32_is_compared_as_such() -> None:
    torch.manual_seed(0)
    model = nn.Conv3d(1, 5, 3, padding=1).double()
    x, target = torch.randn(3, 1, 6, 6, 6, dtype=torch.float64), torch.randint(5, (3, 6, 6, 6))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.float(), target)

    found = placer.verify(
        model, {"devices": ["cpu:0"], "microbatches": 3}, x, loss_fn=loss, target=target
    )
    assert found.ok and {c.tolerance for c in found.comparisons} == {1e-4, 1e-10}


def test_a_target_of_other_inputs_is_named(losses: Path) -> None:
    model, _ = segmenter()
    spec = {"devices": ["cuda:0"], "loss": DICE}
    with pytest.raises(placer.CaptureError, match="the target is 4x1x16x16x16:int64<24, by"):
        placer.make_plan(model, spec, torch.empty(4, 1, 8, 8, 8, device="meta"))
