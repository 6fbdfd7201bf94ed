"""Machines: their files, their links, and how they decide between strategies."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from captured import captured_once
from torch import nn

import placer
from placer.errors import PlacerError, SpecError
from placer.machine.links import Link, Links
from placer.machine.machine import Machine, find_machine, shipped_machines
from placer.spec import PlacementSpec


@pytest.mark.parametrize("name", shipped_machines())
def test_shipped_machines_are_read_and_say_where_their_numbers_are_from(name: str) -> None:
    machine = find_machine(name)
    assert machine.name == name and machine.source
    two = find_machine(f"{name}:2") if machine.network else machine
    assert two.devices == machine.devices * (2 if machine.network else 1)


def test_errors_of_a_machine_name_the_place(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    good = {"name": "m", "devices_per_node": 2, "kind": "a100", "inside": {"send": "10GB/s"}}
    for fields, where in (
        ({"inside": {"send": "10GB"}}, "/inside/send"),
        ({"nodes": 2}, "/network"),
        ({"devices": 3}, "/devices"),
    ):
        path.write_text(json.dumps(good | fields))
        with pytest.raises(PlacerError, match=where):
            find_machine.__wrapped__(str(path))
    with pytest.raises(SpecError, match="did you mean 'dgx-a100'"):
        PlacementSpec.model_validate({"machine": "dgx-a10"})
    with pytest.raises(PlacerError, match="/network: is missing"):
        find_machine("desktop-2x4090:2")


def test_a_spec_of_a_machine_has_its_devices_and_is_written_without_them() -> None:
    spec = PlacementSpec.model_validate({"machine": "dgx-a100", "stages": 4, "replicas": 2})
    assert len(spec.devices) == 4 and spec.device_rows(2)[1][0] == "cuda:4"
    assert json.loads(spec.to_json()) == {"machine": "dgx-a100", "stages": 4, "replicas": 2}
    assert placer.load_spec(json.loads(spec.to_json())) == spec
    pinned = spec.with_layers({"head": "cuda:1"})
    assert placer.load_spec(json.loads(pinned.to_json())) == pinned


def test_seconds_of_collectives_by_hand() -> None:
    """Bus bandwidth as nccl-tests define it, and one card for each rank of a node."""
    links = Links(
        inside=Link(send=Fraction(100), bus=Fraction(100)),  # type: ignore[arg-type]
        network=Link(send=Fraction(10), bus=Fraction(10)),  # type: ignore[arg-type]
        node=4,
        cards=4,
    )
    nbytes = Fraction(1000)
    assert links.all_reduce_seconds(nbytes, ranks=4, stride=1) == 2 * Fraction(3, 4) * 10  # type: ignore[arg-type]
    # Eight ranks, all of two nodes: four cards together; at worst, one
    assert links.all_reduce_seconds(nbytes, ranks=8, stride=1) == 2 * Fraction(7, 8) * 25  # type: ignore[arg-type]
    assert (
        links.at_worst().all_reduce_seconds(nbytes, ranks=8, stride=1) == 2 * Fraction(7, 8) * 100
    )  # type: ignore[arg-type]
    # One rank of each node: its own card
    assert links.all_reduce_seconds(nbytes, ranks=2, stride=4) == 100  # type: ignore[arg-type]
    assert links.gather_seconds(nbytes, ranks=2, stride=4) == 50  # type: ignore[arg-type]
    assert links.all_reduce_seconds(nbytes, ranks=1, stride=1) == 0  # type: ignore[arg-type]


class Wide(nn.Sequential):
    """So many weights that summing their gradients over a slow network takes longer than computing."""

    def __init__(self) -> None:
        super().__init__(*(layer for _ in range(8) for layer in (nn.Linear(4096, 4096), nn.ReLU())))


@captured_once()
def test_a_slow_network_decides_against_replicas_over_nodes(tmp_path: Path) -> None:
    def chosen(send: str) -> str:
        path = tmp_path / f"{send[:-4]}.json"
        machine = Machine.model_validate(
            {
                "name": "two",
                "nodes": 2,
                "devices_per_node": 1,
                "kind": "a100",
                "inside": {"send": "100GB/s"},
                "network": {"send": send},
            }
        )
        path.write_text(machine.model_dump_json(by_alias=True, exclude_none=True))
        with torch.device("meta"):
            model, x = Wide(), torch.empty(4096, 4096)
        return placer.auto_plan(
            model, x, machine=str(path), processes=True, microbatches=1
        ).strategy

    assert chosen("100GB/s") == "2 replicas"
    assert "replicas" not in chosen("1GB/s")


@captured_once()
def test_a_strategy_has_the_stages_of_its_plan_where_layers_leave_a_device_without() -> None:
    given = {"machine": "dgx-a100", "stages": 2, "layers": {"**": "cuda:0"}}
    plan = placer.auto_plan(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.empty(4, 8), **given)
    said = [plan.strategy, *(each.strategy for each in plan.alternatives)]
    assert said == ["one device", "2 replicas"]


@captured_once()
def test_replicas_of_a_stage_share_a_node_where_sums_take_longer_than_sends(tmp_path: Path) -> None:
    """Two nodes of two: with wide layers and few rows gradients are large, with many rows activations."""
    path = tmp_path / "two.json"
    path.write_text(
        json.dumps(
            {
                "name": "two",
                "nodes": 2,
                "devices_per_node": 2,
                "kind": "a100",
                "inside": {"send": "100GB/s"},
                "network": {"send": "1GB/s"},
            }
        )
    )
    spec = {"machine": str(path), "stages": 2, "replicas": 2, "node_layout": "auto"}
    with torch.device("meta"):
        model, few, many = Wide(), torch.empty(64, 4096), torch.empty(1 << 19, 4096)

    def plan(x: torch.Tensor, layout: str) -> placer.Plan:
        return placer.make_plan(model, {**spec, "node_layout": layout}, x, processes=True)

    for x, best in ((few, "replicas"), (many, "stages")):
        plans = {layout: plan(x, layout) for layout in ("stages", "replicas", "auto")}
        assert plans["auto"].node_layout == best
        seconds = {layout: found.step_seconds or 0 for layout, found in plans.items()}
        assert seconds["auto"] == seconds[best] == min(seconds.values()) < max(seconds.values())
    chosen = placer.auto_plan(model, few, **(spec | {"processes": True}))  # type: ignore[arg-type]
    assert chosen.node_layout == "replicas"


@captured_once()
def test_sums_of_gradients_take_time_in_every_plan() -> None:
    """By hand: 8 x 4096 x 4097 weights, summed over two replicas, and all but a bucket hidden by backward."""
    with torch.device("meta"):
        model, x = Wide(), torch.empty(64, 4096)
    devices = [{"name": f"cuda:{i}", "kind": "a100"} for i in range(2)]
    one = placer.make_plan(model, {"devices": devices[:1]}, x[:32], processes=True)
    two = placer.make_plan(model, {"devices": devices[:1], "replicas": 2}, x, processes=True)
    nbytes = 4 * 8 * 4096 * 4097
    (stage,) = two.stages
    assert stage.sum_seconds == pytest.approx(nbytes / 150e9)
    assert two.step_seconds is not None and one.step_seconds is not None
    hidden = stage.backward_seconds or 0
    assert two.step_seconds == pytest.approx(
        one.step_seconds + (stage.sum_seconds or 0) - hidden, rel=0.05
    )


@captured_once()
def test_a_spec_that_names_only_a_machine_gets_the_best_strategy() -> None:
    """As `auto` chooses; with a number of stages it is a plan like any other."""
    with torch.device("meta"):
        model, x = Wide(), torch.empty(64, 4096)
    spec = {"machine": "desktop-2x4090", "microbatches": 1}
    plan = placer.make_plan(model, spec, x)
    assert plan.strategy == placer.auto_plan(model, x, **spec).strategy
    fixed = placer.make_plan(model, {**spec, "stages": 2}, x)
    assert fixed.strategy == "" and len(fixed.stages) == 2
