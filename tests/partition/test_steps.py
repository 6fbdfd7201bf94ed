"""The objective "throughput" is the step that a plan shows, the least of all that use every device."""

from __future__ import annotations

import dataclasses
import itertools
import random
from fractions import Fraction
from typing import Any

import plans
import pytest
import torch
from captured import captured_once
from models import ConvNet
from torch import Tensor, nn
from unet3d import unet3d

from placer.cost import CostEstimates, CostTable
from placer.machine.devices import device_kind
from placer.partition import DeviceSlot, PlanningOptions, choose_partition, rate_partition
from placer.partition.candidate import StageCosts, solve_order, steady_step
from placer.partition.stage_cost.tables import build_tables
from placer.partition.steps import StepClock, step_seconds
from placer.partition.units import program_order, unit_graph
from placer.plan.types import Transfer
from placer.planner.batch import microbatch_inputs, microbatch_rows
from placer.planner.devices import device_slot
from placer.planner.resolve import planning_options
from placer.program import Program, lower
from placer.spec import PlacementSpec


class Case:
    """A captured model with its costs, and all its cuts in program order."""

    def __init__(self, model: nn.Module, x: Tensor, processes: bool, spec: dict[str, Any]) -> None:
        with captured_once():
            self.program: Program = lower(model, (x,))
        self.spec = PlacementSpec.model_validate(spec)
        sizes = microbatch_rows(self.program, [x], 1, int(self.spec.microbatches))
        self.options: PlanningOptions = planning_options(self.spec, sizes, processes=processes)
        inputs = microbatch_inputs(self.program, [x], sizes[0])
        self.costs: CostTable = CostEstimates(self.program)(
            inputs, training=True, precision="fp32", kernels="cuda"
        )
        self.slots = [device_slot(device, self.spec) for device in self.spec.devices]
        units = unit_graph(self.program)
        groups = [units.nodes[unit]["nodes"] for unit in program_order(units)]
        self.nodes = [node for group in groups for node in group]
        self.ends = list(itertools.accumulate(map(len, groups), initial=0))

    def all_cuts(self) -> list[tuple[int, ...]]:
        inner = itertools.combinations(range(1, len(self.ends) - 1), len(self.slots) - 1)
        return [(0, *cuts, len(self.ends) - 1) for cuts in inner]

    def seconds(self, cuts: tuple[int, ...]) -> float:
        """As a plan with these stages would show it."""
        names = [self.program.order[node] for node in self.nodes]
        parts = [names[self.ends[a] : self.ends[b]] for a, b in itertools.pairwise(cuts)]
        stages = list(zip(self.slots, parts, strict=True))
        return rate_partition(self.program, self.costs, stages, self.options).seconds


def _unet() -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        return unet3d(width=2, depth=2), torch.empty(8, 1, 16, 16, 16)


def _spec(devices: int, microbatches: int, schedule: str = "GPipe") -> dict[str, Any]:
    names = [{"name": f"cuda:{i}", "kind": "rtx3090"} for i in range(devices)]
    return {"devices": names, "microbatches": microbatches, "schedule": schedule}


@pytest.mark.matrix(1)
@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize(
    ("devices", "microbatches", "schedule"),
    [(2, 1, "GPipe"), (3, 1, "GPipe"), (2, 4, "GPipe"), (3, 4, "1F1B"), (3, 8, "GPipe")],
)
@pytest.mark.parametrize("model", ["unet", "chain"])
def test_no_cuts_have_a_shorter_step(
    model: str, devices: int, microbatches: int, schedule: str, *, processes: bool
) -> None:
    built = _unet() if model == "unet" else (ConvNet(), torch.empty(8, 1, 8, 8))
    case = Case(*built, processes, _spec(devices, microbatches, schedule))
    chosen = choose_partition(case.program, case.costs, case.slots, {}, case.options)
    assert len(chosen.stages) == devices
    least = min(case.seconds(cuts) for cuts in case.all_cuts())
    assert chosen.seconds <= least * (1 + 1e-3)
    assert chosen.optimality.criterion == "seconds of a step"
    assert chosen.optimality.value == chosen.seconds >= chosen.optimality.lower_bound > 0


@pytest.mark.parametrize("processes", [False, True])
def test_many_placements_are_laid_out_as_one_by_one(*, processes: bool) -> None:
    """They differ in which stages send to which: the model has skip connections."""
    case = Case(*_unet(), processes, _spec(3, 4, "1F1B"))
    tables = build_tables(case.costs, case.nodes, case.ends)
    found = solve_order(
        StageCosts(tables, case.slots, [None] * len(case.nodes), case.options), case.nodes
    )
    assert found is not None
    clock = StepClock(found, case.costs, case.options)
    placements = case.all_cuts()[::9]
    together = clock(placements)
    assert len(set(together)) > 1
    assert together == [clock([cuts])[0] for cuts in placements]
    assert together == pytest.approx([case.seconds(cuts) for cuts in placements], rel=1e-9)
    assert clock([]) == []


@pytest.mark.parametrize("seed", range(8))
def test_the_searchs_closed_form_is_the_layout(seed: int) -> None:
    """GPipe with backwards in proportion to forwards, and the CPUs of one process; 1F1B is no longer than it.

    The search compares thousands of candidates by it, without transfers here.
    """
    rng = random.Random(seed)
    count, microbatches = rng.randint(1, 6), rng.randint(1, 12)
    forward = [Fraction(rng.randint(1, 9), 7) for _ in range(count)]

    def compare(kind: str, schedule: str, *, processes: bool) -> tuple[Fraction, Fraction]:
        names = [f"{kind}:{i}" for i in range(count)]
        launching = 1 if kind == "cpu" else 0
        stages = [
            dataclasses.replace(
                plans.make_plan().stages[0],
                index=i,
                devices=(name,),
                forward_seconds=seconds,
                backward_seconds=2 * seconds,
                forward_launch_seconds=launching * seconds,
                backward_launch_seconds=2 * launching * seconds,
            )
            for i, (name, seconds) in enumerate(zip(names, forward, strict=True))
        ]
        transfers = [
            Transfer(value=f"x{i}", source=i, target=i + 1, nbytes=8, seconds=Fraction(0))
            for i in range(count - 1)
        ]
        options = PlanningOptions(schedule=schedule, microbatches=microbatches, processes=processes)
        slots = [
            DeviceSlot(name=n, kind=device_kind(n, None), budget=None, reserve=0) for n in names
        ]
        whole = [3 * seconds for seconds in forward]
        return (
            step_seconds(stages, transfers, options, 0),
            steady_step(options, slots, max(whole), sum(whole)),
        )

    for found, expected in (
        compare("cuda", "GPipe", processes=True),
        compare("cuda", "GPipe", processes=False),
        compare("cpu", "GPipe", processes=False),
        compare("cpu", "1F1B", processes=False),
    ):
        assert found == expected
    found, most = compare("cuda", "1F1B", processes=True)
    assert microbatches * 3 * max(forward) <= found <= most


def test_the_slowest_device_is_an_objective_of_its_own() -> None:
    """It has even stages; the shortest step of one micro-batch has few transfers."""
    with torch.device("meta"):
        built = unet3d(), torch.empty(1, 1, 64, 64, 64)
    busy = {}
    for objective in ("throughput", "bottleneck"):
        case = Case(*built, False, {**_spec(2, 1), "objective": objective})
        found = choose_partition(case.program, case.costs, case.slots, {}, case.options)
        work = [(s.forward_seconds or 0) + (s.backward_seconds or 0) for s in found.stages]
        busy[objective] = (found.seconds, max(work))
    assert busy["throughput"][0] < busy["bottleneck"][0]
    assert busy["throughput"][1] > busy["bottleneck"][1]
