"""How long planning takes and what it allocates: capture to plan, each case in a fresh process.

CPU seconds are those of placer's imports, capture and plan, without the imports of torch and of the
model's library, and with the garbage collector as the ``placer`` command sets it. Of three runs the
fastest counts. Memory is the peak of resident memory above what the process holds after importing
torch. Cases whose library is not installed are left out.
"""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

AFTER_TORCH = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

FULL_VOLUME = (1, 1, 208, 240, 192)  # 197 x 233 x 189 voxels, padded to multiples of 16
_GIB = 2**30


def full_volume_unet() -> tuple[nn.Module, tuple[Any, ...]]:
    """The demo's model: width 32, depth 4."""
    from examples.unet3d import unet3d

    return unet3d(width=32, depth=4, out_channels=3), (torch.empty(FULL_VOLUME),)


def billion_parameters() -> tuple[nn.Module, tuple[Any, ...]]:
    """The same network, wide enough for a billion parameters, on a small volume."""
    from examples.unet3d import unet3d

    return unet3d(width=215, depth=5, out_channels=3), (torch.empty(1, 1, 64, 64, 64),)


def video_transformer(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """A video model of torchvision, on 16 frames of 224 x 224."""
    import torchvision.models.video as video

    return getattr(video, name)(weights=None), (torch.empty(1, 3, 16, 224, 224),)


def slowfast() -> tuple[nn.Module, tuple[Any, ...]]:
    """SlowFast R50 of pytorchvideo."""
    from pytorchvideo.models.slowfast import create_slowfast

    frames = [torch.empty(2, 3, 8, 224, 224), torch.empty(2, 3, 32, 224, 224)]
    return create_slowfast(), (frames,)


def diffusion_unet() -> tuple[nn.Module, tuple[Any, ...]]:
    """The U-Net of denoising-diffusion-pytorch, as its README builds it."""
    from denoising_diffusion_pytorch import Unet

    return Unet(dim=64, dim_mults=(1, 2, 4, 8)), (torch.empty(4, 3, 128, 128), torch.empty(4))


@dataclass(frozen=True, slots=True)
class Case:
    """A model, the devices that it is planned for, and the package that it comes from."""

    build: Callable[[], tuple[nn.Module, tuple[Any, ...]]]
    devices: int
    objective: str = "throughput"
    package: str = "torch"


CASES = {
    "3D U-Net, full MNI152 volume": Case(full_volume_unet, 2, "memory"),
    "3D U-Net, 1 billion parameters": Case(billion_parameters, 4, "memory"),
    "MViT-v2 S": Case(lambda: video_transformer("mvit_v2_s"), 2, package="torchvision"),
    "Swin3D-T": Case(lambda: video_transformer("swin3d_t"), 2, package="torchvision"),
    "SlowFast": Case(slowfast, 2, package="pytorchvideo"),
    "DDPM U-Net": Case(diffusion_unet, 2, package="denoising_diffusion_pytorch"),
}


def measure(name: str) -> dict[str, float]:
    """Seconds and bytes of planning one case in this process; the model is on meta."""
    case = CASES[name]
    FakeTensorMode()  # imports torch._dynamo, sympy and more of torch
    gc.set_threshold(200_000)
    with torch.device("meta"):
        model, args = case.build()
    before, start = time.process_time(), time.perf_counter()
    import placer

    devices = [{"name": f"cuda:{i}", "memory": 16 * _GIB} for i in range(case.devices)]
    spec = {"devices": devices, "objective": case.objective}
    imported = time.perf_counter()
    plan = placer.make_plan(model, spec, args)
    end = time.perf_counter()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "nodes": sum(len(stage.nodes) for stage in plan.stages),
        "stages": len(plan.stages),
        "seconds": end - imported,
        "cpu": time.process_time() - before,
        "wall": end - start,
        "bytes": after - AFTER_TORCH,
    }


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
        return
    from benchmarks.record import write_result

    rows = []
    for name, case in CASES.items():
        if find_spec(case.package) is None:
            continue
        command = [sys.executable, "-m", "benchmarks.planning", name]
        runs = [
            json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            for _ in range(3)
        ]
        found = min(runs, key=lambda run: run["cpu"])
        rows.append(
            [
                name,
                f"{found['parameters'] / 1e6:.1f} M",
                found["nodes"],
                found["stages"],
                f"{found['seconds']:.2f}",
                f"{found['cpu']:.2f}",
                f"{found['bytes'] / 2**20:.0f}",
            ]
        )
    write_result(
        "planning",
        "Planning time and memory",
        "python -m benchmarks.planning",
        [
            "model",
            "parameters",
            "nodes",
            "stages",
            "seconds, capture to plan",
            "CPU seconds, with placer's imports",
            "MiB above torch",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
