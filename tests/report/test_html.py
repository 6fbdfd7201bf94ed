"""The page: self-contained, well-formed, and safe with any name."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from plans import make_plan

from placer.errors import PlanError
from placer.plan.types import Plan
from placer.report import write_html
from placer.report.html import page


class _Checker(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_every_tag_is_closed() -> None:
    checker = _Checker()
    checker.feed(page(make_plan()))
    assert checker.open == []


def test_nothing_is_fetched() -> None:
    text = page(make_plan())
    assert not re.search(r"(?:src|href)\s*=|https?://|@import|<script|url\((?!#)", text)


def test_it_tells_the_plan(tmp_path: Path) -> None:
    plan: Plan = make_plan()
    write_html(plan, tmp_path / "r.html", simulation={"devices": {"cuda:1": {"peak": 5 * 2**30}}})
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    for word in (
        "cuda:0",
        "13.00 GiB",
        "budget",
        "prefers-color-scheme: dark",
        "simulated",
        "0.0%",
    ):
        assert word in text
    assert text.count('class="row"') == 2 * 2  # a bar per stage


def test_a_bar_is_red_if_its_device_does_not_fit() -> None:
    """Also where the tensors alone would fit, but not what torch's allocator reserves for them."""
    plan = make_plan(budget=16 * 2**30)
    assert plan.fits and 'class="bad"' not in page(plan)
    first, second = plan.devices
    full = dataclasses.replace(first, reserved=15 * 2**30, context=2**29)
    text = page(dataclasses.replace(plan, fits=False, devices=(full, second)))
    assert text.count('<b class="bad">13.00 GiB</b>') == 1
    assert "context and reserve: 1.50 GiB" in text


def _simulated(peak: int) -> dict[str, object]:
    tensor = {
        "bytes": 2**20,
        "kind": "received",
        "name": "enc_0",
        "layer": "enc.0",
        "shape": [4, 2],
    }
    moment = {
        "phase": "backward",
        "node": "cat",
        "layer": "dec",
        "operation": "",
        "predicted": peak,
    }
    return {"devices": {"cuda:0": {"peak": peak, "largest": [tensor], **moment}}, "step_ok": True}


def test_it_tells_when_a_device_peaks_and_what_is_live_then() -> None:
    text = page(make_plan(), simulation=_simulated(13 * 2**30))
    for word in (
        "cuda:0 at its peak, 13.00 GiB in backward of dec:",
        "received",
        "enc_0",
        "4x2",
    ):
        assert word in text
    assert "largest tensors" not in page(make_plan())


def test_a_simulated_peak_over_the_budget_is_a_misfit() -> None:
    assert 'class="verdict good"' in page(make_plan())
    text = page(make_plan(), simulation=_simulated(2**34))
    assert 'class="verdict bad"' in text
    assert "cuda:0 is 1.00 GiB over" in text


def test_it_can_be_read_on_a_narrow_screen() -> None:
    """Rows of the wide tables become lists there: every cell knows its header."""
    text = page(make_plan())
    assert 'data-label="backward"' in text and "max-width: 640px" in text
    assert "<svg" not in text  # a drawing shrinks with its figures


def test_names_are_escaped() -> None:
    plan = dataclasses.replace(make_plan(), notes=("<script>alert(1)</script>",))
    assert "<script" not in page(plan)
    assert "&lt;script&gt;" in page(plan)


def test_an_overflow_is_marked() -> None:
    text = page(make_plan(budget=11 * 2**30))
    assert 'class="verdict bad"' in text
    assert "cuda:0 is 3.00 GiB over" in text


def test_a_plan_without_budgets_or_transfers() -> None:
    plan = dataclasses.replace(make_plan(budget=None), transfers=())
    text = page(plan)
    assert "not known" in text
    assert "nothing crosses" in text


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be written"):
        write_html(make_plan(), tmp_path / "nowhere" / "r.html")
