"""The page in headless Chromium: no errors, nothing is cut, curves and notes have the plan's numbers."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import placer
from placer.plan.types import Plan
from placer.quantities import format_bytes, format_seconds
from placer.report.html import page
from placer.simulation import SimulationReport

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr"),
    *("--disable-background-networking", "--hide-scrollbars", "--virtual-time-budget=2000"),
)
# Moves the pointer to the peak of every curve, and over the first box of a lane; then measures.
PROBE = """
<script>
const seen = {notes: []};
const move = (on, kind, x, y) => {
  const {left, top} = on.getBoundingClientRect();
  on.dispatchEvent(new MouseEvent(kind, {bubbles: true, clientX: left + x, clientY: top + y}));
  return document.getElementById("tip").textContent;
};
const curves = JSON.parse(document.getElementById("curves").textContent);
document.querySelectorAll(".u-over").forEach((over, i) => {
  const share = (curves[i].peak.at - curves[i].x[0]) / (curves[i].x.at(-1) - curves[i].x[0]);
  seen.notes.push(move(over, "mousemove", over.clientWidth * share + 0.6, 20));
});
seen.span = move(document.querySelector(".time i"), "pointermove", 1, 1);
seen.canvases = document.querySelectorAll("canvas").length;
seen.overflow = document.documentElement.scrollWidth - innerWidth;
document.body.dataset.seen = JSON.stringify(seen);
</script>
"""


class _Seen(NamedTuple):
    console: list[str]
    words: str
    found: dict[str, Any]


def _open(text: str, folder: Path, *flags: str) -> _Seen:
    path = folder / "page.html"
    path.write_text(text.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={folder / 'profile'}", *flags]
    ran = subprocess.run(
        [*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120
    )
    body = re.sub(r"<(script|style)\b.*?</\1>", "", ran.stdout, flags=re.DOTALL)
    found = re.search(r'data-seen="(.*?)"', body)
    assert found is not None, ran.stderr
    return _Seen(
        [line for line in ran.stderr.splitlines() if "CONSOLE" in line],
        " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split()),
        json.loads(html.unescape(found[1])),
    )


def _placed(**fields: Any) -> tuple[Plan, SimulationReport]:
    with torch.device("meta"):
        layers = (nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6))
        model, x = nn.Sequential(*layers), torch.empty(64, 256)
    devices = [{"name": f"cuda:{i}", "memory": "2GiB", "kind": "h100"} for i in range(2)]
    layers_on = {f"{i}": f"cuda:{i // 3}" for i in range(6)}
    plan = placer.make_plan(model, {"devices": devices, "layers": layers_on, **fields}, x)
    return plan, placer.simulate(model, plan, x)


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        ({"microbatches": 4, "schedule": "1F1B"}, ("--window-size=1280,900",)),
        (
            {"microbatches": 2, "replicas": 2},
            ("--window-size=500,900", "--blink-settings=preferredColorScheme=0"),
        ),
    ],
)
def test_a_page_shows_the_numbers_of_the_plan(
    fields: dict[str, Any], flags: tuple[str, ...], tmp_path: Path
) -> None:
    plan, report = _placed(**fields)
    text = page(plan, simulation=report)
    assert len(text.encode()) < 400_000
    curves = json.loads(re.findall(r'id="curves">(.*?)</script>', text)[0])
    peaks = {device.device: device.peak for device in plan.devices}
    for curve in curves:
        totals = [sum(kinds) for kinds in zip(*curve["kinds"].values(), strict=True)]
        assert max(totals) == curve["peak"]["bytes"] == peaks[curve["name"]]
    seen = _open(text, tmp_path, *flags)
    assert seen.console == []
    assert seen.found["canvases"] == len(curves) == 2 * plan.replicas
    assert seen.found["overflow"] <= 0
    for device in plan.devices:
        for nbytes in (device.needed, device.budget, device.headroom, device.peak):
            assert format_bytes(nbytes or 0) in seen.words
    assert format_seconds(plan.step_seconds or 0) in seen.words
    for curve, note in zip(curves, seen.found["notes"], strict=True):
        first, *alive = note.splitlines()
        assert first.startswith(f"{curve['name']} at ")
        assert f": {format_bytes(curve['peak']['bytes'])}, in " in first
        assert len(alive) == 4 and all("iB  " in line for line in alive)
    first = "weights of stage 0" if plan.replicas > 1 else "0F0"
    assert seen.found["span"].startswith(f"{first}: ")


def test_parts_of_a_device_add_up_to_what_it_needs() -> None:
    from placer.report.view import view

    plan, report = _placed(microbatches=2)
    for group in view(plan, report).devices:
        assert sum(group.parts.values()) == group.needs.needed
        assert group.needs in plan.devices  # the dry run is the plan's
