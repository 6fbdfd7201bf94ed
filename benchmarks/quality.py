"""How good placer's placements are: against rivals, and against all placements where that finishes.

For every model, 2, 3, 4 and 8 devices (a100, no budgets) and one micro-batch:

    throughput  seconds of the slowest device (the objective "bottleneck"), by the cost tables and the
                definition of a load (`placer.partition.stage_loads`: work, and what crosses the device's
                boundaries, once)
    memory      the largest peak of any device in a training step with Adam, by the ledger

Rivals are those of `benchmarks.baselines`; "one order" is the dynamic program along one arbitrary
topological order. "exact" is the best of all contiguous placements: for throughput over every
downset that can be part of a better one, for memory over every pair of nested downsets, with the
prediction of each stage's peak. Captures and costs are shared; nothing is allocated.

    python -m benchmarks.quality [MODEL ...] [--objective OBJECTIVE] [--again]

Answers are written to results/quality.json as they come, and existing ones are not computed again;
``--again`` repeats placer's answers and keeps the rivals' figures. results/quality.md is the table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from benchmarks.baselines import (
    Placement,
    RivalFailure,
    StagePeaks,
    accelerate_balanced,
    all_stage_peaks,
    balance_by_size,
    balance_by_time,
    equal_layer_counts,
    equal_parameters,
    exact_peaks,
    one_order,
    plan_placement,
)
from benchmarks.capacity import SUBJECTS as VOLUMES
from benchmarks.known_costs import known_costs
from benchmarks.loss import LOSS, MEAN_SQUARE
from benchmarks.msr.proof.search import solve
from benchmarks.record import RESULTS, write_page
from placer.cost import CostTable, estimate_costs
from placer.partition import DeviceSlot, PartitionProblem, PlanningOptions, stage_loads
from placer.partition.model import ModelUnits, model_units, seconds_problem
from placer.partition.units import program_order, unit_graph
from placer.plan.types import Plan
from placer.planner.build import build_plan
from placer.planner.devices import device_slot
from placer.program import Program, lower
from placer.simulation import simulate_plan
from placer.spec import PlacementSpec

DEVICES = (2, 3, 4, 8)
GIB = 2**30
NEVER_WORSE = 1.001  # placer's answer may be this much above a rival's: rounding of the estimates
_MOST_ALIVE = 400_000  # of partly decided downsets; half a minute at most

RIVALS = {
    "layers": equal_layer_counts,
    "parameters": equal_parameters,
    "by size": balance_by_size,
    "by time": balance_by_time,
    "accelerate": accelerate_balanced,
}

Built = tuple[nn.Module, Tensor]


def _vision(name: str, *shape: int, **options: Any) -> Callable[[], Built]:
    return lambda: (torchvision.models.get_model(name, **options), torch.empty(shape))


def _volume(name: str, edge: int) -> Callable[[], Built]:
    subject = VOLUMES[name]
    return lambda: (subject.build(), torch.empty(1, subject.channels, edge, edge, edge))


def _monai_unet() -> Built:
    from monai.networks.nets import UNet

    channels = (32, 64, 128, 256, 320)
    return UNet(3, 1, 3, channels, (2,) * 4, num_res_units=2), torch.empty(1, 1, 128, 128, 128)


def _gpt2() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(use_cache=False, attn_implementation="eager"))
    return model, torch.zeros(4, 256, dtype=torch.long)


SUBJECTS: dict[str, Callable[[], Built]] = {
    "resnet50": _vision("resnet50", 8, 3, 224, 224),
    "inception_v3": _vision("inception_v3", 8, 3, 299, 299, init_weights=False),
    "densenet121": _vision("densenet121", 8, 3, 224, 224),
    "googlenet": _vision("googlenet", 8, 3, 224, 224, init_weights=False),
    "r3d_18": _vision("r3d_18", 2, 3, 16, 112, 112),
    "swin3d_t": _vision("swin3d_t", 1, 3, 16, 224, 224),
    "MONAI U-Net": _monai_unet,
    "DynUNet": _volume("DynUNet", 128),
    "SegResNet": _volume("SegResNet", 128),
    "SwinUNETR": _volume("SwinUNETR", 96),
    "GPT-2": _gpt2,
    "3D U-Net": _volume("U-Net", 128),
}


class Judge:
    """One model with its capture and costs, and the figures of its placements."""

    def __init__(self, name: str) -> None:
        model, x = SUBJECTS[name]()
        x = x.to("meta")
        self.inputs = [x]
        self.program: Program = lower(model.to("meta"), (x,))
        self.costs: CostTable = estimate_costs(self.program, [x], kernels="cuda", loss=MEAN_SQUARE)
        units = unit_graph(self.program)
        self.units: ModelUnits = model_units(units, program_order(units), self.costs, {})
        self._peaks: dict[object, int] = {}
        self._stages: list[StagePeaks | None] | None = None  # not looked for yet

    def spec(self, k: int, objective: str) -> PlacementSpec:
        names: list[Any] = [f"cuda:{i}" for i in range(k)]
        if objective == "throughput":
            objective, names = "bottleneck", [{"name": name, "kind": "a100"} for name in names]
        return PlacementSpec.model_validate({"devices": names, "objective": objective, **LOSS})

    def problem(self, k: int) -> PartitionProblem:
        spec = self.spec(k, "throughput")
        chain: list[DeviceSlot] = [device_slot(device, spec) for device in spec.devices]
        return seconds_problem(self.units, self.costs, chain, PlanningOptions(), [None] * k)

    def plan(self, k: int, objective: str) -> Plan:
        return build_plan(
            self.program,
            self.spec(k, objective),
            self.inputs,
            estimate=known_costs(self.costs),
        )

    def seconds(self, k: int, placement: Placement) -> float:
        """Of the slowest device; by the definition of a load, from no table of the planner's.

        The loss is with the program's last node or on the last device, where that costs less.
        """
        problem = self.problem(k)
        device_of = torch.zeros(problem.num_units, dtype=torch.long)
        for index, node in reversed(list(enumerate(self.costs.names))):
            device_of[int(self.units.unit_of[index])] = placement[node]
        found = []
        for device in {placement[self.program.order[-1]], max(placement.values())}:
            device_of[-1] = device
            found.append(float(stage_loads(problem, device_of.numpy()).max()))
        return min(found)

    def peak(self, k: int, placement: Placement) -> int:
        """The largest peak of any device, by the ledger."""
        key = (k, tuple(placement[node] for node in self.program.order))
        if key not in self._peaks:
            spec = self.spec(k, "memory")
            plan = plan_placement(self.program, spec, self.inputs, placement, costs=self.costs)
            report = simulate_plan(self.program, plan, self.inputs)
            self._peaks[key] = max(device.peak for device in report.devices)
        return self._peaks[key]

    def ours(self, k: int, objective: str) -> dict[str, Any]:
        """Placer's answer; seconds or bytes."""
        began = time.perf_counter()
        plan = self.plan(k, objective)
        planned = time.perf_counter() - began
        if objective == "throughput":
            names = [device.name for device in self.spec(k, objective).devices]
            place = {n: names.index(s.devices[0]) for s in plan.stages for n in s.nodes}
            value = self.seconds(k, place)
        else:
            report = simulate_plan(self.program, plan, self.inputs)
            value = max(device.peak for device in report.devices)
        return {
            "placer": value,
            "predicted": plan.optimality.value,
            "lower_bound": plan.optimality.lower_bound,
            "stages": [stage.devices[0] for stage in plan.stages],
            "plan_seconds": round(planned, 2),
        }

    def rivals(self, k: int, objective: str) -> dict[str, Any]:
        """The figures of every rival and, where it finishes, of the best placement of all."""
        spec = self.spec(k, objective)
        chain = [device_slot(device, spec) for device in spec.devices]
        value = self.seconds if objective == "throughput" else self.peak
        found: dict[str, float | None] = {}
        for name, rival in RIVALS.items():
            if name == "by time" and objective == "memory":
                continue
            try:
                found[name] = value(k, rival(self.program, self.costs, k))
            except RivalFailure:
                found[name] = None
        options = PlanningOptions(objective=spec.objective)
        found["one order"] = value(k, one_order(self.program, self.costs, chain, options))
        return {"rivals": found, "exact": self.exact(k, objective)}

    def exact(self, k: int, objective: str) -> float | None:
        """The best of all contiguous placements; None where there are too many."""
        if objective == "throughput":
            solution = solve(self.problem(k), most_alive=_MOST_ALIVE)
            assert solution is not None
            return solution.value if solution.proven else None
        if self._stages is None:
            self._stages = [all_stage_peaks(self.program, self.costs)]
        (stages,) = self._stages
        return None if stages is None else self.peak(k, exact_peaks(self.program, stages, k))


OBJECTIVES = ("throughput", "memory")


def run(
    names: list[str], *, again: bool, objectives: Sequence[str] = OBJECTIVES
) -> dict[str, dict[str, Any]]:
    """Figures per model, objective and number of devices; kept in the file after each."""
    path = RESULTS / "quality.json"
    found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    for name in names:
        rows = found.setdefault(name, {})
        judge: Judge | None = None
        for objective, k in itertools.product(objectives, DEVICES):
            row = rows.setdefault(f"{objective} {k}", {})
            if "rivals" in row and not again:
                continue
            began = time.perf_counter()
            judge = judge or Judge(name)
            row |= judge.ours(k, objective)
            if "rivals" not in row:
                row |= judge.rivals(k, objective)
            values = {**row["rivals"], "exact": row["exact"]}
            ratios = {n: f"{v / row['placer']:.3f}" for n, v in values.items() if v is not None}
            took = time.perf_counter() - began
            print(
                f"{name}, {objective} {k}: {row['placer']:.4g} {ratios} ({took:.0f} s)", flush=True
            )
            found = {known: found[known] for known in SUBJECTS if known in found}
            path.write_text(json.dumps(found, indent=1) + "\n")
    return found


def write(results: Mapping[str, Mapping[str, Any]]) -> None:
    """The page: a table per objective, and where placer is not the best."""
    blocks, worse = [], []
    for objective, unit in (("throughput", "ms"), ("memory", "GiB")):
        names = [*RIVALS, "one order"]
        blocks += [f"## {objective}", ""]
        heads = ["model", "devices", f"placer, {unit}", *names, "exact", "bound"]
        blocks += [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
        for name, rows in results.items():
            for k in DEVICES:
                row = rows.get(f"{objective} {k}")
                if row is None or "rivals" not in row:
                    continue
                ours = row["placer"]
                shown = f"{ours * 1e3:.3f}" if unit == "ms" else f"{ours / GIB:.3f}"
                folded = len(row["stages"]) > len(set(row["stages"]))
                values = [row["rivals"].get(rival) for rival in names]
                cells = ["" if value is None else f"{value / ours:.3f}" for value in values]
                exact = "" if row["exact"] is None else f"{row['exact'] / ours:.3f}"
                bound = f"{row['lower_bound'] / row['predicted']:.3f}"
                where = f"{k}{' (folded)' if folded else ''}"
                blocks.append(f"| {' | '.join([name, where, shown, *cells, exact, bound])} |")
                others = {**row["rivals"], "exact": row["exact"]}
                worse += [
                    f"- {objective}, {name}, {k} devices: {rival} is {ours / value - 1:.2%} better"
                    for rival, value in others.items()
                    if value is not None and ours > value * NEVER_WORSE
                ]
        blocks.append("")
    blocks += ["Cells are the rival's value over placer's: above 1, placer is better.", ""]
    blocks += [f"Where placer is worse by more than {NEVER_WORSE - 1:.1%}:", ""]
    blocks += [*(worse or ["- nowhere"]), ""]
    blocks += [__doc__.partition("\n\n")[2].partition("    python")[0]]
    blocks += [
        "layers, parameters: equal counts along the chain of layers; by size, by time: torchgpipe's "
        "balancers; accelerate: `device_map=\"balanced\"`. exact is empty where it did not finish. "
        "bound: the plan's lower bound over its value. folded: a device has more than "
        "one stage.",
        "",
    ]  # fmt: skip
    write_page("quality", "Quality of placements", "python -m benchmarks.quality", blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=[], help=", ".join(SUBJECTS))
    parser.add_argument("--again", action="store_true", help="plan anew, keep rivals' figures")
    parser.add_argument("--objective", choices=OBJECTIVES, help="rows of this one alone")
    given = parser.parse_args()
    unknown = [name for name in given.models if name not in SUBJECTS]
    if unknown:
        parser.error(f"no model {unknown[0]!r}; there are {', '.join(SUBJECTS)}")
    objectives = (given.objective,) if given.objective else OBJECTIVES
    write(run(given.models or list(SUBJECTS), again=given.again, objectives=objectives))


if __name__ == "__main__":
    main()
