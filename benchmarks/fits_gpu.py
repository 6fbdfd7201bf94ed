"""Does a model train in the memory that its plan says it needs? Real steps on a GPU with a memory limit.

A case that keeps everything is tried at its edge: the smallest budget under which its plan fits, and the
largest one under which it does not, are searched (within 1 %). A case that recomputes or offloads what it
must ("auto") uses up any budget, so it is tried at one. Where a plan fits, three steps must succeed under
the budget; where it does not, they must not succeed with more than 4 % to spare. A plan keeps nothing free
here; if one runs out of memory, the edge with what plans keep free by default is tried too. Every mode of
torch's allocator is tested. Each run has its own process, whose allocator is limited to the budget without
the context, as it was measured in the first process; the plan counts with the same.

    python -m benchmarks.fits_gpu [CASE ...] [--resume]    # a GPU of 80 GB
    python -m benchmarks.fits_gpu kept                     # those that keep everything; "auto": the others
    python -m benchmarks.fits_gpu --device cpu             # tries it out, without a limit
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

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
from benchmarks.gpu_cases import DEVICE, PROFILED, GPUCase
from benchmarks.loss import LOSS
from benchmarks.memory_gpu import cube, process_context, trained_steps
from benchmarks.record import gpu_kind, table
from placer.api import as_spec
from placer.plan.types import Plan
from placer.program import flatten_call, lower
from placer.simulation.judge import JudgingPlanner
from placer.spec import PlacementSpec

_NEAR = 0.01  # how near the two budgets of an edge are
_SPARE = 0.04  # what a refused plan may have trained with
_STEPS = 3
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class FitCase:
    """A model with its fields, tried under one budget, or (None) under both budgets of its edge."""

    subject: GPUCase
    gib: float | None = None

    @property
    def sides(self) -> tuple[str, ...]:
        return ("fits", "refused") if self.gib is None else ("given",)


def _auto(model: str, edge: int, gib: float, *chosen: str, bf16: bool = False) -> FitCase:
    fields = dict.fromkeys(chosen, "auto") | ({"precision": "bf16"} if bf16 else {})
    subject = GPUCase(family=model, build=cube(model, edge), fields=fields)
    return FitCase(subject=subject, gib=gib)


_KEPT = ("unet3d-160", "unet3d-128-bf16", "segresnet-128", "dynunet-160", "resnet50-64x224",
         "gpt2-8x512-bf16")  # fmt: skip
GROUPS: dict[str, dict[str, FitCase]] = {
    "kept": {name: FitCase(subject=PROFILED[name]) for name in _KEPT},
    "auto": {
        "U-Net 256³, checkpoint": _auto("U-Net", 256, 16, "checkpoint"),
        "U-Net 256³, checkpoint, bf16": _auto("U-Net", 256, 12, "checkpoint", bf16=True),
        "U-Net 224³, offload": _auto("U-Net", 224, 16, "offload"),
        "U-Net 256³, offload": _auto("U-Net", 256, 16, "offload"),
        "U-Net 240³, offload, bf16": _auto("U-Net", 240, 12, "offload", bf16=True),
        "U-Net 256³, both": _auto("U-Net", 256, 14, "checkpoint", "offload"),
        "SegResNet 240³, checkpoint": _auto("SegResNet", 240, 16, "checkpoint"),
        "SegResNet 208³, offload, bf16": _auto("SegResNet", 208, 12, "offload", bf16=True),
        "DynUNet 224³, checkpoint": _auto("DynUNet", 224, 16, "checkpoint"),
        "r3d_18 320³, checkpoint": _auto("r3d_18", 320, 16, "checkpoint"),
        "SwinUNETR 160³, checkpoint": _auto("SwinUNETR", 160, 16, "checkpoint"),
    },
}
CASES = GROUPS["kept"] | GROUPS["auto"]


def _small() -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*layers), torch.empty(8, 16, 128, 128)


_SMALL_FIELDS: dict[str, Any] = {"context": 0}
SMALL = {
    "small": FitCase(subject=GPUCase(family="", build=_small, fields=_SMALL_FIELDS)),
    "small, checkpoint": FitCase(
        subject=GPUCase(family="", build=_small, fields={"checkpoint": "auto", **_SMALL_FIELDS}),
        gib=0.09,
    ),
}


def edge_of(fits: Callable[[int], bool], low: int, high: int) -> tuple[int, int]:
    """The smallest budget known to fit, and the largest known not to, within 1 %: by bisection.

    ``low`` does not fit, ``high`` does.
    """
    while high - low > _NEAR * high:
        half = (low + high) // 2
        low, high = (low, half) if fits(half) else (half, high)
    return high, low


def case_spec(
    case: GPUCase,
    budget: int,
    allocator: str,
    *,
    kind: str = "h100",
    free: bool = False,
    context: int | None = None,
) -> PlacementSpec:
    """One GPU with this many bytes, of which nothing is kept free, or (``free``) the default.

    ``context`` is as measured, in bytes; None: that of the kind.
    """
    device = {"name": DEVICE, "allocator": allocator, "memory": budget, "kind": kind}
    fields = {**LOSS, "context": context, **({} if free else {"reserve": 0}), **case.fields}
    return as_spec({"devices": [device], "objective": "memory", **fields})


def edge(planner: JudgingPlanner, spec: Callable[[int], PlacementSpec]) -> tuple[int, int]:
    """The edge of plans for ``spec(budget)``. Needs no GPU."""
    (device,) = planner(spec(2**50)).devices
    assert device.reserved is not None, "it is a CUDA device"
    kept_free = 1.1  # more than plans keep by default
    enough = int(kept_free * device.needed)
    return edge_of(lambda budget: planner(spec(budget)).fits, device.context, enough)


def plan_at(
    case: FitCase, side: str, allocator: str, *, kind: str, free: bool, context: int | None = None
) -> tuple[Plan, int]:
    """The plan of one side of the case, and the budget it was made for."""
    model, x = case.subject.build()
    program = lower(model, (x,))
    planner = JudgingPlanner(program, flatten_call(program.call, (x,), {}))

    def spec(budget: int) -> PlacementSpec:
        return case_spec(case.subject, budget, allocator, kind=kind, free=free, context=context)

    if case.gib is not None:
        budget = int(case.gib * GIB)
    else:
        enough, too_little = edge(planner, spec)
        budget = too_little if side == "refused" else enough
    return planner(spec(budget)), budget


def runnable(plan: Plan) -> Plan:
    """``plan`` without budgets, so that it is run whether or not it fits."""
    devices = tuple(replace(device, budget=None) for device in plan.devices)
    host = None if plan.host is None else replace(plan.host, budget=None)
    return replace(plan, fits=True, devices=devices, host=host)


def limit_gpu(nbytes: int) -> None:
    """Let torch's allocator of this process reserve this much and no more."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0, nbytes) / total))


def train(
    case: FitCase,
    side: str,
    allocator: str,
    *,
    context: int,
    kind: str,
    free: bool = False,
    device: str = "cuda",
    run_on: str | None = None,
    alone: bool = True,
) -> Row:
    """Plan, limit the GPU, and train three steps. A refused plan gets 4 % less than its budget.

    ``device`` "cpu": no limit, and no bytes. Not ``alone``: others use the GPU meanwhile, so neither seconds
    nor the context are measured.
    """
    plan, budget = plan_at(case, side, allocator, kind=kind, free=free, context=context)
    (found,) = plan.devices
    given = budget if plan.fits else int((1 - _SPARE) * budget)
    row = {
        "fits": plan.fits,
        "budget": budget,
        "given": given,
        "regions": len(plan.stages[0].regions),
        "predicted": {
            "seconds": plan.step_seconds,
            "reserved": found.reserved,
            "context": found.context,
            "starved": found.starved,
        },
    }
    model, x = case.subject.build()
    if x.is_floating_point():
        x = torch.randn(x.shape)
    if device == "cuda":
        take_turn(alone=alone)
        limit_gpu(given - context)
    steps = []
    try:
        for step in trained_steps(model, runnable(plan), x, _STEPS, device=device, run_on=run_on):
            steps.append(step)
    except torch.OutOfMemoryError as error:
        row["why"] = str(error).splitlines()[0][:200]
    reserved = [step.reserved for step in steps]
    if device == "cuda":
        # Of a step that failed too: an out of memory error ends before the peak is read.
        reserved.append(torch.cuda.max_memory_reserved())
        row["reserved"] = max(reserved)
        if alone:
            row["context"] = process_context()
    trained = len(steps) == _STEPS
    return {**row, "trained": trained, "seconds": steps[-1].seconds if trained and alone else None}


def measured_context() -> int:
    """The context of this process after steps that run the usual kernels, in fp32 and bf16."""
    import placer

    for name in ("unet3d-96", "gpt2-8x512-bf16"):
        case = PROFILED[name]
        model, x = case.build()
        plan = placer.make_plan(model, {"devices": [DEVICE], **LOSS, **case.fields}, (x,))
        for _ in trained_steps(model, plan, x, 1):
            pass
    return process_context()


def jobs(
    names: Sequence[str],
    cases: Mapping[str, FitCase],
    device: str,
    rows: Mapping[str, Row],
    *,
    alone: bool = True,
) -> Iterator[Job]:
    """The jobs of the cases; ``rows`` has what those before found, by their keys."""
    common: Row = {"device": device, "alone": alone}
    if device == "cuda":
        yield Job(key=_CONTEXT, values={**common, "case": _CONTEXT})
        if "error" in rows.get(_CONTEXT, {"error": ""}):
            return
        common |= {"context": rows[_CONTEXT]["context"]}
    for name in names:
        for mode in ALLOCATORS:
            for side in cases[name].sides:
                values = {**common, "case": name, "side": side, "free": False}
                key = f"{name}, {mode}, {side}"
                yield Job(key=key, values=values, allocator=mode)
                row = rows.get(key, {})
                if row.get("fits") and not row["trained"]:
                    free = {**values, "free": True}
                    yield Job(key=f"{key}, some kept free", values=free, allocator=mode)


_CONTEXT = "context"


def lines_of(rows: Sequence[Row]) -> list[str]:
    """The table, and in how many rows the plans were right."""
    tried = [row for row in rows if row["case"] != _CONTEXT]
    cells = []
    for row in tried:
        said, trained = row["predicted"], row["trained"]
        right = trained if row["fits"] else not trained
        answered = "yes" if trained else "no"
        reserved = row.get("reserved")
        cells.append(
            [
                row["case"],
                row["allocator"],
                f"{row['budget'] / GIB:.2f}" + (", 2 % kept free" if row["free"] else ""),
                "yes" if row["fits"] else "no",
                f"{row['given'] / GIB:.2f}",
                answered if right else f"**{answered}**",
                said["starved"] or "",
                "" if row["seconds"] is None else f"{row['seconds']:.3f}",
                f"{said['seconds']:.3f}",
                "" if reserved is None else f"{reserved / GIB:.2f}",
                f"{said['reserved'] / GIB:.2f}",
                f"{row['context'] / GIB:.3f}" if "context" in row and reserved is not None else "",
            ]
        )
    header = ["case", "allocator", "budget, GiB", "fits", "given, GiB", "trained", "starved",
              "s, 3rd step", "predicted", "reserved, GiB", "predicted", "context, GiB"]  # fmt: skip
    said_to_fit = [row for row in tried if row["fits"]]
    strict = [row for row in said_to_fit if not row["free"]]
    usual = [row for row in said_to_fit if row["free"]]
    refused = [row for row in tried if not row["fits"]]
    bad, worse = (sum(not row["trained"] for row in some) for some in (strict, usual))
    late = sum(row["trained"] for row in refused)
    known = [row["context"] for row in rows if row["case"] == _CONTEXT]
    return [
        *table(header, cells),
        f"Of {len(strict)} plans that fit with nothing kept free, {bad} ran out of memory; of those "
        f"{len(usual)} were tried with what a plan keeps free by default, and {worse} ran out of memory. Of "
        f"{len(refused)} that were refused, {late} trained with more than 4 % to spare. The goal is none of "
        "any.",
        "",
        "The allocator was limited to the bytes given"
        + (f" without a context of {known[0] / GIB:.3f} GiB, as measured first" if known else "")
        + ". Bold: not as the plan said. *Starved*: kernels in a step that find less workspace than they "
        "want; their step takes longer than predicted. *Reserved* and *context* as they were in the end, "
        "predicted for the whole budget.",
        "",
    ]


def _job(values: Mapping[str, Any]) -> Row:
    if values["case"] == _CONTEXT:
        return {"context": measured_context()}
    on_gpu = values["device"] == "cuda"
    return train(
        {**CASES, **SMALL}[values["case"]],
        values["side"],
        values["allocator"],
        context=values.get("context", 0),
        kind=gpu_kind() if on_gpu else "h100",
        free=values["free"],
        alone=values["alone"],
        device=values["device"],
        run_on=None if on_gpu else "cpu",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", default=[], help=", ".join([*GROUPS, *CASES]))
    parser.add_argument("--together", action="store_true",
                        help="several at once on the GPU: no seconds, no contexts")  # fmt: skip
    add_options(parser)
    given = parser.parse_args()
    if given.job is not None:
        answer(given.job, lambda: _job(given.job))
        return
    cases = CASES if given.device == "cuda" else SMALL
    named = [one for name in given.cases for one in GROUPS.get(name, [name])]
    names = choose(parser, named, cases)
    report = Report(
        module="benchmarks.fits_gpu",
        page="fits_gpu",
        title="Plans at the edge, trained on a GPU",
        command="python -m benchmarks.fits_gpu",
        lines=lines_of,
    )
    alone = not given.together
    measure_all(report, lambda rows: jobs(names, cases, given.device, rows, alone=alone), given)


if __name__ == "__main__":
    main()
