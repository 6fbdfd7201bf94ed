"""The page: self-contained, safe with any name, and its numbers are the plan's."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from plans import GIB, make_plan

from placer.errors import PlanError, Tried
from placer.plan.types import Origin, Plan
from placer.report import write_html
from placer.report.html import page
from placer.report.view import view


class _Checker(HTMLParser):
    """Checks that tags are closed; ``shown`` is the text of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.shown = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if tag not in ("b", "code", "span"):  # which stand inside of sentences
            self.shown += " "

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"}.intersection(self.open):
            self.shown += data


ORIGIN = Origin(
    command="placer plan",
    model="net.py:Net",
    options={},
    inputs="4x8",
    spec='{"a": 1}',
    kinds=("h100",),
)


def shown(text: str) -> str:
    """The words of a page."""
    checker = _Checker()
    checker.feed(text)
    assert checker.open == []
    return " ".join(checker.shown.split())


def test_nothing_is_fetched() -> None:
    assert not re.search(r"(?:src|href)\s*=|@import|url\((?!#)", page(make_plan()))


def test_it_tells_the_plan(tmp_path: Path) -> None:
    plan: Plan = dataclasses.replace(make_plan(), origin=ORIGIN)
    write_html(plan, tmp_path / "r.html")
    text = shown((tmp_path / "r.html").read_text(encoding="utf-8"))
    for words in (
        "✓ Fits: cuda:0 has the least headroom, 2.00 GiB",
        "net.py:Net with 4x8, on 2 devices: a step takes ~ 6.00 s by estimate",
        "for 50% of it, the bubble",
        'placer plan {"a": 1}',
        "kind of device h100",
        "cuda:0 stage 0 11.00 GiB 13.00 GiB of 16.00 GiB ✓ 2.00 GiB headroom",
        "B0 50%",
        "stage 0 cuda:0 enc, dec.up",
        "↓ 3.00 MiB enc.0, 1.00 MiB dec.up",
        "0 → 1 enc_0 enc.0 3.00 MiB",
    ):
        assert words in text
    assert "torch" in text and "abc" in text  # versions and fingerprint
    assert "prefers-color-scheme: dark" in page(plan)


def test_a_name_in_code_gets_no_capital() -> None:
    plan = dataclasses.replace(make_plan(), notes=("placed.step() follows 1F1B.", "no kind."))
    text = shown(page(plan))
    assert "placed.step() follows 1F1B. No kind." in text


def test_a_device_that_does_not_fit_is_marked_and_what_would_help_comes_first() -> None:
    """Also where the tensors alone would fit, but not what torch's allocator reserves for them."""
    plan = make_plan(budget=16 * 2**30)
    first, second = plan.devices
    full = dataclasses.replace(first, reserved=15 * 2**30, context=2**29)
    remedies = [
        Tried(change='"offload": "auto"', fits=True, peak=2**30, step_seconds=7.0, headroom=2**20),
        Tried(change='"microbatches": 2', fits=False, peak=2**34),
    ]
    text = page(dataclasses.replace(plan, fits=False, devices=(full, second)), remedies=remedies)
    assert text.count('<small class="bad">✕ 512.00 MiB too much</small>') == 1
    assert 'data-tip="allocator&#39;s rounding: 2.00 GiB"' in text
    words = shown(text)
    assert "✕ Does not fit: cuda:0 is 512.00 MiB over" in words
    assert '✓ fits "offload": "auto" 7.00 s 1.00 MiB 1.00 GiB' in words
    assert '✕ too large "microbatches": 2 - - 16.00 GiB' in words
    assert words.index("What would make it fit") < words.index("Memory of each device")
    assert "Alternatives" not in words


def test_the_lanes_are_the_spans_of_the_step() -> None:
    """Two stages of 1 s forward, 2 s backward: the second computes in the middle of the 6 s."""
    text = page(make_plan())
    lanes = re.findall(r'<i class="s-(\w+)" style="left:(.*?)%;width:(.*?)%"', text)
    first = [("forward", 0.0, 16.667), ("backward", 66.667, 33.333)]
    second = [("forward", 16.667, 16.667), ("backward", 33.333, 33.333)]
    assert [(kind, float(left), float(width)) for kind, left, width in lanes] == first + second
    assert 'data-tip="1F0: 1.00 s, from 1.00 s">F0</i>' in text
    many = page(dataclasses.replace(make_plan(), microbatches=500))
    assert "too many actions to draw here" in many and '<i class="s-forward"></i>' not in many


def _wide(stages: int, replicas: int, skips: int = 0) -> Plan:
    """A plan for one process per device; all replicas need the same."""
    plan = make_plan()
    stage, peak, edge = plan.stages[0], plan.devices[0], plan.transfers[0]
    names = [[f"cuda:{r * stages + s}" for r in range(replicas)] for s in range(stages)]
    return dataclasses.replace(
        plan,
        processes=True,
        replicas=replicas,
        microbatches=8,
        step_seconds=60.0,
        stages=tuple(
            dataclasses.replace(stage, index=i, devices=tuple(names[i])) for i in range(stages)
        ),
        devices=tuple(
            dataclasses.replace(peak, device=names[s][r])
            for r in range(replicas)
            for s in range(stages)
        ),
        transfers=tuple(
            dataclasses.replace(edge, value=f"v{i}", source=0, target=2 + i, seconds=0.01)
            for i in range(skips)
        ),
    )


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("stages", "replicas"), [(8, 1250), (64, 2)])
def test_many_devices_are_rows_of_equal_ones(stages: int, replicas: int) -> None:
    text = page(_wide(stages, replicas, skips=min(6, stages - 2)))
    assert len(text.encode()) < 400_000
    words = shown(text)
    assert text.count('<div class="row">') == min(stages, 16)
    assert f"On {stages * replicas:,} devices" in words
    assert (f"cuda:7 \N{MULTIPLICATION SIGN} {replicas:,}" in words) == (replicas > 1)
    assert text.count('class="skip"') == 4  # lanes of arcs; all six are in the table
    assert "0 → 7" in words
    if stages > 16:
        assert f"{stages - 16} more rows, all with more headroom" in words


def test_shards_of_a_stage_that_need_the_same_are_one_row() -> None:
    text = page(dataclasses.replace(_wide(2, 4), replicas=1, shards=4))
    assert text.count('<div class="row">') == text.count('<div class="lane">') == 2
    assert "cuda:1 \N{MULTIPLICATION SIGN} 4" in shown(text) and "2 stages of 4 shards" in shown(
        text
    )


@pytest.mark.parametrize("processes", [False, True])
def test_in_one_process_other_replicas_receive_weights(processes: bool) -> None:
    plan = dataclasses.replace(_wide(1, 2), processes=processes)
    first, second = plan.devices
    other = dataclasses.replace(second, peak=first.peak - GIB)
    rows = view(dataclasses.replace(plan, devices=(first, other))).devices
    weights = [row.parts["weights"] for row in rows]
    assert weights == [GIB, GIB if processes else 0]


def _simulated(peak: int) -> dict[str, Any]:
    tensor = {
        "bytes": 2**20,
        "kind": "received",
        "name": "enc_0",
        "layer": "enc.0",
        "shape": [4, 2],
    }
    moment = {"phase": "backward", "node": "cat", "layer": "dec", "operation": ""}
    return {"devices": {"cuda:0": {"peak": peak, "largest": [tensor], **moment}}, "step_ok": True}


def test_it_tells_when_a_device_peaks_and_what_is_alive_then() -> None:
    text = shown(page(make_plan(), simulation=_simulated(13 * 2**30)))
    assert "cuda:0: 13.00 GiB in backward of dec" in text
    assert "enc.0 inputs, received 1.00 MiB all others 13.00 GiB" in text
    assert "Alive at the peak" not in page(make_plan())


def test_a_simulated_peak_over_the_budget_is_a_misfit() -> None:
    assert "✓ Fits" in shown(page(make_plan()))
    text = page(make_plan(), simulation=_simulated(2**34))
    assert '<h1 class="bad">' in text and "✕ Does not fit: cuda:0 is 1.00 GiB over" in shown(text)


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "</script><b>", '" onclick="x'])
def test_names_are_escaped(name: str) -> None:
    plan = make_plan()
    stages = tuple(dataclasses.replace(s, layers=(name,)) for s in plan.stages)
    layers = dict.fromkeys(plan.node_layers, name)
    plan = dataclasses.replace(plan, notes=(name,), stages=stages, node_layers=layers)
    origin = dataclasses.replace(ORIGIN, model=name, spec=name)
    text = page(dataclasses.replace(plan, origin=origin))
    assert name not in text
    shown(text)


def test_a_plan_without_budgets_times_or_transfers() -> None:
    plan = dataclasses.replace(make_plan(budget=None), transfers=(), step_seconds=None)
    text = shown(page(plan))
    assert "memory not known" in text and "nothing crosses" in text
    assert "time of a step is not known" in text and "A step in time" not in text


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be written"):
        write_html(make_plan(), tmp_path / "nowhere" / "r.html")
