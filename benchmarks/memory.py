"""Peak memory two ways: predicted by the plan, and simulated by the ledger.

Models too large for this machine are planned: nothing is allocated, and both are compared device by device.
With ``--matrix``: the same over the equivalence suite (`memory_matrix`).
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
    from benchmarks import memory_matrix

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--matrix",
        nargs="*",
        metavar="MODEL",
        choices=[*memory_matrix.MODELS],
        help=f"the equivalence suite, these models anew or all: {', '.join(memory_matrix.MODELS)}",
    )
    given = parser.parse_args()
    if given.matrix is None:
        write_simulated()
    else:
        memory_matrix.main(given.matrix)


def write_simulated() -> None:
    write_result(
        "memory_simulated",
        "Peak bytes per device, predicted by the plan and simulated by the ledger",
        "python -m benchmarks.memory",
        ["model", "devices", "predicted, GiB", "simulated, GiB", "largest difference"],
        predicted_and_simulated(),
        "Training, fp32. Nothing is allocated: models and inputs are on meta.",
    )


if __name__ == "__main__":
    main()
