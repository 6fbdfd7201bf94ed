"""Seconds on a CPU: predicted with `placer profile` and measured, in turns, for 12 models.

A round measures steps of the plain model (for the profile) and steps of the placed one (which are
compared with the plan made from it), one after the other, so that a machine that slows down slows both.
Seconds are processor seconds of one thread, because others share the machine. The table also has
estimates by the catalogue and by calibration.

    python -m benchmarks.profile_cpu [MODEL ...]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn

import placer
from benchmarks.loss import LOSS
from benchmarks.record import write_result
from examples.unet3d import unet3d
from placer.cost import mean_square
from placer.machine.catalogue import CATALOGUE, DeviceKind
from placer.machine.kindfile import kind_to_json, save_kind
from placer.profiling import calibrate, profile_model
from placer.profiling.clocks import HostClock
from placer.program import flatten_call, lower

_CLOCK = HostClock(time.process_time)
_ROUNDS = 5

Build = Callable[[], tuple[nn.Module, Tensor]]


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


class _LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 128, 2, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def _mlp() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)]
    return nn.Sequential(*layers, nn.Linear(512, 10))


_vision = torchvision.models
MODELS: dict[str, Build] = {
    "MLP, 8 x 512, 256 rows": lambda: (_mlp(), torch.randn(256, 512)),
    "LSTM, 2 x 128, 8 x 64 steps": lambda: (_LSTM(), torch.randn(8, 64, 64)),
    "transformer encoder, 4 x 128, 8 x 64": lambda: (_encoder(), torch.randn(8, 64, 128)),
    "3D U-Net, width 8, 32³": lambda: (unet3d(width=8, depth=3), torch.randn(1, 1, 32, 32, 32)),
    "ResNet-18, 2 x 112²": lambda: (_vision.resnet18(), torch.randn(2, 3, 112, 112)),
    "ResNet-50, 2 x 96²": lambda: (_vision.resnet50(), torch.randn(2, 3, 96, 96)),
    "VGG-11, 1 x 64²": lambda: (_vision.vgg11(), torch.randn(1, 3, 64, 64)),
    "MobileNetV2, 4 x 96²": lambda: (_vision.mobilenet_v2(), torch.randn(4, 3, 96, 96)),
    "DenseNet-121, 2 x 64²": lambda: (_vision.densenet121(), torch.randn(2, 3, 64, 64)),
    "SqueezeNet, 4 x 112²": lambda: (_vision.squeezenet1_1(), torch.randn(4, 3, 112, 112)),
    "Swin-T, 1 x 96²": lambda: (_vision.swin_t(), torch.randn(1, 3, 96, 96)),
    "r3d_18, 1 x 4 x 48²": lambda: (_vision.video.r3d_18(), torch.randn(1, 3, 4, 48, 48)),
}


def _save(kind: DeviceKind, path: Path) -> str:
    values = kind_to_json(
        kind, device="this CPU", device_type="cpu", torch=torch.__version__, measured=""
    )
    save_kind(values, path)
    return str(path)


def compare(build: Build, calibrated: str, folder: Path) -> dict[str, float]:
    """Seconds of a step: measured, and estimated by catalogue, calibration and profile."""
    torch.manual_seed(0)
    model, x = build()
    program = lower(model, (x,))
    leaves = flatten_call(program.call, (x,), {})
    placed = placer.compile(model, {"devices": ["cpu"]}, (x,))
    adam = torch.optim.Adam(placed.parameters(), lr=0.0)
    took: list[float] = []
    profiled: list[float] = []
    for number in range(_ROUNDS):
        found = profile_model(program, model, leaves, base=CATALOGUE["cpu"], clock=_CLOCK, rounds=3)
        kind = _save(found.kind, folder / f"profile-{number}.json")
        profiled.append(_predicted(model, x, kind))
        steps = []
        for _ in range(4):
            start = time.process_time()
            placed.step(x, loss_fn=mean_square, reduction="mean")
            adam.step()
            adam.zero_grad()
            steps.append(time.process_time() - start)
        took.append(statistics.median(steps[1:]))
    return {
        "measured": statistics.median(took),
        "catalogue": _predicted(model, x, "cpu"),
        "calibrated": _predicted(model, x, calibrated),
        "profiled": statistics.median(profiled),
        "worst": max((p / t - 1 for p, t in zip(profiled, took, strict=True)), key=abs),
    }


def _predicted(model: nn.Module, x: Tensor, kind: str) -> float:
    spec = {"devices": [{"name": "cpu", "kind": kind}], **LOSS}
    return placer.make_plan(model, spec, (x,)).step_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", help=", ".join(MODELS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows, near, load = [], 0, os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        calibrated = _save(calibrate("cpu", clock=_CLOCK, seconds=0.1), folder / "calibrated.json")
        for model in given.models or MODELS:
            found = compare(MODELS[model], calibrated, folder)
            measured = found["measured"]
            near += abs(found["profiled"] / measured - 1) <= 0.1
            cells = [
                f"{found[key] * 1e3:.1f} ({found[key] / measured:.2f})"
                for key in ("catalogue", "calibrated", "profiled")
            ]
            rows.append([model, f"{measured * 1e3:.1f}", *cells, f"{found['worst']:+.0%}"])
            print(rows[-1], flush=True)
    note = (
        f"Milliseconds of a training step with Adam, in brackets predicted / measured; medians of "
        f"{_ROUNDS} rounds. After `profile` {near} of {len(rows)} are within 10 %. Worst round: the "
        "profile of one round against the steps of the same round. Processor time of one thread; the "
        f"machine was shared, with a load of {load:.1f} before and {os.getloadavg()[0]:.1f} after."
    )
    header = ["model", "measured", "catalogue", "calibrated", "profiled", "worst round"]
    command = "python -m benchmarks.profile_cpu"
    write_result(
        "profile_cpu", "Seconds on a CPU, predicted and measured", command, header, rows, note
    )


if __name__ == "__main__":
    main()
