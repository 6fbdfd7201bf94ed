"""How large a volume trains: the largest cube whose training step fits, by placement and device.

Adam, batch 1, fp32. The referee is the ledger: a dry run of the emitted module on simulated
devices, whose fullest device must stay within the given memory; nothing is kept free for an allocator.
The search goes by prediction and lets the ledger decide near the limit; every reported edge passed it.
Nothing is allocated.

    python -m benchmarks.capacity [MODEL ...] [--memory GIB] [--ours]

MODEL: U-Net, SegResNet, DynUNet, SwinUNETR, r3d_18. Models that are not named keep their figures in
results/capacity.json. With --ours, only placer's rows are searched anew, from the edges in that file; the
others do not change with placer.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch
import torchvision
from torch import nn

from benchmarks.baselines import (
    Placement,
    RivalFailure,
    accelerate_balanced,
    accelerate_map,
    balance_by_size,
    hand_split,
    plan_placement,
)
from benchmarks.known_costs import known_costs
from benchmarks.loss import LOSS, MEAN_SQUARE
from benchmarks.record import RESULTS, write_page
from examples.unet3d import unet3d
from placer.cost import CostTable, estimate_costs
from placer.plan.types import Plan
from placer.planner.build import build_plan
from placer.program import Program, lower
from placer.simulation import simulate_plan
from placer.spec import PlacementSpec

GIB = 2**30
DEVICES = (1, 2, 4, 8)
MEMORIES = (8, 16, 24)  # GiB per device
_FIRST = 128  # the edge that is planned first
_NEAR = 0.05  # if the prediction is this near to the limit, the ledger decides
_NEAR_NONCONTIGUOUS = 0.3  # the same for placements with several stages per device


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model for cubes whose edge is a multiple of ``step``, and how people split and checkpoint it."""

    build: Callable[[], nn.Module]
    channels: int
    hand: Mapping[str, int]  # layer -> device, two devices
    blocks: tuple[str, ...]  # the layers that people checkpoint
    step: int = 16


def _segresnet() -> nn.Module:
    from monai.networks.nets import SegResNet

    return SegResNet(
        spatial_dims=3,
        init_filters=32,
        in_channels=1,
        out_channels=3,
        blocks_down=(1, 2, 2, 4),
        blocks_up=(1, 1, 1),
    )


def _dynunet() -> nn.Module:
    from monai.networks.nets import DynUNet

    strides = [1, 2, 2, 2, 2]
    return DynUNet(3, 1, 3, [3] * 5, strides, strides[1:])


def _swin_unetr() -> nn.Module:
    from monai.networks.nets import SwinUNETR

    return SwinUNETR(in_channels=1, out_channels=3, feature_size=48)


SUBJECTS = {
    "U-Net": Subject(
        build=lambda: unet3d(width=32, depth=4),
        channels=1,
        hand={"encoder": 0, "bottleneck": 0, "upsample": 1, "decoder": 1, "head": 1},
        blocks=("encoder.*", "bottleneck", "upsample.*", "decoder.*", "head"),
    ),
    "SegResNet": Subject(
        build=_segresnet,
        channels=1,
        hand={"convInit": 0, "down_layers": 0, "up_samples": 1, "up_layers": 1, "conv_final": 1},
        blocks=("convInit", "down_layers.*.*", "up_samples.*", "up_layers.*.*", "conv_final"),
    ),
    "DynUNet": Subject(
        build=_dynunet,
        channels=1,
        hand={
            "input_block": 0,
            "downsamples": 0,
            "bottleneck": 0,
            "upsamples": 1,
            "output_block": 1,
        },
        blocks=("input_block", "downsamples.*", "bottleneck", "upsamples.*", "output_block"),
    ),
    "SwinUNETR": Subject(
        build=_swin_unetr,
        channels=1,
        hand={"swinViT": 0, "encoder*": 0, "decoder*": 1, "out": 1},
        blocks=("swinViT.layers*.*.blocks.*", "encoder*", "decoder*", "out"),
        step=32,  # five halvings
    ),
    "r3d_18": Subject(
        build=lambda: torchvision.models.video.r3d_18(),
        channels=3,
        hand={"stem": 0, "layer1": 0, "layer2": 1, "layer3": 1, "layer4": 1, "fc": 1},
        blocks=("stem", "layer*.*", "fc"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model captured for one edge, with its costs, which are the same for all plans."""

    program: Program
    costs: CostTable
    inputs: list[torch.Tensor]
    placed: dict[tuple[object, ...], Plan] = field(default_factory=dict)


Planner = Callable[[Case, int], Plan]  # the second is the number of devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A row: how it places a model, and on how many devices."""

    plan: Planner
    devices: tuple[int, ...]
    sharded: bool = False


def _spec(devices: int, **fields: Any) -> PlacementSpec:
    names = [f"cuda:{i}" for i in range(devices)]
    return PlacementSpec.model_validate({"devices": names, "objective": "memory", **LOSS, **fields})


def _placed(find: Callable[[Program, CostTable, int], Placement]) -> Planner:
    def plan(case: Case, devices: int) -> Plan:
        placement = find(case.program, case.costs, devices)
        where = tuple(placement[name] for name in case.program.order)
        if where not in case.placed:
            case.placed[where] = plan_placement(
                case.program, _spec(devices), case.inputs, placement, costs=case.costs
            )
        return case.placed[where]

    return plan


def _automatic(case: Case, devices: int, **fields: Any) -> Plan:
    key = (devices, *fields.items())
    if key not in case.placed:
        case.placed[key] = build_plan(
            case.program, _spec(devices, **fields), case.inputs, estimate=known_costs(case.costs)
        )
    return case.placed[key]


def methods(subject: Subject) -> dict[str, Method]:
    """The rows of the table, rivals first."""
    by_hand = lambda program, costs, k: hand_split(program, subject.hand)  # noqa: E731
    several = tuple(n for n in DEVICES if n > 1)
    return {
        "one device": Method(plan=_automatic, devices=(1,)),
        "one device, every block checkpointed": Method(
            plan=lambda case, devices: _automatic(case, devices, checkpoint=subject.blocks),
            devices=(1,),
        ),
        "split by hand (encoder, decoder)": Method(plan=_placed(by_hand), devices=(2,)),
        "accelerate, device_map auto": Method(plan=_placed(accelerate_map), devices=several),
        "accelerate, balanced": Method(plan=_placed(accelerate_balanced), devices=several),
        "torchgpipe, balance_by_size": Method(plan=_placed(balance_by_size), devices=several),
        "parameters sharded (FSDP2)": Method(
            plan=lambda case, devices: _automatic(case, 1),
            devices=several,
            sharded=True,
        ),
        "placer, objective memory": Method(plan=_automatic, devices=DEVICES),
        "placer, checkpoint auto": Method(
            plan=lambda case, devices: _automatic(case, devices, checkpoint="auto"),
            devices=DEVICES,
        ),
    }


@dataclass(slots=True)
class Search:
    """Peaks of one model by edge, placement and device; every answer is cached."""

    subject: Subject
    cases: dict[int, Case] = field(default_factory=dict)
    model: nn.Module | None = None
    plans: dict[tuple[str, int, int], Plan] = field(default_factory=dict)
    refereed: dict[tuple[object, ...], list[int]] = field(default_factory=dict)

    def case(self, edge: int) -> Case:
        if self.model is None:
            self.model = self.subject.build().to("meta")
        if edge not in self.cases:
            x = torch.empty(1, self.subject.channels, edge, edge, edge, device="meta")
            program = lower(self.model, (x,))
            costs = estimate_costs(program, [x], kernels="cuda", loss=MEAN_SQUARE)
            self.cases[edge] = Case(program=program, costs=costs, inputs=[x])
        return self.cases[edge]

    def plan(self, name: str, method: Method, edge: int, devices: int) -> Plan:
        key = (name, edge, devices)
        if key not in self.plans:
            self.plans[key] = method.plan(self.case(edge), devices)
        return self.plans[key]

    def predicted(self, name: str, method: Method, edge: int, devices: int) -> list[int]:
        plan = self.plan(name, method, edge, devices)
        return self._peaks(method, edge, devices, [d.peak for d in plan.devices])

    def simulated(self, name: str, method: Method, edge: int, devices: int) -> list[int]:
        plan = self.plan(name, method, edge, devices)
        placed = (edge, *((stage.nodes, stage.devices, stage.regions) for stage in plan.stages))
        if placed not in self.refereed:
            case = self.case(edge)
            report = simulate_plan(case.program, plan, case.inputs)
            self.refereed[placed] = [d.peak for d in report.devices]
        return self._peaks(method, edge, devices, self.refereed[placed])

    def _peaks(self, method: Method, edge: int, devices: int, peaks: list[int]) -> list[int]:
        """Sharded: parameter, gradient and Adam's two states are divided, activations are not.

        A bound in favour of sharding: the parameters gathered for the running layer count nothing,
        and all gradients count as there at the peak.
        """
        if not method.sharded:
            return peaks
        state = 4 * self.case(edge).costs.trained_nbytes
        (peak,) = peaks
        return [max(peak - state, 0) + state // devices]

    def fits(self, name: str, method: Method, edge: int, devices: int, limit: int) -> bool:
        """Whether it fits: by prediction far from the limit, by the ledger near it."""
        peak = max(self.predicted(name, method, edge, devices))
        plan = self.plan(name, method, edge, devices)
        returns = len(plan.stages) > len(plan.devices)  # estimates leave something out
        if abs(peak / limit - 1) < (_NEAR_NONCONTIGUOUS if returns else _NEAR):
            peak = max(self.simulated(name, method, edge, devices))
        return peak <= limit

    def likely(self, name: str, method: Method, devices: int, memory: int) -> int:
        """The largest edge, estimated from the nearest planned one: peaks grow about with the edge's cube."""
        step, limit = self.subject.step, memory * GIB
        planned = [e for n, e, d in self.plans if (n, d) == (name, devices)] or [_FIRST]
        peaks = {e: max(self.predicted(name, method, e, devices)) for e in planned}
        nearest = min(planned, key=lambda e: abs(math.log(peaks[e] / limit)))
        return int(nearest * (limit / peaks[nearest]) ** (1 / 3)) // step * step

    def largest(
        self, name: str, method: Method, devices: int, memory: int, start: int = 0
    ) -> dict[str, Any]:
        """The largest edge that fits, its peaks, and what the next edge would need.

        The search goes up or down step by step from ``start``, or from where it is likely.
        """
        step, limit = self.subject.step, memory * GIB
        edge = start or self.likely(name, method, devices, memory)
        if self.fits(name, method, max(edge, step), devices, limit):
            edge = max(edge, step)
            while self.fits(name, method, edge + step, devices, limit):
                edge += step
        else:
            edge -= step
            while edge > 0 and not self.fits(name, method, edge, devices, limit):
                edge -= step
            edge = max(edge, 0)
        while edge and max(self.simulated(name, method, edge, devices)) > limit:
            edge -= step
        return {
            "method": name,
            "devices": devices,
            "memory_gib": memory,
            "edge": edge,
            "peaks": self.simulated(name, method, edge, devices) if edge else [],
            "next_predicted": self.predicted(name, method, edge + step, devices),
        }


def _row(
    search: Search, label: str, method: Method, devices: int, memory: int, start: int
) -> dict[str, Any]:
    try:
        return search.largest(label, method, devices, memory, start)
    except RivalFailure as failure:
        known = {"method": label, "devices": devices, "memory_gib": memory}
        return {**known, "edge": 0, "peaks": [], "failure": str(failure)}


def run(
    names: list[str], memories: Sequence[int], *, ours: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """Results per model; those of the file are kept for other models and other sizes of memory.

    ``ours``: only placer's rows are searched anew.
    """
    path = RESULTS / "capacity.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in names:
        subject = SUBJECTS[name]
        search = Search(subject)
        for memory in memories:
            cells = {_cell(row): row for row in found.get(name, [])}
            for label, method in methods(subject).items():
                if ours and not label.startswith("placer"):
                    continue
                for devices in method.devices:
                    before = cells.get((memory, label, devices), {}).get("edge", 0)
                    began = time.perf_counter()
                    row = _row(search, label, method, devices, memory, before if ours else 0)
                    took = time.perf_counter() - began
                    line = f"{name}, {memory} GiB x {devices}, {label}: {row['edge']}"
                    print(f"{line} (before: {before}; {took:.0f} s)", flush=True)
                    cells[_cell(row)] = {**row, "date": datetime.now(UTC).date().isoformat()}
            order = [
                (label, n) for label, method in methods(subject).items() for n in method.devices
            ]
            found[name] = [
                cells[gib, *cell] for gib in MEMORIES for cell in order if (gib, *cell) in cells
            ]
            found = {known: found[known] for known in SUBJECTS if known in found}
            path.write_text(json.dumps(found, indent=1) + "\n")
    return found


def _cell(row: Mapping[str, Any]) -> tuple[int, str, int]:
    return row["memory_gib"], row["method"], row["devices"]


_NOTE = (
    "A cell is the edge of the largest cube (a multiple of 16; SwinUNETR takes multiples of 32) that "
    "one training step fits on devices of 8, 16 and 24 GiB each: Adam, batch 1, fp32, the fullest "
    "device's peak by the ledger, nothing kept back; 0: the tool cannot place the model, -: not "
    "measured. The hand split is for two devices. Sharding divides parameters, gradients and Adam's "
    "states; the parameters gathered for the running layer are left out, in its favour."
)


def _dates(results: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """When the models were measured, if not all on the same day."""
    days: dict[str, dict[str, None]] = {}
    for name, rows in results.items():
        ours = {row["date"] for row in rows if row["method"].startswith("placer")}
        others = {row["date"] for row in rows if not row["method"].startswith("placer")}
        for day in ours | others:
            what = (
                name
                if day in ours & others
                else f"{name} ({'placer' if day in ours else 'others'})"
            )
            days.setdefault(day, {})[what] = None
    if len(days) == 1:
        return []
    return [f"Measured {day}: {', '.join(names)}." for day, names in sorted(days.items())] + [""]


def _compared(results: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """A sentence for each of placer's rows: where another row with as many devices fits a larger cube.

    Without recomputation, placer is compared with methods that do not recompute.
    """
    found = []
    for label in ("placer, objective memory", "placer, checkpoint auto"):
        recomputes = "checkpoint" in label
        cells, smaller = 0, []
        for model, rows in results.items():
            for row in rows:
                if row["method"] != label:
                    continue
                cells += 1
                smaller += [
                    f"{model}, {row['devices']} x {row['memory_gib']} GiB: {row['edge']}, "
                    f"{other['method']} {other['edge']}"
                    for other in rows
                    if (other["devices"], other["memory_gib"])
                    == (row["devices"], row["memory_gib"])
                    and other["edge"] > row["edge"]
                    and (recomputes or "checkpoint" not in other["method"])
                ]
        among = "all rows" if recomputes else "the rows that recompute nothing"
        found += [f"- {label}: smaller than one of {among} in {len(smaller)} of {cells} cells."]
        found += [f"  - {line}" for line in smaller]
    return found


def write(results: Mapping[str, list[dict[str, Any]]]) -> None:
    """The page with a table per model, and the plot."""
    blocks = []
    for name, rows in results.items():
        edge = {(r["method"], r["devices"], r["memory_gib"]): r["edge"] for r in rows}
        blocks += [f"## {name}", ""]
        heads = [f"{n} device{'s' * (n > 1)}" for n in DEVICES]
        blocks += [f"| edge in {', '.join(map(str, MEMORIES))} GiB | {' | '.join(heads)} |"]
        blocks += [f"|{' --- |' * (1 + len(DEVICES))}"]
        for label in dict.fromkeys(r["method"] for r in rows):
            cells = []
            for n in DEVICES:
                edges = [edge.get((label, n, memory)) for memory in MEMORIES]
                known = any(edge is not None for edge in edges)
                cells.append(", ".join("-" if e is None else str(e) for e in edges) * known)
            blocks.append(f"| {label} | {' | '.join(cells)} |")
        blocks.append("")
    blocks += [_NOTE, "", *_dates(results), *_compared(results)]
    blocks += ["", "![edges on 16 GiB devices](capacity.png)", ""]
    write_page(
        "capacity", "The largest volume that trains", "python -m benchmarks.capacity", blocks
    )
    plot(results)


def plot(results: Mapping[str, list[dict[str, Any]]], memory: int = 16) -> None:
    """A panel per model: edge over the number of devices of ``memory`` GiB, a line per method."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(3.6 * len(results), 4.4), squeeze=False)
    for axis, (name, rows) in zip(axes[0], results.items(), strict=True):
        for index, label in enumerate(dict.fromkeys(r["method"] for r in rows)):
            points = [
                r for r in rows if r["method"] == label and r["memory_gib"] == memory and r["edge"]
            ]
            ours = label.startswith("placer")
            axis.plot(
                [DEVICES.index(r["devices"]) for r in points],
                [r["edge"] for r in points],
                marker="o" if ours else "osv^Dx*"[index % 7],
                markersize=6 if ours else 4,
                linewidth=2 if ours else 0.8,
                color=f"C{index}",
                label=label,
            )
        axis.set_title(name)
        axis.set_xticks(range(len(DEVICES)), [str(n) for n in DEVICES])
        axis.set_xlabel(f"devices of {memory} GiB")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("edge of the largest cube")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="lower center", ncols=len(results), frameon=False, fontsize=8
    )
    rows_of_legend = -(-len(labels) // len(results))
    figure.tight_layout(rect=(0, 0.05 * rows_of_legend, 1, 1))
    figure.savefig(RESULTS / "capacity.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=[], help=", ".join(SUBJECTS))
    parser.add_argument("--memory", type=int, choices=MEMORIES, action="append", help="GiB")
    parser.add_argument("--ours", action="store_true", help="only placer's rows")
    given = parser.parse_args()
    unknown = [name for name in given.models if name not in SUBJECTS]
    if unknown:
        parser.error(f"no model {unknown[0]!r}; there are {', '.join(SUBJECTS)}")
    write(run(given.models or list(SUBJECTS), given.memory or MEMORIES, ours=given.ours))


if __name__ == "__main__":
    main()
