"""Seconds of a training step on a GPU: predicted by the catalogue, after ``placer profile``, and measured.

The models, or their sizes, are none of those to which the catalogue's rates were fitted. Every model trains
in a process of its own; a step is the median of the third and later ones. Then `placer.profile` measures the
nodes, and the step is predicted again. With --calibrate the rates that `placer calibrate` measures are tried
too.

    python -m benchmarks.steps_gpu [CASE ...] [--calibrate] [--resume]
    python -m benchmarks.steps_gpu --device cpu    # small models, to try it out
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

import placer
from benchmarks.fresh import (
    Job,
    Report,
    Row,
    add_options,
    answer,
    choose,
    measure_all,
    output_folder,
    take_turn,
)
from benchmarks.gpu_cases import PROFILED
from benchmarks.loss import LOSS
from benchmarks.memory import Build, r3d_18
from benchmarks.memory_gpu import GPT2, cube, trained_steps
from benchmarks.record import gpu_kind, table
from examples.unet3d import unet3d
from placer.machine.kindfile import save_kind
from placer.profiling import calibrate, file_values

_STEPS, _WARM = 10, 2
_GOAL, _PROFILED_GOAL = 0.25, 0.10
_CALIBRATION = "calibration"
_vision = torchvision.models


def _images(build: Callable[[], nn.Module], rows: int) -> Build:
    return lambda: (build(), torch.empty(rows, 3, 224, 224))


def _clip(build: Callable[[], nn.Module]) -> Build:
    return lambda: (build(), torch.empty(4, 3, 16, 112, 112))


def _resnet50_3d() -> tuple[nn.Module, Tensor]:
    from monai.networks.nets import resnet50

    model = resnet50(spatial_dims=3, n_input_channels=1, num_classes=3)
    return model, torch.empty(4, 1, 96, 96, 96)


# name: model and batch, and its family
MODELS: dict[str, tuple[Build, str]] = {
    "U-Net 128³": (cube("U-Net", 128), "U-Net"),
    "SegResNet 160³": (cube("SegResNet", 160), "SegResNet"),
    "DynUNet 128³": (cube("DynUNet", 128), "DynUNet"),
    "SwinUNETR 96³": (cube("SwinUNETR", 96), "SwinUNETR"),
    "r3d_18, 4 x 16 x 112²": (r3d_18, "r3d_18"),
    "R(2+1)D-18, 4 x 16 x 112²": (_clip(_vision.video.r2plus1d_18), "r2plus1d_18"),
    "3D ResNet-50, 4 x 96³": (_resnet50_3d, "3D ResNet"),
    "ResNet50, 16 x 224²": (_images(_vision.resnet50, 16), "ResNet"),
    "ConvNeXt-T, 32 x 224²": (_images(_vision.convnext_tiny, 32), "ConvNeXt"),
    "ViT-B/16, 32 x 224²": (_images(_vision.vit_b_16, 32), "ViT"),
    "Swin-T, 32 x 224²": (_images(_vision.swin_t, 32), "Swin"),
    "EfficientNet-B0, 64 x 224²": (_images(_vision.efficientnet_b0, 64), "EfficientNet"),
    "GPT-2 size, 4 x 1024": (lambda: (GPT2(), torch.zeros(4, 1024, dtype=torch.long)), "GPT-2"),
}
# In the fit: 3D U-Net 128³ in bf16.
_FITTED = {("U-Net 128³", "bf16")}
SMALL: dict[str, tuple[Build, str]] = {
    "perceptron": (
        lambda: (
            nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 8)),
            torch.empty(64, 256),
        ),
        "perceptron",
    ),
    "3D U-Net (width 4) 16³": (
        lambda: (unet3d(width=4, depth=2), torch.empty(1, 1, 16, 16, 16)),
        "U-Net",
    ),
}
_FAMILIES = {case.family for case in PROFILED.values()}


def names_of(models: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Case -> model and precision: those that the rates were not fitted to."""
    return {
        f"{model}, {precision}": (model, precision)
        for model in models
        for precision in ("fp32", "bf16")
        if (model, precision) not in _FITTED
    }


def compare(
    build: Build, precision: str, *, device: str, kind: str, calibrated: str | None = None
) -> Row:
    """Seconds of a step on ``device``: measured, and predicted with each source of times."""
    torch.manual_seed(0)
    model, x = build()
    if x.is_floating_point():
        x = torch.randn(x.shape)
    name = f"{device}:0" if device == "cuda" else device

    def plan(source: str) -> placer.Plan:
        spec = {"devices": [{"name": name, "kind": source}], "precision": precision, **LOSS}
        return placer.make_plan(model, spec, (x,))

    known = plan(kind)
    predicted = {"catalogue": known.step_seconds}
    if calibrated is not None:
        predicted["calibrated"] = plan(calibrated).step_seconds
    if device == "cuda":
        take_turn()
    here = x.to(name)  # the step does not copy its input
    steps = list(trained_steps(model, known, here, _WARM + _STEPS, device=device))
    row = {
        "kind": kind,
        "measured": statistics.median(step.seconds for step in steps[_WARM:]),
        **predicted,
        "starved": sum(d.starved for d in known.devices),
    }
    if device == "cuda":
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        placer.profile(model, x, output=path, device=name, kind=kind, precision=precision)
        row["profiled"] = plan(str(path)).step_seconds
    return row


def jobs(
    names: Sequence[str], device: str, calibrated: Path | None, rows: Mapping[str, Row]
) -> Iterator[Job]:
    """The calibration, if it is wanted, then the cases; ``rows`` has what was found, by the keys."""
    mode = "expandable" if device == "cuda" else None
    values: Row = {"device": device}
    if calibrated is not None:
        values["calibration"] = str(calibrated)
        yield Job(key=_CALIBRATION, values={**values, "case": _CALIBRATION}, allocator=mode)
        if _CALIBRATION not in rows:
            return
    for name in names:
        yield Job(key=name, values={**values, "case": name}, allocator=mode)


def lines_of(rows: Sequence[Row]) -> list[str]:
    """The table, and the shares that are near."""
    rows = [row for row in rows if row["case"] != _CALIBRATION]
    sources = [s for s in ("catalogue", "calibrated", "profiled") if any(s in row for row in rows)]
    cells = []
    for row in rows:
        said = [
            f"{row[s] * 1e3:.1f} ({row[s] / row['measured']:.2f})" if s in row else ""
            for s in sources
        ]
        fitted = "yes" if row["family"] in _FAMILIES else "no"
        cells.append([row["case"], fitted, f"{row['measured'] * 1e3:.1f}", *said])
    lines = table(["step", "family in the fit", "measured, ms", *sources], cells)
    for title, some in (
        ("All", rows),
        ("Families that are not in the fit", [r for r in rows if r["family"] not in _FAMILIES]),
    ):
        if not some:
            continue
        shares = [
            f"{s} {_near(some, s, _GOAL)} and {_near(some, s, _PROFILED_GOAL)}" for s in sources
        ]
        lines += [f"{title}, within 25 % and within 10 %: {'; '.join(shares)}.", ""]
    return [
        *lines,
        "The goals: within 25 % in 80 % of the steps by the catalogue, within 10 % after `placer profile`. "
        f"A step with Adam, the median of {_STEPS} after {_WARM}; in brackets predicted / measured; kind "
        f"{', '.join(sorted({row['kind'] for row in rows}))}.",
        "",
    ]


def _near(rows: Sequence[Row], source: str, goal: float) -> str:
    ratios = [row[source] / row["measured"] for row in rows if source in row]
    near = sum(abs(ratio - 1) <= goal for ratio in ratios)
    return f"{near} of {len(ratios)}"


def _job(values: Mapping[str, Any]) -> Row:
    device = values["device"]
    name = f"{device}:0" if device == "cuda" else device
    if values["case"] == _CALIBRATION:
        seconds = 0.1 if device == "cuda" else 0.005
        if device == "cuda":
            take_turn()
        path = Path(values["calibration"])
        save_kind(file_values(calibrate(name, seconds=seconds), name), path)
        return {}
    models = MODELS | SMALL
    model, precision = names_of(models)[values["case"]]
    build, family = models[model]
    kind = gpu_kind() if device == "cuda" else "cpu"
    calibration = values.get("calibration")
    known = calibration if calibration is not None and Path(calibration).exists() else None
    found = compare(build, precision, device=device, kind=kind, calibrated=known)
    return {"family": family, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", help="a model and its precision")
    parser.add_argument("--calibrate", action="store_true", help="try calibrated rates too")
    add_options(parser)
    given = parser.parse_args()
    if given.job is not None:
        answer(given.job, lambda: _job(given.job))
        return
    names = choose(parser, given.cases, names_of(MODELS if given.device == "cuda" else SMALL))
    report = Report(
        module="benchmarks.steps_gpu",
        page="steps_gpu",
        title="Seconds of a training step on a GPU, predicted and measured",
        command="python -m benchmarks.steps_gpu",
        lines=lines_of,
    )
    given.output = output_folder(given)
    path = (given.output / "steps_gpu_kind.json").resolve() if given.calibrate else None
    measure_all(report, lambda rows: jobs(names, given.device, path, rows), given)


if __name__ == "__main__":
    main()
