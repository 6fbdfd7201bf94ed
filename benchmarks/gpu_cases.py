"""The training steps that were measured on one H100: their models, inputs and specs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.known_costs import known_costs
from benchmarks.loss import LOSS, MEAN_SQUARE
from benchmarks.memory_gpu import CASES, cube
from benchmarks.record import gpu_name
from placer.api import as_spec
from placer.cost import CostEstimates, CostTable, with_regions
from placer.machine.catalogue import CATALOGUE
from placer.plan.types import Plan
from placer.planner.build import build_plan
from placer.program import Program, flatten_call, lower
from placer.regions import Region, RegionKey
from placer.simulation.simulate import dry_run
from placer.timeline import Timeline, device_usage
from placer.timeline.allocator import Usage

DEVICE = "cuda:0"
GIB = 2**30
CONTEXT = 0.51 * GIB  # of the H100's process; the capped runs had 16 GiB less this
Build = Callable[[], tuple[nn.Module, Tensor]]
# Run -> its regions: first and last node, and what is done. They were found by running the planner of
# commit 8728e91, from before its times changed, for the memory that the runs were planned for.
_REGIONS = json.loads(Path(__file__).with_name("recorded_regions.json").read_text())


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUCase:
    """A model with its batch; ``family``: models that are kept out of a fit together.

    ``regions`` are what the measured run recomputed and offloaded. "auto" chose them by the estimates of that
    day, and would choose others today.
    """

    family: str
    build: Build
    fields: Mapping[str, Any] = field(default_factory=dict)
    regions: tuple[Region, ...] = ()


def _resnet50() -> tuple[nn.Module, Tensor]:
    import torchvision

    return torchvision.models.resnet50(), torch.empty(64, 3, 224, 224)


_BF16 = {"precision": "bf16"}
PROFILED = {
    "unet3d-96": GPUCase(family="U-Net", build=cube("U-Net", 96)),
    "unet3d-160": GPUCase(family="U-Net", build=cube("U-Net", 160)),
    "unet3d-128-bf16": GPUCase(family="U-Net", build=cube("U-Net", 128), fields=_BF16),
    "segresnet-128": GPUCase(family="SegResNet", build=cube("SegResNet", 128)),
    "dynunet-160": GPUCase(family="DynUNet", build=cube("DynUNet", 160)),
    "resnet50-64x224": GPUCase(family="ResNet", build=_resnet50),
    "gpt2-8x512": GPUCase(family="GPT-2", build=CASES["GPT-2 size, 8 x 512"].build),
    "gpt2-8x512-bf16": GPUCase(
        family="GPT-2", build=CASES["GPT-2 size, 8 x 512"].build, fields=_BF16
    ),
}
"""By their names in operations.json."""


def gpu_kind(name: str | None = None) -> str:
    """The kind in the catalogue of a GPU with this name, by default of this machine's.

    >>> gpu_kind("NVIDIA H100 80GB HBM3"), gpu_kind("NVIDIA GeForce RTX 4090")
    ('h100', 'rtx4090')
    """
    name = gpu_name() if name is None else name
    words = re.findall(r"[a-z0-9]+", name.lower())
    joined = {"".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
    found = [kind for kind in CATALOGUE if kind in joined]
    if not found:
        raise ValueError(f"the catalogue has no kind for {name}; `placer calibrate` measures one")
    return max(found, key=len)


def recorded_regions(run: str) -> tuple[Region, ...]:
    """The regions that the measured ``run`` recomputed and offloaded, if any."""
    return tuple(
        Region(first=first, last=last, recompute="recompute" in how, offload="offload" in how)
        for first, last, *how in _REGIONS.get(run, ())
    )


def capped_case(row: Mapping[str, Any]) -> GPUCase:
    """The case of a row of fits_16GiB.json."""
    fields = [key for key in ("checkpoint", "offload", "precision") if key in row]
    run = f"{row['model']} {row['edge']}, {', '.join(fields)}, planned for {row['planned_for']} GiB"
    return GPUCase(
        family=row["model"],
        build=cube(row["model"], row["edge"]),
        fields={"precision": row["precision"]} if "precision" in row else {},
        regions=recorded_regions(run),
    )


def case_costs(program: Program, leaves: Sequence[Tensor], case: GPUCase) -> CostTable:
    """The costs of ``case``, with its regions."""
    costs = CostEstimates(program)(
        leaves,
        precision=case.fields.get("precision", "fp32"),
        offloads=any(region.offload for region in case.regions),
        kernels="cuda",
        loss=MEAN_SQUARE,
    )
    keys: list[RegionKey | None] = [None] * len(program.order)
    for region in case.regions:
        first, last = program.order.index(region.first), program.order.index(region.last)
        key = RegionKey(label=region.first, recompute=region.recompute, offload=region.offload)
        keys[first : last + 1] = [key] * (last + 1 - first)
    return with_regions(costs, keys)


def case_plan(
    program: Program, leaves: Sequence[Tensor], case: GPUCase, costs: CostTable | None = None
) -> Plan:
    """The plan of ``case`` on one H100, by estimates, that does what the measured run did.

    ``costs`` are those of `case_costs`, where they are known already.
    """
    spec = as_spec({"devices": [{"name": DEVICE, "kind": "h100"}], **LOSS, **case.fields})
    costs = costs or case_costs(program, leaves, case)
    plan = build_plan(program, spec, leaves, estimate=known_costs(costs))
    (stage,) = plan.stages
    assert stage.regions == case.regions, "the model has other nodes than when it was measured"
    return plan


def case_timeline(case: GPUCase) -> Timeline:
    """Three steps of a dry run of ``case``."""
    model, x = case.build()
    program = lower(model, (x,))
    leaves = flatten_call(program.call, (x,), {})
    (found,) = dry_run(program, case_plan(program, leaves, case), leaves).found
    return found.timeline


def capped_usage(row: Mapping[str, Any]) -> Usage:
    """The usage by the model of torch's allocator for a row of fits_16GiB.json, in its mode and cap."""
    return device_usage(
        case_timeline(capped_case(row)),
        DEVICE,
        expandable=row["allocator"] != "default",
        limit=int(16 * GIB - CONTEXT),
    )
