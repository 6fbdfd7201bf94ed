"""How long planning takes and what it allocates: from `import placer` to a plan, each run in a fresh process.

A run first imports torch and torchvision and makes the model on ``meta``, as a user's model file would;
how long those imports take is in the table too. Memory is the peak of resident memory above what the
process has then. Times are medians of three runs.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # importing torch is measured
    from torch import nn

GIB = 2**30
RUNS = 3
Shapes = list[tuple[int, ...]]  # of the inputs, or of the tensors in a single list


class Case(NamedTuple):
    """A model, the shapes of its inputs, and the spec's fields; those of ``auto`` if no devices are given."""

    build: Callable[[], nn.Module]
    shapes: Shapes
    devices: int
    fields: dict[str, Any]
    needs: str = ""  # the package that it needs
    as_list: bool = False  # the inputs are one list of tensors
    dtype: str = "float32"


def _unet(width: int, depth: int) -> nn.Module:
    from examples.unet3d import unet3d

    return unet3d(width=width, depth=depth, out_channels=3)


def _torchvision(name: str) -> nn.Module:
    import torchvision

    return torchvision.models.get_model(name)


def _slowfast() -> nn.Module:
    from pytorchvideo.models.hub import slowfast_r50

    model: nn.Module = slowfast_r50(pretrained=False)
    return model


def _ddpm() -> nn.Module:
    from denoising_diffusion_pytorch import Unet

    model: nn.Module = Unet(dim=64)
    return model


def _gpt3() -> nn.Module:
    import torch

    from examples.gpt3_ten_thousand import GPT

    with torch.device("meta"):
        return GPT()


def _auto(name: str) -> Case:
    """``auto`` for 64 images on eight cards, with a process each."""
    cards = [{"name": f"cuda:{i}", "kind": "rtx3090"} for i in range(8)]
    return Case(lambda: _torchvision(name), [(64, 3, 224, 224)], 0, {"devices": cards})


def _auto_gpt3(sequences: int) -> Case:
    machine = {"machine": "dgx-a100:1250", "precision": "bf16"}
    return Case(_gpt3, [(sequences, 2048)], 0, machine, dtype="int64")


_MEMORY, _TIME = {"objective": "memory"}, {"objective": "throughput", "microbatches": 2}
_CLIP = [(2, 3, 16, 224, 224)]
# The full MNI152 volume has 197 x 233 x 189 voxels, padded to multiples of 16.
CASES = {
    "3D U-Net, full MNI152 volume": Case(
        lambda: _unet(width=32, depth=4), [(1, 1, 208, 240, 192)], 2, _MEMORY
    ),
    "3D U-Net, 1 billion parameters": Case(
        lambda: _unet(width=215, depth=5), [(1, 1, 64, 64, 64)], 4, _MEMORY
    ),
    "ResNet50": Case(lambda: _torchvision("resnet50"), [(32, 3, 224, 224)], 2, _TIME),
    "Swin3D-T": Case(lambda: _torchvision("swin3d_t"), _CLIP, 2, _TIME),
    "MViT-v2 S": Case(lambda: _torchvision("mvit_v2_s"), _CLIP, 2, _TIME),
    "SlowFast R50": Case(
        _slowfast, [(2, 3, 8, 224, 224), (2, 3, 32, 224, 224)], 2, _TIME, "pytorchvideo", True
    ),
    "DDPM U-Net": Case(_ddpm, [(4, 3, 64, 64), (4,)], 2, _TIME, "denoising_diffusion_pytorch"),
    "`auto`: ResNet-152 on 8 devices": _auto("resnet152"),
    "`auto`: DenseNet-201 on 8 devices": _auto("densenet201"),
    "`auto`: EfficientNetV2-L on 8 devices": _auto("efficientnet_v2_l"),
    "`auto`: GPT-3, 1,536 sequences, 10,000 devices": _auto_gpt3(1536),
    "`auto`: GPT-3, 6,144 sequences, 10,000 devices": _auto_gpt3(6144),
    "`auto`: GPT-3, 12,288 sequences, 10,000 devices": _auto_gpt3(12288),
}


def measure(name: str) -> dict[str, float]:
    """Seconds and bytes of planning one case in this process."""
    start = time.process_time()
    import torch
    import torchvision  # noqa: F401

    from benchmarks.resident import begin_peak, peak

    imports = time.process_time() - start
    case = CASES[name]
    model = case.build().to("meta")
    dtype = getattr(torch, case.dtype)
    inputs = [torch.empty(shape, dtype=dtype, device="meta") for shape in case.shapes]
    devices = [{"name": f"cuda:{i}", "memory": 16 * GIB} for i in range(case.devices)]
    before = begin_peak()
    start, cpu = time.perf_counter(), time.process_time()
    import placer

    given = (inputs,) if case.as_list else tuple(inputs)
    if devices:
        spec = {"devices": devices, "loss": "mean_square", **case.fields}
        plan = placer.make_plan(model, spec, given)
    else:
        plan = placer.auto_plan(model, given, processes=True, **case.fields)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "nodes": sum(len(stage.nodes) for stage in plan.stages),
        "stages": len(plan.stages),
        "imports": imports,
        "seconds": time.perf_counter() - start,
        "cpu": time.process_time() - cpu,
        "bytes": peak() - before,
    }


def _run(name: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.planning", name]
    found: dict[str, float] = json.loads(
        subprocess.run(command, check=True, capture_output=True).stdout.splitlines()[-1]
    )
    return found


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
        return
    from benchmarks.record import write_result

    rows = []
    absent = {case.needs for case in CASES.values() if case.needs} - {
        case.needs for case in CASES.values() if case.needs and importlib.util.find_spec(case.needs)
    }
    for name, case in CASES.items():
        if case.needs in absent:
            continue
        runs = [_run(name) for _ in range(RUNS)]
        found = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        rows.append(
            [
                name,
                f"{found['parameters'] / 1e6:.1f} M",
                f"{found['nodes']:.0f}",
                f"{found['stages']:.0f}",
                f"{found['imports']:.1f}",
                f"{found['cpu']:.1f}",
                f"{found['seconds']:.1f}",
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
            "importing torch and torchvision, CPU s",
            "importing placer and planning, CPU s",
            "the same, s",
            "MiB above torch",
        ],
        rows,
        note=f"Not installed: {', '.join(sorted(absent))}." if absent else "",
    )


if __name__ == "__main__":
    main()
