"""Peak memory on a real GPU: predicted, simulated, and as torch's CUDA allocator counts it.

Every model runs a training step entirely on the GPU; then in two stages, each of which is once on the GPU
while the other is on the CPU. That is a real placement on two devices, and shows stage by stage the memory of
two GPUs. The measurement is ``torch.cuda.max_memory_allocated`` over the second step. Further memory of the
process (context, cached blocks, fragmentation) is listed separately: a device's ``reserve`` is for that.

    python -m benchmarks.memory_gpu [MODEL ...]       # a GPU of 80 GB; about 5 minutes on 16 cores
    python -m benchmarks.memory_gpu --device cpu      # small models, the CPU allocator's events
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import placer
from benchmarks.allocator import allocator_peaks
from benchmarks.capacity import SUBJECTS
from benchmarks.memory import Build, r3d_18, resnet50
from benchmarks.record import RESULTS, write_page
from examples.unet3d import unet3d
from placer.cost import stand_in_loss
from placer.simulation.optimizers import make_optimizer

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with a batch, and the fields of its spec; ``split`` runs its halves too."""

    build: Build
    fields: Mapping[str, Any]
    split: bool = True


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


def gpt2() -> tuple[nn.Module, Tensor]:
    return GPT2(), torch.zeros(8, 512, dtype=torch.long)


CASES: dict[str, Case] = {
    "ResNet50, 10 x 1024^2": Case(build=resnet50, fields={"optimizer": "sgd"}),
    "3D U-Net 96^3": Case(build=cube("U-Net", 96), fields={}),
    "3D U-Net 128^3": Case(build=cube("U-Net", 128), fields={}, split=False),
    "3D U-Net 160^3": Case(build=cube("U-Net", 160), fields={}, split=False),
    "3D U-Net 128^3, bf16": Case(
        build=cube("U-Net", 128), fields={"precision": "bf16"}, split=False
    ),
    "r3d_18, 4 x 16 x 112^2": Case(build=r3d_18, fields={}),
    "SegResNet 96^3": Case(build=cube("SegResNet", 96), fields={}),
    "SwinUNETR 96^3": Case(build=cube("SwinUNETR", 96), fields={}),
    "GPT-2 size, 8 x 512": Case(build=gpt2, fields={}),
    "GPT-2 size, 8 x 512, bf16": Case(build=gpt2, fields={"precision": "bf16"}, split=False),
}
SMALL: dict[str, Case] = {
    "3D U-Net (width 8) 32^3": Case(
        build=lambda: (unet3d(width=8, depth=3), torch.empty(1, 1, 32, 32, 32)), fields={}
    ),
}


def measure(case: Case, device: str) -> Iterator[dict[str, Any]]:
    """A row for the model on ``device``, and one per half of it, the other half on the CPU."""
    model, x = case.build()
    if x.is_floating_point():
        x = torch.randn(x.shape)
    spec = {"devices": [f"{device}:0"], "objective": "memory", **case.fields}
    plan = placer.make_plan(model, spec, (x,))
    yield {"stage": "all", **_compare(model, plan, x, device)}
    if not case.split or device == "cpu":  # on the CPU nobody can tell two CPU devices apart
        return
    pair = {**spec, "devices": ["cuda:0", "cuda:1"]}
    stages = placer.make_plan(model, pair, (x,)).stages
    for chosen in pair["devices"]:
        home = {name: "cuda:0" if name == chosen else "cpu:0" for name in pair["devices"]}
        pins = {node: home[s.devices[0]] for s in stages for node in s.nodes}
        half = _pinned(model, {**spec, "devices": list(dict.fromkeys(pins.values()))}, x, pins)
        parts = [s for s in stages if s.devices[0] == chosen]
        label = ", ".join(f"{s.layers[0]} … {s.layers[-1]}" for s in parts)
        yield {"stage": label, **_compare(model, half, x, device)}


def _pinned(model: nn.Module, spec: Any, x: Tensor, pins: Mapping[str, str]) -> placer.Plan:
    from placer.api import as_spec
    from placer.planner.build import build_plan
    from placer.program import capture_model, flatten_call

    program = capture_model(model, (x,))
    return build_plan(program, as_spec(spec), flatten_call(program.call, (x,), {}), pins=pins)


def _compare(model: nn.Module, plan: placer.Plan, x: Tensor, device: str) -> dict[str, Any]:
    """Bytes on ``device``: predicted, simulated, measured."""
    name = f"{device}:0"
    (simulated,) = (
        d
        for d in placer.simulate(model, plan, (x,), loss_fn=stand_in_loss).devices
        if d.device == name
    )
    found = {"predicted": simulated.predicted, "simulated": simulated.peak}
    if device == "cpu":
        return {
            **found,
            "measured": allocator_peaks(model, plan, (x,), loss_fn=stand_in_loss).tensors,
        }
    return {**found, **_cuda_peak(model, plan, x)}


def _cuda_peak(model: nn.Module, plan: placer.Plan, x: Tensor) -> dict[str, int]:
    """Peak bytes of the CUDA allocator in the second step, and the memory of the process on the GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    before = torch.cuda.memory_allocated()
    for _ in trained_steps(model, plan, x, 2):
        pass
    return {
        "measured": torch.cuda.max_memory_allocated() - before,
        "reserved": torch.cuda.max_memory_reserved(),
        "taken": total - torch.cuda.mem_get_info()[0],
        "taken_before": total - free,
    }


def trained_steps(model: nn.Module, plan: placer.Plan, x: Tensor, count: int) -> Iterator[float]:
    """Train this many steps of the plan on this machine's GPU; yields the seconds of each as it ends.

    Peaks are counted anew in every step.
    """
    placed = placer.compile(model, plan, (x,))
    trained = [p for p in placed.parameters() if p.requires_grad]
    optimizer = make_optimizer(plan.optimizer, trained)
    for _ in range(count):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        placed.step(x, loss_fn=stand_in_loss, reduction="mean")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        yield time.perf_counter() - began


def run(cases: Mapping[str, Case], device: str, *, done: Callable[[], None] = lambda: None) -> None:
    """Measure ``cases`` and write results/memory_gpu.json as they come, and the page."""
    path = RESULTS / ("memory_gpu.json" if device == "cuda" else "memory_gpu_dry.json")
    results: list[dict[str, Any]] = []
    for name, case in cases.items():
        for row in measure(case, device):
            results.append({"model": name, **row})
            print(results[-1], flush=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
        done()
    if device != "cuda":
        path.unlink()
        return
    lines = [
        "| model | on the GPU | predicted, MiB | simulated, MiB | measured, MiB | simulated / measured "
        "| cached besides, MiB | context, MiB |",
        f"|{' --- |' * 8}",
    ]
    for row in results:
        mib = [f"{row[key] / MIB:.1f}" for key in ("predicted", "simulated", "measured")]
        off = row["simulated"] / row["measured"] - 1
        cached = row["reserved"] - row["measured"]
        context = row["taken"] - row["reserved"]
        cells = [row["model"], row["stage"], *mib, f"{off:+.2%}"]
        cells += [f"{cached / MIB:.0f}", f"{context / MIB:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    note = (
        "Second training step; fp32 where nothing else is said. Measured: "
        "`torch.cuda.max_memory_allocated`, with the workspaces that cuDNN and cuBLAS take from "
        "torch's allocator. Cached: reserved by torch's allocator, not allocated. Context: what the "
        "process took of the GPU beyond that. A half has the other half on the CPU."
    )
    command = "python -m benchmarks.memory_gpu"
    write_page("memory_gpu", "Peak bytes on a GPU", command, [*lines, "", note, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", help=", ".join(CASES))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("benchmarks.memory_gpu needs a CUDA device, and this machine has none")
    cases = CASES if given.device == "cuda" else SMALL
    unknown = [name for name in given.models if name not in cases]
    if unknown:
        parser.error(f"no model {unknown[0]!r}; there are {', '.join(cases)}")
    run({name: cases[name] for name in given.models or cases}, given.device)


if __name__ == "__main__":
    main()
