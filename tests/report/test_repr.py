"""What the interface returns, printed: one block that can be read, however large the model is."""

from __future__ import annotations

import html
from typing import Any

import pytest
import torch
from torch import nn

import placer

pytestmark = pytest.mark.usefixtures("one_capture")

X = torch.randn(4, 8)
SPEC = {"devices": [{"name": "cuda:0", "memory": "2GiB"}, "cuda:1"], "replicas": 2}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(30)))


def _block(shown: object, most: int) -> list[str]:
    lines = repr(shown).splitlines()
    assert len(lines) <= most
    assert all(len(line) <= 250 for line in lines), lines
    return lines


def test_a_plan_is_a_line_per_stage(model: nn.Module) -> None:
    plan = placer.make_plan(model, SPEC, X)
    head, first, second = _block(plan, 3)
    assert head.startswith("Plan(fits, 2 stages, 2 replicas, 1 micro-batch (GPipe), fp32")
    assert first.startswith("  stage 0 on cuda:0 (and cuda:2): 0 … ")
    assert " nodes), peak " in first and first.endswith(" of 2.00 GiB")
    assert "stage 1 on cuda:1" in second
    (stage,) = _block(plan.stages[1], 1)
    assert stage == f"<{second.strip()}>"


def test_a_simulation_is_a_line_per_device(model: nn.Module) -> None:
    report = placer.simulate(model, {"devices": ["cuda:0", "cuda:1"]}, X)
    head, *devices = _block(report, 3)
    assert head == "SimulationReport(the step ran)"
    assert [line.partition(":")[2].partition(":")[0] for line in devices] == ["0", "1"]
    assert all("peak " in line and "predicted " in line for line in devices)


def test_a_plan_for_devices_of_unknown_memory_does_not_say_that_it_fits() -> None:
    plan = placer.make_plan(nn.Linear(8, 2), {"devices": ["cuda:7"]}, X)
    assert repr(plan).startswith("Plan(unknown whether it fits, 1 stage")


def test_a_verification_is_its_verdict_and_what_differs() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
    result = placer.verify(model, {"devices": ["cuda:0", "cuda:1"]}, X, run_on="cpu")
    assert len(result.comparisons) >= 200
    (verdict,) = _block(result, 1)
    assert verdict.startswith("Verification(EQUAL: ")
    strict = placer.verify(
        model, {"devices": ["cuda:0"], "microbatches": 2}, X, run_on="cpu", tolerance=-1.0
    )
    lines = _block(strict, 7)
    assert lines[0].startswith("Verification(DIFFERENT: ")
    assert "… and " in lines[-1] and lines[-1].endswith(" more")
    halves = {"devices": ["cuda:0"], "microbatches": 2}
    rounded = placer.verify(model, halves, X, run_on="cpu", tolerance=1e-9)
    assert "gone in float64" in repr(rounded).splitlines()[-1]


def test_a_spec_says_what_was_asked_for() -> None:
    layers = {f"blocks.{i}": "cuda:1" for i in range(1_000)}
    spec = placer.load_spec(SPEC | {"layers": layers})
    (shown,) = _block(spec, 1)
    assert shown.startswith("PlacementSpec(devices=('cuda:0=2.00 GiB', 'cuda:1'), layers={")
    assert "blocks.0" in shown and "..." in shown and shown.endswith("replicas=2)")
    assert str(spec) == shown


def test_notebooks_show_a_plan_as_its_page(model: nn.Module) -> None:
    shown: Any = placer.make_plan(model, {"devices": ["cuda:0", "cuda:1"]}, X)
    frame = shown._repr_html_()
    assert frame.startswith("<iframe ") and frame.endswith("</iframe>")
    assert "stage 1" in html.unescape(frame) and "<!doctype html>" in html.unescape(frame)
    assert len(frame) < 60_000  # without curves there is no library


def test_notebooks_show_what_a_spec_asks_for() -> None:
    layers = {f"blocks.{i}": "cuda:1" for i in range(30)} | {"<head>": "cuda:0"}
    shown: Any = placer.load_spec(SPEC | {"layers": layers, "microbatches": 4})
    table = shown._repr_html_()
    for words in ("cuda:0, memory 2GiB", "<code>blocks.0</code> → cuda:1", "… and 11 more"):
        assert words in table
    assert "microbatches" in table and "precision" not in table and "<head>" not in table
