"""At 80 columns, and in a pipe, no name and no unit is cut: columns are left out instead."""

from __future__ import annotations

import dataclasses
import io

import pytest
from plans import make_plan
from rich.console import Console

from placer.plan.types import Plan
from placer.quantities import BYTES, SECONDS
from placer.report import plan_table
from placer.tables import Table

LONG = "backbone.encoder.layers.11.attention.self.query_projection"


def _render(table: object, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, color_system=None)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def _wide_plan() -> Plan:
    """A plan with long names, large numbers, several replicas and all columns."""
    plan = make_plan()
    names = [f"cuda:{1000 + i}" for i in range(len(plan.devices))]
    stages = []
    for stage, name in zip(plan.stages, names, strict=True):
        memory = dataclasses.replace(stage.memory, peak=1023 * 2**30, saved=1023 * 2**30)
        stages.append(
            dataclasses.replace(
                stage, devices=(name, "cuda:2000"), layers=(f"{LONG}_{stage.index}",), memory=memory
            )
        )
    devices = [
        dataclasses.replace(
            device,
            device=name,
            peak=1023 * 2**30,
            budget=1024 * 2**30,
            workspaces=1023 * 2**20,
            reserved=1023 * 2**30,
            context=520 * 2**20,
        )
        for device, name in zip(plan.devices, names, strict=True)
    ]
    layers = {n: f"{LONG}_{s.index}" for s in plan.stages for n in s.nodes}
    return dataclasses.replace(
        plan, replicas=2, stages=tuple(stages), devices=tuple(devices), node_layers=layers
    )


@pytest.mark.parametrize("width", [80, 100, 200])
def test_no_name_and_no_unit_of_a_plan_is_cut(width: int) -> None:
    plan = _wide_plan()
    text = _render(plan_table(plan), width)
    words = set(text.replace(",", " ").split())
    for name in (*(d.device for d in plan.devices), f"{LONG}_0", f"{LONG}_1"):
        assert name in words
    assert all(len(line) <= width for line in text.splitlines())
    tables = [line for line in text.splitlines() if "cuda:1" in line and "iB" in line]
    assert tables and not any("…" in line.replace("… cuda", "") for line in tables)


def test_the_least_important_columns_are_left_out_first() -> None:
    rows = [("one two", "12345678", "87654321")]
    table = Table(headers=("a", "b", "c"), rows=rows, words=("a",), optional=("b", "c"))
    assert _render(table, 30).splitlines()[0].split() == ["a", "b", "c"]
    assert _render(table, 20).splitlines()[0].split() == ["a", "c"]
    assert _render(table, 12).splitlines()[0].split() == ["a"]
    assert _render(table, 12).split()[-2:] == ["one", "two"]
    assert _render(table, 2).split()[-2:] == ["on", "tw"]  # too wide for any console: rich crops it
    console = Console(file=io.StringIO(), width=2, highlight=False, color_system=None)
    console.print(table, crop=False)  # as commands do
    assert console.file.getvalue().split()[-2:] == ["one", "two"]  # type: ignore[attr-defined]


def test_the_numbers_of_a_column_have_one_unit_below_its_header() -> None:
    rows = [("first.layer", 2**30, 0.0123), ("second", 2**20, 4.2e-7), ("third", "not known", 0.0)]
    table = Table(
        headers=("layer", "peak", "time"),
        rows=rows,
        names=("layer",),
        units={"peak": BYTES, "time": SECONDS},
        footer=("all", 3 * 2**30, 0.0123),
    )
    lines = [line.split() for line in _render(table, 80).splitlines()]
    assert lines[:2] == [["peak", "time"], ["layer", "GiB", "ms"]]
    assert [line for line in lines[2:] if line and line[0][0] in "fsta"] == [
        ["first.layer", "1.00", "12.30"],
        ["second", "<0.01", "<0.01"],
        ["third", "not", "known", "0.00"],
        ["all", "3.00", "12.30"],
    ]


def test_columns_of_words_share_what_is_narrow() -> None:
    words = (
        "two replicas of two stages",
        "needs at least 12.65 GiB on a device, most of it for state",
    )
    shown = _render(Table(headers=words, rows=[words], words=words), 60)
    assert max(map(len, shown.splitlines())) <= 60
    assert "needs at least 12.65 GiB" in shown  # and not a word in each line
