"""Peak memory three ways: predicted by the plan, simulated by the ledger, measured in a real step.

The first table plans models too large for this machine: nothing is allocated, and prediction and
simulation are compared device by device. The second (`memory_measured`) runs real steps on the CPU,
where the peak is read from the allocator's own events (``torch.profiler``), which share no code with
the ledger; all stages are on the same CPU, so it has one device.
With ``--matrix``: prediction against simulation over the equivalence suite (`memory_matrix`);
``--simulated`` and ``--measured`` make one of the two tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchvision
from torch import nn

import placer
from benchmarks.loss import MEAN_SQUARE
from benchmarks.record import write_result
from examples.unet3d import unet3d
from placer.api import as_spec
from placer.planner.build import build_plan
from placer.program import flatten_call, lower

GIB = 2**30
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
        program = lower(model, (x,))
        leaves = flatten_call(program.call, (x,), {})
        wanted = as_spec(spec).model_copy(update={"loss": MEAN_SQUARE.spec})
        plan = build_plan(program, wanted, leaves)  # as estimated, not as dry-run
        report = placer.simulate(model, plan, (x,))
        worst = max(abs(d.peak / d.predicted - 1) for d in report.devices)
        yield [
            name,
            len(report.devices),
            " + ".join(f"{d.predicted / GIB:.2f}" for d in report.devices),
            " + ".join(f"{d.peak / GIB:.2f}" for d in report.devices),
            f"{worst:.2%}",
        ]


def main() -> None:
    from benchmarks import memory_matrix, memory_measured

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    for flag, pages, models in (
        ("--measured", "the second table", memory_measured.MODELS),
        ("--matrix", "the equivalence suite", memory_matrix.MODELS),
    ):
        parser.add_argument(
            flag,
            nargs="*",
            metavar="MODEL",
            choices=[*models],
            help=f"{pages}, these models anew or all: {', '.join(models)}",
        )
    parser.add_argument("--simulated", action="store_true", help="the first table")
    given = parser.parse_args()
    every = given.measured is None and given.matrix is None and not given.simulated
    if given.simulated or every:
        write_simulated()
    if given.measured is not None or every:
        memory_measured.main(given.measured or ())
    if given.matrix is not None:
        memory_matrix.main(given.matrix)


def write_simulated() -> None:
    write_result(
        "memory_simulated",
        "Peak bytes per device, predicted by the plan and simulated by the ledger",
        "python -m benchmarks.memory --simulated",
        ["model", "devices", "predicted, GiB", "simulated, GiB", "largest difference"],
        predicted_and_simulated(),
        "Training, fp32. Nothing is allocated: models and inputs are on meta.",
    )


if __name__ == "__main__":
    main()
