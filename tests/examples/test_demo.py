"""The demo's parts at a tiny size; `make demo` runs it whole."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from captured import captured_once
from rich.console import Console

import placer
from examples.demo.brain import (
    CLASSES,
    Brain,
    cut_patches,
    dice_scores,
    load_brain,
    padded_shape,
    training_and_held_out_centers,
)
from examples.demo.run import run_demo


@pytest.fixture(scope="module")
def brain() -> Brain:
    return load_brain()


def test_the_brain_is_the_real_one(brain: Brain) -> None:
    assert brain.shape == (197, 233, 189)
    assert padded_shape(brain.shape) == (208, 240, 192)
    counts = brain.labels.flatten().bincount(minlength=len(CLASSES))
    litres = counts / 1e6
    assert 0.9 < litres[1] < 1.3  # grey matter of the template, at 1 mm
    assert 0.4 < litres[2] < 0.8  # white matter
    inside = brain.image[brain.labels > 0]
    assert inside.mean().item() == pytest.approx(0, abs=1e-3)
    assert inside.std().item() == pytest.approx(1, abs=1e-3)


def test_held_out_patches_share_no_voxel_with_the_training_ones(brain: Brain) -> None:
    train, held_out = training_and_held_out_centers(brain, 32)
    assert len(train) > 10_000 and len(held_out) > 10_000
    assert train[:, 1].max() + 16 <= held_out[:, 1].min() - 16
    images, labels = cut_patches(brain, held_out[:3], 32)
    assert images.shape == (3, 1, 32, 32, 32) and labels.shape == (3, 32, 32, 32)
    center = tuple(int(c) for c in held_out[0])
    assert labels[0, 16, 16, 16] == brain.labels[center]


def test_dice() -> None:
    labels = torch.tensor([[[[0, 1, 1, 2]]]])
    logits = torch.nn.functional.one_hot(torch.tensor([[[[0, 1, 2, 2]]]]), 3).movedim(-1, 1).float()
    assert dice_scores(logits, labels) == pytest.approx([2 / 3, 2 / 3])
    perfect = torch.nn.functional.one_hot(labels, 3).movedim(-1, 1).float()
    assert dice_scores(perfect, labels) == [1.0, 1.0]


def test_the_whole_demo_with_few_steps(
    brain: Brain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("examples.demo.run.load_brain", lambda: brain)
    text = io.StringIO()
    with captured_once():
        run_demo(tmp_path, Console(file=text, width=100), steps=12, width=8, patch=16)
    said = " ".join(text.getvalue().split())
    assert "It does not fit" in said
    assert "EQUAL" in said
    plan = placer.load_plan(tmp_path / "plan.json")
    assert plan.fits and len(plan.stages) == 2
    spec = placer.load_spec(tmp_path / "spec.json")
    assert [device.name for device in spec.devices] == ["cuda:0", "cuda:1"]
    assert "<html" in (tmp_path / "report.html").read_text()
    assert json.loads((tmp_path / "plan.json").read_text())["fits"] is True
