"""Compares predicted with simulated peaks, and simulated peaks with torch's own tracker and allocator."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import models
import pytest
import torch
import torchvision
from placements import estimated_plan
from torch import nn
from torch.nn import functional as F

import placer
from placer.planner.build import build_plan
from placer.program import lower
from placer.simulation.simulate import dry_run

pytestmark = pytest.mark.usefixtures("one_capture")

ROWS = 12
Case = tuple[nn.Module, tuple[torch.Tensor, ...]]


@cache
def _resnet18() -> Case:
    return torchvision.models.resnet18(num_classes=5), (torch.randn(ROWS, 3, 64, 64),)


def _plan(model: nn.Module, args: Any, **fields: Any) -> placer.Plan:
    stages = fields.pop("stages")
    spec = {"devices": [f"cuda:{i}" for i in range(stages)], **fields}
    return estimated_plan(model, spec, args)


def test_replicas_and_other_optimizers_are_predicted_too() -> None:
    """All else is in `benchmarks.memory_matrix`."""
    model, args = models.ConvNet(), (torch.randn(ROWS, 1, 8, 8),)
    fields = {"microbatches": 2, "schedule": "1F1B", "optimizer": "sgd_momentum"}
    plan = _plan(model, args, stages=2, replicas=3, **fields)
    report = placer.simulate(model, plan, args)
    assert report.step_ok
    assert [d.device for d in report.devices] == [f"cuda:{i}" for i in range(6)]
    for device in report.devices:
        assert device.peak == pytest.approx(device.predicted, rel=0.01)


def test_the_peaks_moment_names_the_layer_and_the_largest_tensors() -> None:
    model, args = _resnet18()
    plan = _plan(model, args, stages=1, optimizer="sgd")
    (device,) = placer.simulate(model, plan, args).devices
    assert device.phase == "backward"
    assert device.layer or device.node
    sizes = [tensor.nbytes for tensor in device.largest]
    assert len(sizes) == 10 and sizes == sorted(sizes, reverse=True)
    assert {"layer4.0.conv2.weight", "layer4.1.conv1.weight"} <= {t.name for t in device.largest}


@pytest.mark.parametrize("processes", [False, True])
def test_slices_of_a_program_that_is_rewritten_have_layers_too(processes: bool) -> None:
    """The program of a slice is another one where a rewrite depends on sizes."""
    model, args = models.ConvNet(), (torch.randn(4, 1, 8, 8),)
    spec = {"devices": ["cuda:0", "cuda:1"], "space": 2, "replicas": 2, "optimizer": "sgd"}
    for device in placer.simulate(model, spec, args, processes=processes).devices:
        made = [block for block in device.largest if block.kind in ("forward", "backward")]
        assert {"conv2", "fc1"} & {block.where.layer for block in made}


def test_the_optimizer_can_be_the_peak() -> None:
    model = nn.Linear(64, 64)
    plan = _plan(model, (torch.randn(1, 64),), stages=1, optimizer="adam")
    (device,) = placer.simulate(model, plan, (torch.randn(1, 64),)).devices
    assert device.phase == "optimizer"


def test_a_real_step_holds_what_the_simulation_says() -> None:
    """The CPU allocator's own events, which share no code with the ledger."""
    model, (x,) = _resnet18()
    model = model.train()
    target = torch.randint(0, 5, (ROWS,))
    plan = _plan(model, (x,), stages=1, optimizer="sgd_momentum")
    (simulated,) = placer.simulate(
        model, plan, (x,), loss_fn=lambda y: F.cross_entropy(y, target.new_zeros(len(y)))
    ).devices
    placed = placer.compile(model, plan, (x,), run_on="cpu")
    measured = _measured_peak(placed, x, target)
    assert measured >= 0.99 * simulated.peak
    if (
        torch.backends.cpu.get_cpu_capability() == "AVX512"
    ):  # other convolutions have buffers of their own
        assert measured == pytest.approx(simulated.peak, rel=0.01)


def _contrastive(output: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("replicas", [1, 2])
def test_so_does_a_loss_over_the_whole_batch(replicas: int) -> None:
    """The scores of all rows with each other are most of the memory; each slice has a quarter of the rows."""
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)),
        torch.randn(1024, 64),
    )
    fields = {"stages": 1, "optimizer": "sgd_momentum", "replicas": replicas}
    spec = placer.PlacementSpec(devices=["cpu:0"], microbatches=4 // replicas, **fields)
    plan = placer.make_plan(model, spec, (x,), loss_fn=_contrastive, whole_batch=True)
    assert plan.loss is not None and plan.loss.spec is not None and plan.loss.spec.whole_batch
    placed = placer.compile(model, plan, (x,), run_on="cpu")
    measured = _measured_peak(placed, x, None, loss_fn=_contrastive, whole_batch=True)
    scores = len(x) ** 2 * x.element_size()
    for processes in (False, True):
        report = placer.simulate(
            model, plan, (x,), loss_fn=_contrastive, whole_batch=True, processes=processes
        )
        assert report.devices[0].peak > 2 * scores
        if replicas == 1 and not processes:  # ranks on CPUs read inputs in place
            assert measured == pytest.approx(report.devices[0].peak, rel=0.01)
    assert plan.devices[0].peak > 2 * scores


def _measured_peak(
    placed: nn.Module,
    x: torch.Tensor,
    target: torch.Tensor | None,
    *,
    loss_fn: Callable[..., torch.Tensor] = F.cross_entropy,
    **options: Any,
) -> int:
    """Peak bytes of the allocator in the second step, beyond weights and optimizer state."""
    optimizer = torch.optim.SGD(placed.parameters(), lr=0.1, momentum=0.9, foreach=False)

    def step() -> None:
        placed.step(x, target=target, loss_fn=loss_fn, **options)
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    before = sum(t.nbytes for t in (*placed.parameters(), *placed.buffers(), *state))
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        step()
    live = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return before + most


def test_what_backward_allocates_is_of_the_layer_whose_backward_it_is() -> None:
    layers = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)
    model, x = nn.Sequential(*layers), torch.randn(3, 4)
    program = lower(model, (x,))
    plan = build_plan(program, placer.load_spec({"devices": ["cpu"]}), [x])
    blocks = dry_run(program, plan, [x]).found[0].timeline.blocks
    found = [(b.layer, b.shape) for b in blocks if b.where.node and b.where.phase == "backward"]
    # Gradients of what each layer was given; the first one's input needs none.
    assert {("4", (3, 6)), ("3", (3, 6)), ("2", (3, 8)), ("1", (3, 8))} <= {*found}
    assert {("2", (6, 8)), ("0", (8, 4))} <= {*found}  # of weights
