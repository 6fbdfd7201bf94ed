"""More devices than plans can be made for: estimates along program order, and one plan."""

from __future__ import annotations

import pytest
import torch
from models import Blocks
from torch import Tensor

import placer
from placer.api import lower_call
from placer.partition.stage_cost.optimizer import optimizer_seconds
from placer.plan.store import plan_from_json, plan_to_json
from placer.planner.devices import device_slot, links_of, with_all_devices
from placer.quantities import parse_bytes
from placer.search.bounds import Bounds
from placer.search.search import find_strategy
from placer.search.strategy import Pool, Strategy
from placer.simulation.judge import JudgingPlanner
from placer.simulation.simulate import dry_run
from placer.spec import PlacementSpec

NODES = 8  # of eight devices


def _model(depth: int) -> tuple[torch.nn.Module, Tensor]:
    with torch.device("meta"):
        return Blocks(2048, depth), torch.empty(64 * 1024, 2048)


@pytest.fixture(scope="module")
def planner() -> tuple[PlacementSpec, JudgingPlanner, Bounds]:
    wanted = PlacementSpec.model_validate({"machine": f"dgx-a100:{NODES}", "precision": "bf16"})
    model, x = _model(32)
    program, inputs = lower_call(model, (x,), None, wanted)
    make = JudgingPlanner(program, inputs, processes=True)
    loss = make.loss_of(wanted)
    return wanted, make, Bounds(program, inputs, wanted, make.costs, loss, processes=True)


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(stages=8, microbatches=16, schedule="1F1B"),
        Strategy(replicas=4, stages=16, microbatches=4, schedule="InterleavedZeroBubble"),
        Strategy(replicas=64),
    ],
    ids=Strategy.describe,
)
def test_an_estimate_along_program_order_is_near_the_plan(
    planner: tuple[PlacementSpec, JudgingPlanner, Bounds], strategy: Strategy
) -> None:
    wanted, make, bounds = planner
    spec, estimate = (
        strategy.spec(wanted, Pool(wanted.devices)),
        bounds.along_program_order(strategy),
    )
    assert spec is not None and estimate is not None
    assert bounds(strategy).seconds <= estimate.seconds <= estimate.worst_seconds
    assert estimate.seconds == pytest.approx(make.estimate(spec).rank_time, rel=0.12)


def test_an_estimate_along_program_order_recomputes_what_it_must(
    planner: tuple[PlacementSpec, JudgingPlanner, Bounds],
) -> None:
    wanted, make, _ = planner

    def seconds(memory: str, strategy: Strategy) -> float | None:
        devices = [d.model_copy(update={"memory": parse_bytes(memory)}) for d in wanted.devices]
        less = wanted.model_copy(update={"machine": None, "devices": tuple(devices)})
        bounds = Bounds(
            make.program, make.inputs, less, make.costs, make.loss_of(less), processes=True
        )
        found = bounds.along_program_order(strategy)
        return None if found is None else found.seconds

    plain = Strategy(stages=8, microbatches=16, schedule="1F1B")
    light = Strategy(stages=8, microbatches=16, schedule="1F1B", recompute=True)
    assert seconds("40GiB", plain) == seconds("40GiB", light)
    assert seconds("5GiB", plain) is None
    few, many = seconds("5GiB", light), seconds("4GiB", light)
    assert few is not None and many is not None and seconds("40GiB", plain) < few < many
    assert seconds("1GiB", light) is None  # weights and gradients alone are more


def test_the_best_of_many_devices_is_planned() -> None:
    model, x = _model(8)
    plan = placer.auto_plan(model, x, machine=f"dgx-a100:{NODES}", precision="bf16", processes=True)
    assert plan.fits and plan.grid.size <= 8 * NODES
    estimated = [each for each in plan.alternatives if each.fits]
    assert len(estimated) > 3 and not any(each.judged for each in estimated)
    faster = [a for a in estimated if a.step_seconds and a.step_seconds < plan.rank_time * 0.9]
    assert faster and all("s if collectives use one network card" in a.reason for a in faster)
    data = plan_to_json(plan)
    assert len(data["roles"]) <= len(plan.devices) / plan.replicas
    assert plan_from_json(data) == plan


def test_devices_without_a_dry_run_need_as_much_more_than_their_estimates() -> None:
    with torch.device("meta"):
        model, x = Blocks(64, 3), torch.empty(8, 64)
    spec = {"devices": ["cpu:0", "cpu:1", "cpu:2"], "microbatches": 2, "schedule": "1F1B"}
    plan = placer.make_plan(model, spec, x, processes=True)
    program, inputs = lower_call(model, (x,), None, placer.load_spec(spec))
    estimated = JudgingPlanner(program, inputs, processes=True).estimate(placer.load_spec(spec))
    whole = dry_run(program, estimated, inputs, processes=True)(estimated.devices)
    assert whole == plan.devices
    more = [run.needed - each.needed for run, each in zip(whole, estimated.devices, strict=True)]
    fullest_first = sorted(range(3), key=lambda i: -estimated.devices[i].needed)
    assert more[fullest_first[0]] != more[fullest_first[1]]
    ran = dry_run(program, estimated, inputs, processes=True, only_fullest=True)
    part, (fullest, *left) = ran(estimated.devices), fullest_first
    assert part[fullest] == whole[fullest]
    excess = max(0, more[fullest])
    assert all(part[i].needed == estimated.devices[i].needed + excess for i in left)


def test_bounds_count_the_gather_of_weights(
    planner: tuple[PlacementSpec, JudgingPlanner, Bounds],
) -> None:
    """Ranks that divide the optimizer's state update a part of the weights, and gather all of them."""
    wanted, make, bounds = planner
    trained = sum(parameter.nbytes for parameter in make.program.model.parameters())
    kind, links = device_slot(wanted.devices[0], wanted).kind, links_of(wanted)
    found = {
        state: bounds(Strategy(replicas=64, shard_state=state)) for state in ("none", "optimizer")
    }
    update = [optimizer_seconds(trained / ranks, "adam", kind) for ranks in (1, 64)]
    for field, each in (("seconds", links), ("worst_seconds", links.at_worst())):
        more = getattr(found["optimizer"], field) - getattr(found["none"], field)
        gathered = each.gather_seconds(trained, ranks=64, stride=1)
        assert more == pytest.approx(gathered + update[1] - update[0])


def test_a_plan_at_its_worst_gathers_weights_with_one_network_card() -> None:
    model, x = _model(2)
    found = []
    fields = {"machine": "dgx-a100:2", "replicas": 16, "stages": 1, "microbatches": 1}
    for divided in ({"shard_state": "none"}, {"shard_state": "optimizer", "shard_over": 16}):
        wanted = PlacementSpec.model_validate({**fields, **divided, "checkpoint": []})
        program, inputs = lower_call(model, (x,), None, wanted)
        make = JudgingPlanner(program, inputs, processes=True)
        best = find_strategy(with_all_devices(wanted), make).best
        assert best is not None and best.plan is not None
        found.append((best.plan.optimizer_seconds or 0.0, best.plan.rank_time, best.worst_time))
    links, trained = links_of(wanted), sum(p.nbytes for p in model.parameters())
    slower = [
        each.gather_seconds(trained, ranks=16, stride=1) for each in (links.at_worst(), links)
    ]
    more, longer, longer_at_worst = (b - a for a, b in zip(*found, strict=True))
    assert longer == pytest.approx(more)
    assert longer_at_worst == pytest.approx(more + slower[0] - slower[1])
