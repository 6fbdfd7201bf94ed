"""Peak memory three ways: predicted by the plan, simulated by the ledger, measured in a real step.

The first table plans models too large for this machine: nothing is allocated, and prediction and
simulation are compared device by device. The second runs a real step on the CPU, where the peak is
read from the allocator's own events (``torch.profiler``), which share no code with the ledger; all
stages are on the one CPU there, so it has one device. What oneDNN's convolutions take and give back
inside one call is listed apart: a placement does not change it, and another device has its own.
With ``--matrix``: prediction against simulation over the equivalence suite (`memory_matrix`);
``--only`` makes one of the two tables.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchvision
from torch import nn
from torch._C._profiler import _EventType
from torch.nn import functional as F

import placer
from benchmarks.record import write_result
from examples.unet3d import unet3d
from placer.simulation.optimizers import make_optimizer

GIB, MIB = 2**30, 2**20
Build = Callable[[], tuple[nn.Module, torch.Tensor]]


def resnet50() -> tuple[nn.Module, torch.Tensor]:
    return torchvision.models.resnet50(), torch.empty(10, 3, 1024, 1024)


def unet_128() -> tuple[nn.Module, torch.Tensor]:
    return unet3d(width=32, depth=4), torch.empty(1, 1, 128, 128, 128)


def r3d_18() -> tuple[nn.Module, torch.Tensor]:
    return torchvision.models.video.r3d_18(), torch.empty(4, 3, 16, 112, 112)


def vit() -> tuple[nn.Module, torch.Tensor]:
    return torchvision.models.vit_b_16(), torch.empty(16, 3, 224, 224)


HAND = {
    "ResNet50, by hand after layer2": (resnet50, "specs/resnet50_two_devices.json"),
    "3D U-Net 128^3, encoder and decoder": (unet_128, "specs/unet3d_two_devices.json"),
}
AUTO: dict[str, tuple[Build, str]] = {
    "ResNet50, 10 x 1024^2": (resnet50, "sgd"),
    "3D U-Net 128^3": (unet_128, "adam"),
    "r3d_18, 4 x 16 x 112^2": (r3d_18, "adam"),
    "ViT-B/16, 16 x 224^2": (vit, "adam"),
}


def predicted_and_simulated() -> Iterator[list[object]]:
    """Rows of the first table."""
    cases: list[tuple[str, Build, Any]] = [(n, b, path) for n, (b, path) in HAND.items()]
    for name, (build, optimizer) in AUTO.items():
        for count in (1, 2, 4):
            devices = [f"cuda:{i}" for i in range(count)]
            spec = {"devices": devices, "objective": "memory", "optimizer": optimizer}
            cases.append((f"{name}, automatic", build, spec))
    for name, build, spec in cases:
        with torch.device("meta"):
            model, x = build()
        plan = placer.make_plan(model, spec, (x,))
        report = placer.simulate(model, plan, (x,))
        worst = max(abs(d.peak / d.predicted - 1) for d in report.devices)
        yield [
            name,
            len(report.devices),
            " + ".join(f"{d.predicted / GIB:.2f}" for d in report.devices),
            " + ".join(f"{d.peak / GIB:.2f}" for d in report.devices),
            f"{worst:.2%}",
        ]


def measured() -> Iterator[list[object]]:
    """Rows of the second table."""
    cases: dict[str, tuple[nn.Module, torch.Tensor]] = {
        "ResNet50, 4 x 128^2": (torchvision.models.resnet50(), torch.randn(4, 3, 128, 128)),
        "3D U-Net (width 16) 64^3": (unet3d(width=16, depth=4), torch.randn(1, 1, 64, 64, 64)),
        "r3d_18, 2 x 8 x 64^2": (
            torchvision.models.video.r3d_18(),
            torch.randn(2, 3, 8, 64, 64),
        ),
        "ViT-B/16, 2 x 224^2": (torchvision.models.vit_b_16(), torch.randn(2, 3, 224, 224)),
    }
    for name, (model, x) in cases.items():
        spec = {"devices": ["cpu:0"], "optimizer": "sgd_momentum"}
        plan = placer.make_plan(model, spec, (x,))
        (simulated,) = placer.simulate(model, plan, (x,), loss_fn=_loss).devices
        real, tensors = allocator_peaks(model, plan, x, _loss)
        yield [
            name,
            f"{simulated.predicted / MIB:.1f}",
            f"{simulated.peak / MIB:.1f}",
            f"{tensors / MIB:.1f}",
            f"{simulated.peak / tensors - 1:+.2%}",
            f"{real / MIB:.1f}",
        ]


def _loss(output: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, output.new_zeros(output[:, 0].shape, dtype=torch.long))


def allocator_peaks(
    model: nn.Module,
    plan: placer.Plan,
    x: torch.Tensor,
    loss_fn: Callable[[Any], torch.Tensor],
) -> tuple[int, int]:
    """Most bytes that the CPU allocator held in the second step, with weights and optimizer state.

    First all of them, then without what a convolution takes and gives back inside one call.
    """
    placed = placer.compile(model, plan, (x,), run_on="cpu")
    trained = [p for p in placed.parameters() if p.requires_grad]
    optimizer = make_optimizer(plan.optimizer, trained)

    def step() -> None:
        placed.step(x, loss_fn=loss_fn)
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    before = sum(t.nbytes for t in (*placed.parameters(), *placed.buffers(), *state))
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        step()
    events: list[tuple[int, int, int, int | None]] = []  # time, address, bytes, convolution
    for root in profile.profiler.kineto_results.experimental_event_tree():
        _collect(root, None, events)
    events.sort()
    made_in: dict[int, int | None] = {}
    workspaces, live = set(), []
    for index, (_, address, nbytes, call) in enumerate(events):
        if nbytes > 0:
            made_in[address] = index
        elif address in made_in:
            made = made_in.pop(address)
            assert made is not None
            if call is not None and events[made][3] == call:
                workspaces |= {made, index}
    for without in (set(), workspaces):
        changes = (n for i, (_, _, n, _) in enumerate(events) if i not in without)
        live.append(before + max(itertools.accumulate(changes)))
    return live[0], live[1]


def _collect(event: Any, call: int | None, events: list[tuple[int, int, int, int | None]]) -> None:
    """Allocator events below ``event``, each with the convolution's call that it happened in."""
    if event.tag == _EventType.Allocation:
        fields = event.extra_fields
        events.append((event.start_time_ns, fields.ptr, fields.alloc_size, call))
    if call is None and event.name in ("aten::convolution", "aten::convolution_backward"):
        call = event.id
    for child in event.children:
        _collect(child, call, events)


def main() -> None:
    from benchmarks import memory_matrix

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--only", choices=["simulated", "measured"], help="one of the two tables")
    parser.add_argument(
        "--matrix",
        nargs="*",
        metavar="MODEL",
        choices=[*memory_matrix.MODELS],
        help="the equivalence suite, these models anew or all: " + ", ".join(memory_matrix.MODELS),
    )
    given = parser.parse_args()
    if given.matrix is not None:
        memory_matrix.main(given.matrix)
        return
    if given.only != "measured":
        write_simulated()
    if given.only != "simulated":
        write_measured()


def write_simulated() -> None:
    write_result(
        "memory_simulated",
        "Peak bytes per device, predicted by the plan and simulated by the ledger",
        "python -m benchmarks.memory --only simulated",
        ["model", "devices", "predicted, GiB", "simulated, GiB", "largest difference"],
        predicted_and_simulated(),
        "Training, fp32. Nothing is allocated: models and inputs are on meta.",
    )


def write_measured() -> None:
    write_result(
        "memory_measured",
        "Peak bytes of a real training step on the CPU",
        "python -m benchmarks.memory --only measured",
        [
            "model",
            "predicted, MiB",
            "simulated, MiB",
            "measured tensors, MiB",
            "simulated / measured",
            "with convolution workspaces, MiB",
        ],
        measured(),
        "SGD with momentum, second step; measured by the allocator's events through "
        "`torch.profiler(profile_memory=True)`.",
    )


if __name__ == "__main__":
    main()
