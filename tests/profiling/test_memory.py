"""The memory of a GPU that a profile records, by what torch says; here torch is made to say it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import placer
from placer.executor.runtime import Runtime
from placer.machine.catalogue import CATALOGUE, PeakMemory, Profile
from placer.machine.kindfile import find_kind, kind_to_json, save_kind
from placer.profiling import memory
from placer.profiling.memory import compare_memory
from placer.program import flatten_call, lower

MIB = 2**20
HELD = 3 * MIB  # by the caller's own tensors


class Torch:
    """Stands for torch's allocator on a machine with a GPU, and notes what it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, expandable: bool) -> None:
        self.asked: list[str] = []
        answers = {
            "memory_allocated": HELD, "memory_reserved": 4 * MIB, "max_memory_allocated": 50 * MIB,
            "max_memory_reserved": 64 * MIB, "reset_peak_memory_stats": None, "empty_cache": None,
            "synchronize": None,
        }  # fmt: skip
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, self._answering(name, answer))
        monkeypatch.setattr(memory, "has_expandable_segments", lambda: expandable)

    def _answering(self, name: str, answer: Any) -> Any:
        def answered(*_: Any) -> Any:
            self.asked.append(name)
            return answer

        return answered


@pytest.mark.matrix(2)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("expandable", [True, False])
def test_peaks_are_of_the_steps_and_beside_the_plans(
    expandable: bool, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    x = torch.randn(4, 3, 32, 32)
    program = lower(model, (x,))
    fake = Torch(monkeypatch, expandable=expandable)
    steps: list[str] = []
    for name in ("step_leaves", "call_leaves"):
        run = getattr(Runtime, name)

        def noted(placed: Any, leaves: Any, run: Any = run, name: str = name, **given: Any) -> Any:
            if type(leaves[0]) is torch.Tensor:  # not in the plan's dry run
                steps.append(name)
            return run(placed, leaves, **given)

        monkeypatch.setattr(Runtime, name, noted)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    found = compare_memory(
        program, model, flatten_call(program.call, (x,), {}),
        device="cuda:0", place=torch.device("cpu"), training=training,
    )  # fmt: skip
    assert found.measured == PeakMemory(allocated=47 * MIB, reserved=60 * MIB)
    assert fake.asked.index("empty_cache") < fake.asked.index("memory_reserved")
    assert fake.asked.index("memory_reserved") < fake.asked.index("reset_peak_memory_stats")
    assert fake.asked.index("reset_peak_memory_stats") < fake.asked.index("max_memory_reserved")
    assert steps == ["step_leaves" if training else "call_leaves"] * 3
    allocator = "expandable" if expandable else "default"
    spec = {"devices": [{"name": "cuda:0", "allocator": allocator}], "training": training}
    assert found.predicted == placer.make_plan(model, spec, (x,)).devices[0]
    assert found.predicted.reserved
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def _kind(measured: PeakMemory | None) -> Any:
    profile = Profile(fingerprint="x", precision="fp32", forward={}, backward={}, memory=measured)
    return replace(CATALOGUE["a100"], context=500 * MIB, profile=profile)


@pytest.mark.parametrize("measured", [None, PeakMemory(allocated=100 * MIB, reserved=128 * MIB)])
def test_the_file_has_it_if_there_is_any(measured: PeakMemory | None, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    values = kind_to_json(
        _kind(measured), device="x", device_type="cuda", torch="2", measured="today"
    )
    save_kind(values, path)
    assert ("memory" in json.loads(path.read_text())["profile"]) == (measured is not None)
    assert find_kind(str(path)).profile.memory == measured
