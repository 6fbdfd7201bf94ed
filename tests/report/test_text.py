"""What a person reads of a plan."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
import torch
from plans import GIB, make_plan
from rich.console import Console, RenderableType
from torch import nn

import placer
from placer.plan.store import plan_from_json, plan_to_json
from placer.plan.summary import plan_facts
from placer.plan.types import Plan
from placer.report import plan_table, simulation_table, verdict
from placer.report.layers import compact_layers
from placer.report.view import memory_parts, relative_difference, view


def render(shown: Plan | RenderableType) -> str:
    """A plan, or a table, as it is on a terminal of 100 columns."""
    file = io.StringIO()
    Console(width=100, file=file).print(plan_table(shown) if isinstance(shown, Plan) else shown)
    return file.getvalue()


def bubble(plan: Plan) -> str:
    return f"{view(plan).idle:.0%}"


def test_the_table_says_what_a_reader_asks() -> None:
    text = render(make_plan())
    for word in ("enc, dec.up", "dec.conv, head", "cuda:0", "GiB", "13.00", "16.00", "2.00 GiB"):
        assert word in text
    assert "2 stages · 1 replica · 1 micro-batch (GPipe)" in text
    assert "transfers: 2, 4.00 MiB" in text
    assert text.index("3.00  enc_0") < text.index("1.00  up")  # the larger first
    assert "BatchNorm <takes>" in text
    assert "fits: cuda:0 has the least headroom, 2.00 GiB" in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_the_headline_says_over_how_many_devices_a_stage_is_split() -> None:
    assert plan_facts(dataclasses.replace(make_plan(), shards=2))[0] == "2 stages of 2 shards"


def test_a_note_says_where_launching_takes_longer_than_computing() -> None:
    plan = make_plan()
    assert not any("launching" in note for note in view(plan).notes)
    slow = [dataclasses.replace(stage, forward_launch_seconds=9.0) for stage in plan.stages]
    (note,) = [
        n for n in view(dataclasses.replace(plan, stages=tuple(slow))).notes if "launch" in n
    ]
    assert "in 6.00 s, but launching them takes 18.00 s" in note


def test_a_plan_that_overflows_says_where_and_by_how_much() -> None:
    plan = make_plan(budget=11 * GIB)
    assert verdict(plan) == [
        "does not fit: cuda:0 is 3.00 GiB over (13.00 GiB of tensors + 1.00 GiB kept free > "
        "11.00 GiB), in one process"
    ]
    assert "cuda:0 is 3.00 GiB over" in render(plan)
    many = dataclasses.replace(plan, devices=plan.devices[:1] * 9)
    assert len(verdict(many)) == 5
    assert verdict(many)[-1] == "does not fit: 5 more devices, by no more than these"


@pytest.mark.parametrize("processes", [False, True])
def test_the_verdict_says_for_which_runtime_it_is(*, processes: bool) -> None:
    plan = make_plan(budget=20 * GIB)
    alone = verdict(dataclasses.replace(plan, processes=processes))
    runtime = "with a process per device (torchrun)" if processes else "in one process"
    assert [line.endswith(f", {runtime}") for line in alone] == [True]
    assert verdict(dataclasses.replace(plan, replicas=2, processes=processes)) == alone


def test_without_a_budget_nothing_is_promised() -> None:
    text = render(make_plan(budget=None))
    assert "not known" in text
    assert "unknown whether it fits on cuda:0, cuda:1: give their memory" in text
    assert "fits: " not in text


def test_simulated_peaks_stand_beside_the_predicted_ones() -> None:
    simulation: Any = {"devices": {"cuda:0": {"peak": 12 * GIB, "predicted": 13 * GIB}}}
    text = render(simulation_table(make_plan(), simulation))
    assert "simulated" in text
    assert "13.00      12.00" in text and "+8.3%" in text


@pytest.mark.parametrize(
    ("layers", "most", "text"),
    [
        ([], 4, "(only operations between layers)"),
        (["a"], 4, "a"),
        (["enc.0", "enc.1"], 4, "enc.0, enc.1"),
        (["enc.0", "enc.1", "enc.2"], 4, "enc.0 … enc.2"),
        (["a", "b", "c"], 2, "a … c (3 layers)"),
    ],
)
def test_compact_layers(layers: list[str], most: int, text: str) -> None:
    assert compact_layers(layers, most=most) == text


def test_a_value_of_the_models_own_code_is_told_like_on_the_page() -> None:
    assert "the model" in render(dataclasses.replace(make_plan(), node_layers={}))


def test_bubble_is_the_idle_share() -> None:
    assert bubble(make_plan()) == "50%"  # one micro-batch, two stages
    longer = dataclasses.replace(make_plan(), optimizer_seconds=2.0)
    assert bubble(longer) == "50%"  # the optimizer comes after it
    more = dataclasses.replace(make_plan(), microbatches=4)
    assert bubble(more) == "20%"


def test_bubble_counts_the_microbatches_that_there_are_rows_for() -> None:
    """One row makes one micro-batch of the four asked for: of two stages one idles half of the time."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    layers = {"0": "cuda:0", "1": "cuda:0", "2": "cuda:1", "3": "cuda:1"}
    spec = {"devices": [{"name": f"cuda:{i}", "kind": "a100"} for i in range(2)], "layers": layers}
    wanted = placer.make_plan(model, {**spec, "microbatches": 1}, (torch.empty(1, 64),))
    plan = placer.make_plan(model, {**spec, "microbatches": 4}, (torch.empty(1, 64),))
    assert plan.step_seconds == wanted.step_seconds
    assert bubble(plan) == bubble(wanted) > "40%"
    assert (plan.microbatches, plan.example_microbatches) == (4, 1)
    assert plan_from_json(plan_to_json(plan)) == plan


def test_memory_parts_add_up_to_the_peak() -> None:
    kinds = {"weights": 4, "activations": 5, "received": 2, "temporary": 3}
    for peak in (0, 5, 10, 100):
        assert sum(memory_parts(kinds, peak).values()) == peak


def test_a_difference_without_size_has_no_sign() -> None:
    assert relative_difference(99_999, 100_000) == "0.0%"
    assert relative_difference(1, 0) == ""
