"""Bytes that torch's allocator reserves on a GPU: predicted by dry runs, and measured on an H100.

The measurements are files that are not part of this repository (`allocator_events.json.gz`,
`fits_16GiB.json`, `convolutions.json`; the page describes them). No GPU is needed.

    python -m benchmarks.reserved FOLDER      # the folder of those files; needs MONAI; about 3 minutes
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torchvision.models import resnet50, vit_b_16

from benchmarks.gpu_cases import (
    DEVICE,
    GIB,
    GPUCase,
    capped_usage,
    case_timeline,
    recorded_regions,
)
from benchmarks.memory_gpu import cube, gpt2
from benchmarks.record import table, write_page
from placer.cost import cuda_workspaces
from placer.timeline import device_usage

_NEAR_SHARE, _NEAR_BYTES = 0.1, 8 * 2**20
_NAMES = {
    "unet3d": "U-Net",
    "segresnet": "SegResNet",
    "dynunet": "DynUNet",
    "swinunetr": "SwinUNETR",
}
_RUN_HEADER = (
    *("run", "allocated, predicted", "measured", "", "reserved, predicted", "measured", ""),
    "reserved with expandable segments, predicted",
)
_FIT_HEADER = (
    *("run", "allocator", "trained", "predicted", "reserved, GiB", "predicted", "s per step"),
    *("starved", "flushes", "fits, as said then"),
)
aten = torch.ops.aten


def _model(name: str) -> tuple[nn.Module, Tensor]:
    """The model and batch of a recorded run, such as "unet3d-96" or "resnet50-64x224-bf16"."""
    kind, size = name.split("-")[:2]
    if kind == "gpt2":
        return gpt2()
    if kind in ("resnet50", "vit_b_16"):
        rows = int(size.split("x")[0])
        model = resnet50() if kind == "resnet50" else vit_b_16()
        return model, torch.empty(rows, 3, 224, 224)
    return cube(_NAMES.get(kind, kind), int(size))()


def compare_runs(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Predicted and measured bytes, allocated and reserved, of every recorded run."""
    for row in rows:
        name = row["model"]
        precision = row["fields"].get("precision", "fp32")
        case = GPUCase(
            family="",
            build=partial(_model, name),
            fields={"precision": precision},
            regions=recorded_regions(name),
        )
        timeline = case_timeline(case)
        measured = row["measured_third_step"]
        yield {
            "model": name,
            "allocated": timeline.peaks(workspaces=True)[DEVICE].nbytes,
            "reserved": device_usage(timeline, DEVICE).reserved,
            "expandable": device_usage(timeline, DEVICE, expandable=True).reserved,
            "measured_allocated": measured["allocated"],
            "measured_reserved": measured["reserved"],
        }


def compare_fits(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """For every run under a cap of 16 GiB: whether it trains by the allocator's model, and whether it did."""
    for row in rows:
        fields = [k for k in ("checkpoint", "offload", "precision") if k in row]
        usage = capped_usage(row)
        yield {
            **row,
            "what": ", ".join([f"{row['model']} {row['edge']}^3", *fields]),
            "predicted_trains": usage.failed is None,
            "predicted_reserved": usage.reserved / GIB,
            "starved": usage.starved,
            "flushes": usage.flushes,
        }


def compare_convolutions(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, int, int]]:
    """For each direction: predicted over measured bytes in total, how many rows are near, and of how many."""
    pairs: dict[str, list[tuple[int, int]]] = {}
    with FakeTensorMode():
        for row in rows:
            dtype = getattr(torch, row["dtype"])
            x, weight = (torch.empty(row[key], dtype=dtype) for key in ("input", "weight"))
            how = [
                row[k] for k in ("stride", "padding", "dilation", "transposed", "output_padding")
            ]
            args = (x, weight, None, *how, row["groups"])
            y = aten.convolution.default(*args)
            found = {"forward": cuda_workspaces(aten.convolution.default, args, y)}
            for index, key in enumerate(("grad_input", "grad_weight")):
                wanted = [index == 0, index == 1, False]
                given = (y, x, weight, None, *args[3:], wanted)
                found[key] = cuda_workspaces(aten.convolution_backward.default, given, ())
            for key, workspaces in found.items():
                predicted = sum(workspace.nbytes for workspace in workspaces)
                pairs.setdefault(key, []).append((predicted, row[key][0]))
    return {
        key: (
            sum(p for p, _ in both) / sum(m for _, m in both),
            sum(abs(p - m) <= max(_NEAR_BYTES, _NEAR_SHARE * m) for p, m in both),
            len(both),
        )
        for key, both in pairs.items()
    }


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.3f}"


def _run_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        cells = [row["model"]]
        for key in ("allocated", "reserved"):
            off = row[key] / row[f"measured_{key}"] - 1
            cells += [_gib(row[key]), _gib(row[f"measured_{key}"]), f"{off:+.2%}"]
        lines.append([*cells, _gib(row["expandable"])])
    off = [abs(row["reserved"] / row["measured_reserved"] - 1) for row in rows]
    near = sum(x <= 0.03 for x in off)
    return [
        *table(_RUN_HEADER, lines),
        f"Reserved: {near} of {len(off)} within 3 %, median {statistics.median(off):.2%} off, "
        f"largest {max(off):.1%}.",
    ]


def fit_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of runs under a cap, and how many verdicts are correct."""
    lines = []
    for row in rows:
        cells = [
            row["what"],
            row["allocator"].removesuffix("_segments"),
            "yes" if row["trained"] else "no",
            "yes" if row["predicted_trains"] else "no",
            f"{row['reserved']:.3f}",
            f"{row['predicted_reserved']:.3f}",
            f"{row['step_s']:.2f}" if row["trained"] else "",
            str(row["starved"]) if row["predicted_trains"] else "",
            str(row["flushes"]) if row["predicted_trains"] else "",
            "yes" if row["said_fits_16"] else "no",
        ]
        lines.append(cells)
    right = sum(row["trained"] == row["predicted_trains"] for row in rows)
    wrong = sum(row["predicted_trains"] and not row["trained"] for row in rows)
    return [
        *table(_FIT_HEADER, lines),
        f"{right} of {len(rows)} verdicts right; {wrong} said to train ran out of memory.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="where the measurements lie")
    folder = parser.parse_args().folder
    with gzip.open(folder / "allocator_events.json.gz") as file:
        runs = list(compare_runs(json.load(file)["rows"]))
    fits = list(compare_fits(json.loads((folder / "fits_16GiB.json").read_text())))
    convolutions = compare_convolutions(
        json.loads((folder / "convolutions.json").read_text())["rows"]
    )
    lines = [
        "Measured on one H100 80GB (torch 2.11.0, CUDA 13.0, cuDNN 9.19); predicted without a GPU, by "
        "dry runs whose allocations and workspaces go through a model of torch's allocator "
        "(`placer/timeline/allocator.py`). The rules for workspaces (`placer/cost/cuda_workspaces.py`) "
        "were made from these same measurements: none was kept back, so other models and other GPUs may "
        "be further off. Sizes in GiB.",
        "",
        "## Whole runs without a cap, after three steps",
        "",
        *_run_lines(runs),
        "",
        "## Runs under a cap of 16 GiB (the context of 0.51 GiB included)",
        "",
        "A plan's own verdict is stricter: it keeps 2 % of the device free. *Starved*: workspaces in three "
        "steps that find no room, so that cuDNN takes a slower kernel. *Flushes*: how often the cache went "
        "back to the driver.",
        "",
        *fit_lines(fits),
        "",
        "## Workspaces of convolutions",
        "",
        *table(
            ["direction", "predicted / measured, all together", "within 10 % or 8 MiB"],
            [
                [key, f"{ratio:.3f}", f"{near} of {count}"]
                for key, (ratio, near, count) in convolutions.items()
            ],
        ),
    ]
    write_page("reserved", "Bytes reserved on a GPU", "python -m benchmarks.reserved FOLDER", lines)


if __name__ == "__main__":
    main()
