"""Bytes on a real GPU, per device and mode of torch's allocator: what plans say, and what was measured.

Every model trains three steps entirely on the GPU; some also in two stages, each of which is once on the GPU
while the other is on the CPU. That is a real placement on two devices, and shows stage by stage the memory of
two GPUs. Each run has its own process, whose allocator is in the mode that the plan assumes. Compared are:

- tensors and workspaces: `torch.cuda.max_memory_allocated`, the most of the three steps;
- reserved: `torch.cuda.max_memory_reserved`, likewise;
- context: what the process has taken of the GPU after that, and not reserved. Nothing else may use the GPU.

    python -m benchmarks.memory_gpu [MODEL ...]       # a GPU of 80 GB
    python -m benchmarks.memory_gpu --device cpu      # tensors only, by the CPU allocator's events
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import placer
from benchmarks.allocator import allocator_peaks
from benchmarks.capacity import SUBJECTS
from benchmarks.fresh import (
    ALLOCATORS,
    Job,
    Report,
    Row,
    add_options,
    answer,
    choose,
    measure_all,
    take_turn,
)
from benchmarks.loss import LOSS
from benchmarks.memory import Build, r3d_18, resnet50
from benchmarks.record import gpu_kind, table
from examples.unet3d import unet3d
from placer.cost import mean_square
from placer.simulation.optimizers import make_optimizer

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with a batch, and the fields of its spec; ``split`` runs its halves too."""

    build: Build
    fields: Mapping[str, Any]
    split: bool = False


class Step(NamedTuple):
    """A training step: its seconds, and the most bytes that torch's allocator gave out and reserved."""

    seconds: float
    allocated: int = 0
    reserved: int = 0


class GPT2(nn.Module):
    """12 blocks of width 768, 12 heads, 50,257 words: the size of GPT-2, with dropout."""

    def __init__(
        self, *, width: int = 768, depth: int = 12, heads: int = 12, words: int = 50257
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def cube(name: str, edge: int) -> Build:
    """A model of the capacity benchmark, with one cube of this many voxels along each edge."""
    subject = SUBJECTS[name]
    return lambda: (subject.build(), torch.empty(1, subject.channels, edge, edge, edge))


def high_res_net() -> tuple[nn.Module, Tensor]:
    """MONAI's, most of whose convolutions are dilated."""
    from monai.networks.nets import HighResNet

    net = HighResNet(spatial_dims=3, in_channels=1, out_channels=3)
    return net, torch.empty(1, 1, 96, 96, 96)


def gpt2() -> tuple[nn.Module, Tensor]:
    return GPT2(), torch.zeros(8, 512, dtype=torch.long)


CASES: dict[str, Case] = {
    "ResNet50, 10 x 1024^2": Case(build=resnet50, fields={"optimizer": "sgd"}, split=True),
    "3D U-Net 96^3": Case(build=cube("U-Net", 96), fields={}, split=True),
    "3D U-Net 160^3": Case(build=cube("U-Net", 160), fields={}),
    "3D U-Net 128^3, bf16": Case(build=cube("U-Net", 128), fields={"precision": "bf16"}),
    "r3d_18, 4 x 16 x 112^2": Case(build=r3d_18, fields={}),
    "SegResNet 96^3": Case(build=cube("SegResNet", 96), fields={}),
    "DynUNet 128^3": Case(build=cube("DynUNet", 128), fields={}),
    "SwinUNETR 96^3": Case(build=cube("SwinUNETR", 96), fields={}, split=True),
    "HighResNet 96^3": Case(build=high_res_net, fields={}),
    "GPT-2 size, 8 x 512": Case(build=gpt2, fields={}),
    "GPT-2 size, 8 x 512, bf16": Case(build=gpt2, fields={"precision": "bf16"}),
}
SMALL: dict[str, Case] = {
    "3D U-Net (width 8) 32^3": Case(
        build=lambda: (unet3d(width=8, depth=3), torch.empty(1, 1, 32, 32, 32)), fields={}
    ),
}
PARTS = ("all", "first half", "second half")
_STEPS = 3
_GOAL, _MEDIAN_GOAL = 0.03, 0.01  # how near reserved bytes are to be: all, and the median


def measure(case: Case, part: str, device: str, allocator: str | None = None) -> dict[str, Any]:
    """Bytes on ``device`` of a part of the model, the rest on the CPU: by the plan and measured."""
    model, x = case.build()
    if x.is_floating_point():
        x = torch.randn(x.shape)
    names = [f"{device}:0"] if part == "all" else ["cuda:0", "cuda:1"]
    mode = {} if allocator is None else {"allocator": allocator}
    mode |= {"kind": gpu_kind()} if torch.cuda.is_available() else {}
    devices = [{"name": name, **mode} for name in names]
    spec = {"devices": devices, "objective": "memory", **LOSS, **case.fields}
    plan = placer.make_plan(model, spec, (x,))
    layers = "all"
    if part != "all":
        chosen = names[PARTS.index(part) - 1]
        mine = [stage for stage in plan.stages if stage.devices[0] == chosen]
        layers = ", ".join(f"{stage.layers[0]} … {stage.layers[-1]}" for stage in mine)
        home = {name: "cuda:0" if name == chosen else "cpu:0" for name in names}
        pins = {node: home[s.devices[0]] for s in plan.stages for node in s.nodes}
        order = dict.fromkeys(pins.values())
        here = [{"name": name, **mode} if name == "cuda:0" else name for name in order]
        plan = _pinned(model, {**spec, "devices": here}, x, pins)
    return {"layers": layers, **_compare(model, plan, x, device)}


def _pinned(model: nn.Module, spec: Any, x: Tensor, pins: Mapping[str, str]) -> placer.Plan:
    from placer.api import as_spec
    from placer.planner.build import build_plan
    from placer.program import flatten_call, lower

    program = lower(model, (x,))
    return build_plan(program, as_spec(spec), flatten_call(program.call, (x,), {}), pins=pins)


def _compare(model: nn.Module, plan: placer.Plan, x: Tensor, device: str) -> dict[str, Any]:
    """Bytes on ``device``: estimated, simulated (as the plan of a CUDA device has them), measured."""
    (simulated,) = (
        d
        for d in placer.simulate(model, plan, (x,), loss_fn=mean_square).devices
        if d.device == f"{device}:0"
    )
    found = {
        "estimated": simulated.predicted,
        "tensors": simulated.peak,
        "workspaces": simulated.workspaces,
        "reserved": simulated.reserved,
        "context": simulated.context,
    }
    if device == "cpu":
        peaks = allocator_peaks(model, plan, (x,), loss_fn=mean_square)
        return {**found, "measured": {"tensors": peaks.tensors}}
    return {**found, "measured": measured_bytes(model, plan, x)}


def measured_bytes(
    model: nn.Module, plan: placer.Plan, x: Tensor, run_on: str | None = None
) -> dict[str, int]:
    """What three steps of the plan take of the GPU, in a process that has not used it before."""
    steps = list(trained_steps(model, plan, x, _STEPS, run_on=run_on))
    return {
        "allocated": max(step.allocated for step in steps),
        "reserved": max(step.reserved for step in steps),
        "context": process_context(),
    }


def process_context() -> int:
    """Bytes of the GPU that are taken, and not by torch's allocator: the context, if nobody else is there."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def trained_steps(
    model: nn.Module,
    plan: placer.Plan,
    x: Tensor,
    count: int,
    *,
    device: str = "cuda",
    run_on: str | None = None,
) -> Iterator[Step]:
    """Train this many steps of the plan on this machine, and yield each as it ends.

    ``reserved`` is of the time since the step before ended; of the first step, since the process began, so
    that the placement of the weights counts too. ``device`` "cpu": only seconds.
    """
    cuda = torch.cuda if device == "cuda" else None
    if cuda is not None:
        take_turn()
    placed = placer.compile(model, plan, (x,), run_on=run_on)
    optimizer = make_optimizer(plan.optimizer, [p for p in placed.parameters() if p.requires_grad])
    for _ in range(count):
        if cuda is not None:
            cuda.synchronize()
        began = time.perf_counter()
        placed.step(x, loss_fn=mean_square, reduction="mean")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if cuda is None:
            yield Step(time.perf_counter() - began)
            continue
        cuda.synchronize()
        seconds = time.perf_counter() - began
        yield Step(seconds, cuda.max_memory_allocated(), cuda.max_memory_reserved())
        cuda.reset_peak_memory_stats()  # both peaks become what there is now


def jobs(names: Sequence[str], cases: Mapping[str, Case], device: str) -> Iterator[Job]:
    """The whole models in each mode of the allocator, the halves in that of plans by default."""
    for name in names:
        split = cases[name].split and device == "cuda"  # CPUs cannot be told apart
        for part in PARTS if split else PARTS[:1]:
            modes = list(ALLOCATORS) if part == "all" else ["expandable"]
            for mode in modes if device == "cuda" else [None]:
                key = ", ".join([name, part, *([mode] if mode else [])])
                values = {"model": name, "part": part, "device": device}
                yield Job(key=key, values=values, allocator=mode)


def lines_of(rows: Sequence[Row]) -> list[str]:
    """The table, and how near the predictions are."""
    if rows[0]["device"] == "cpu":
        cells = [
            [
                row["model"],
                *(f"{v / MIB:.1f}" for v in (row["tensors"], row["measured"]["tensors"])),
            ]
            for row in rows
        ]
        return table(["model", "simulated, MiB", "measured, MiB"], cells)
    header = ["model", "on the GPU", "allocator", "tensors", "workspaces", "measured",
              "allocated, off by", "measured", "reserved", "measured", "off by", "context",
              "measured"]  # fmt: skip
    cells, off = [], {"allocated": [], "reserved": [], "context": []}
    for row in rows:
        found = row["measured"]
        said = {**row, "allocated": row["tensors"] + row["workspaces"]}
        for key, ratios in off.items():
            ratios.append(said[key] / found[key] - 1)
        mib = {key: f"{value / MIB:,.0f}" for key, value in said.items() if key in _MIB}
        cells.append(
            [
                *(row["model"], row["layers"], row["allocator"]),
                *(mib["tensors"], mib["workspaces"]),
                f"{(found['allocated'] - row['tensors']) / MIB:,.0f}",
                f"{off['allocated'][-1]:+.1%}",
                f"{found['allocated'] / MIB:,.0f}",
                mib["reserved"],
                f"{found['reserved'] / MIB:,.0f}",
                f"{off['reserved'][-1]:+.2%}",
                mib["context"],
                f"{found['context'] / MIB:,.0f}",
            ]
        )
    reserved = [abs(value) for value in off["reserved"]]
    near, middle = sum(value <= _GOAL for value in reserved), statistics.median(reserved)
    return [
        *table(header, cells),
        f"Reserved: {near} of {len(rows)} within 3 % (goal: all), median {middle:.2%} off (goal: 1 %), "
        f"at most {max(reserved):.1%}. Tensors and workspaces: {_spread(off['allocated'])}. Context: "
        f"{_spread(off['context'])}.",
        "",
        "MiB, three training steps; fp32 where nothing else is said. The workspaces that were measured are "
        "what torch's allocator gave out at most (`torch.cuda.max_memory_allocated`) without the "
        "tensors of the dry run: an error of those is in this number. Context: what the GPU had less, and "
        "torch's allocator had not reserved. A half has the other half on the CPU.",
        "",
    ]


_MIB = ("tensors", "workspaces", "reserved", "context")


def _spread(off: Sequence[float]) -> str:
    return f"off by {min(off):+.1%} to {max(off):+.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", help=", ".join(CASES))
    add_options(parser)
    given = parser.parse_args()
    if (values := given.job) is not None:
        case = {**CASES, **SMALL}[values["model"]]
        answer(values, lambda: measure(case, values["part"], values["device"], values["allocator"]))
        return
    cases = CASES if given.device == "cuda" else SMALL
    report = Report(
        module="benchmarks.memory_gpu",
        page="memory_gpu",
        title="Bytes on a GPU, predicted and measured",
        command="python -m benchmarks.memory_gpu",
        lines=lines_of,
    )
    names = choose(parser, given.models, cases)
    measure_all(report, lambda _: jobs(names, cases, given.device), given)


if __name__ == "__main__":
    main()
