"""How long planning takes and what it allocates: capture to plan, each case in a fresh process.

Memory is the peak of resident memory above what the process holds after importing torch.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

AFTER_TORCH = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

FULL_VOLUME = (1, 1, 208, 240, 192)  # 197 x 233 x 189 voxels, padded to multiples of 16


def full_volume_unet() -> tuple[nn.Module, tuple[int, ...]]:
    """The demo's model: width 32, depth 4."""
    from examples.unet3d import unet3d

    return unet3d(width=32, depth=4, out_channels=3), FULL_VOLUME


def billion_parameters() -> tuple[nn.Module, tuple[int, ...]]:
    """The same network, wide enough for a billion parameters, on a small volume."""
    from examples.unet3d import unet3d

    return unet3d(width=215, depth=5, out_channels=3), (1, 1, 64, 64, 64)


CASES: dict[str, tuple[Callable[[], tuple[nn.Module, tuple[int, ...]]], int]] = {
    "3D U-Net, full MNI152 volume": (full_volume_unet, 2),
    "3D U-Net, 1 billion parameters": (billion_parameters, 4),
}


def measure(name: str) -> dict[str, float]:
    """Seconds and bytes of planning one case in this process; the model is on meta."""
    import placer
    import placer.api

    build, devices = CASES[name]
    with torch.device("meta"):
        model, shape = build()
        x = torch.empty(shape)
    start = time.perf_counter()
    spec = {"devices": [f"cuda:{i}" for i in range(devices)], "objective": "memory"}
    plan = placer.make_plan(model, spec, (x,))
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "nodes": sum(len(stage.nodes) for stage in plan.stages),
        "stages": len(plan.stages),
        "seconds": seconds,
        "bytes": after - AFTER_TORCH,
    }


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
        return
    from benchmarks.record import write_result

    rows = []
    for name in CASES:
        command = [sys.executable, "-m", "benchmarks.planning", name]
        found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        rows.append(
            [
                name,
                f"{found['parameters'] / 1e6:.1f} M",
                found["nodes"],
                found["stages"],
                f"{found['seconds']:.2f}",
                f"{found['bytes'] / 2**20:.0f}",
            ]
        )
    write_result(
        "planning",
        "Planning time and memory",
        "python -m benchmarks.planning",
        ["model", "parameters", "nodes", "stages", "seconds, capture to plan", "MiB above torch"],
        rows,
    )


if __name__ == "__main__":
    main()
