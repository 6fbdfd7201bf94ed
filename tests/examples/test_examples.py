"""Every example runs, and what it replaces is what it does."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from captured import captured_once
from oracle import assert_close
from torch import nn
from torch.nn import functional as F

import placer

EXAMPLES = Path(__file__).parents[2] / "examples"
GIB = 2**30


@pytest.fixture(autouse=True)
def _examples_can_be_imported() -> Iterator[None]:
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


def _example(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.mark.parametrize(
    ("replicas", "full", "last"),
    [
        (3, [10, 10, 10], [4, 4, 2]),
        (8, [4, 4, 4, 4, 4, 4, 4, 2], [2, 2, 2, 2, 2]),
    ],
)
def test_data_parallel_sizes_are_those_of_the_tutorial(
    replicas: int, full: list[int], last: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    _example("data_parallel").main(replicas)
    inside = "\tIn Model: input size torch.Size([{0}, 5]) output size torch.Size([{0}, 2])"
    outside = "Outside: input size torch.Size([{0}, 5]) output_size torch.Size([{0}, 2])"
    printed = capsys.readouterr().out.splitlines()
    for rows, slices in [(30, full)] * 3 + [(10, last)]:
        at = printed.index(outside.format(rows))
        # Before that, the hook may have printed while the model was recorded for slices of this size.
        assert printed[at - len(slices) : at] == [*map(inside.format, slices)]
        del printed[: at + 1]
    assert not printed


@pytest.mark.matrix(0)
def test_resnet50_by_hand_and_by_auto_as_measured_in_the_design() -> None:
    with captured_once():
        hand, auto = _example("resnet50_two_devices").plans()
    assert [len(stage.devices) for stage in hand.stages] == [1, 1]
    peaks = [13.25, 4.67]
    assert [stage.memory.peak / GIB for stage in hand.stages] == pytest.approx(peaks, rel=0.02)
    assert [d.peak / GIB for d in hand.devices] == pytest.approx(peaks, rel=0.02)
    assert max(d.peak for d in auto.devices) <= 9.6 * GIB
    assert hand.fits and auto.fits
    assert {layer for stage in auto.stages for layer in stage.layers} >= {"conv1", "fc"}
    losses = _example("resnet50_two_devices").train(batch=2, size=32, steps=1)
    assert 0 < losses[0] < 10


@pytest.mark.matrix(0)
def test_the_answer_for_four_cards_fits_and_has_alternatives() -> None:
    plan = _example("auto_four_cards").answer(64, "1GiB", width=8)
    assert plan.fits and plan.strategy and plan.alternatives
    assert 1 < len(plan.devices) <= 4


def test_gpt_on_many_devices_fits_and_has_alternatives() -> None:
    plan = _example("gpt3_ten_thousand").answer(blocks=4, sequences=128, nodes=8)
    assert plan.fits and plan.strategy and plan.alternatives
    assert 24 < plan.grid.size <= 64


def test_unet_skips_cross_by_themselves() -> None:
    example = _example("unet3d_two_devices")
    plan = example.plan()
    crossing = {transfer.value for transfer in plan.transfers}
    assert len(crossing) == 4  # three skips and the bottleneck
    # By hand with .to() in forward it is 1.85 + 2.51: there gradients of skips wait in the encoder.
    assert [d.peak / GIB for d in plan.devices] == pytest.approx([1.56, 2.50], rel=0.02)
    losses = example.train()
    assert losses[-1] < losses[0]


def test_a_unet_split_in_space_trains_as_the_plain_one() -> None:
    example = _example("unet3d_in_space")
    assert placer.load_spec(example.SPEC).space.shards == 2
    found, expected = example.train(), example.train_plain()
    assert found == pytest.approx(expected, rel=1e-10)
    assert found[-1] < found[0]


def test_unet_shapes() -> None:
    assert _example("unet3d").main() is None
    model = _example("unet3d").unet3d(in_channels=2, out_channels=4, width=4, depth=3, norm="group")
    assert model(torch.randn(2, 2, 8, 12, 16)).shape == (2, 4, 8, 12, 16)


def test_digits_losses_fall_on_every_replica(capsys: pytest.CaptureFixture[str]) -> None:
    history = _example("digits_data_parallel").train(epochs=2)
    assert all(last < first for first, last in zip(history[0], history[-1], strict=True))
    assert "Replica 3, epoch 1:" in capsys.readouterr().out


def test_digits_gradients_are_the_hand_averaged_ones() -> None:
    """Each rank its own model and batch, gradients averaged over ranks, as the tutorial does."""
    example = _example("digits_data_parallel")
    torch.manual_seed(0)
    model = example.ConvNet(dropout=0.0).double()
    spec = placer.load_spec(example.SPEC)
    parts = example.partitions(4, torch.float64)
    images, labels = next(example.batches(parts, 16))
    placed = placer.compile(model, spec, (images,), run_on="cpu")
    pairs = zip(placed(images).chunk(4), labels.chunk(4), strict=True)
    torch.stack([F.cross_entropy(o, y) for o, y in pairs]).mean().backward()
    ranks = [copy.deepcopy(model) for _ in parts]
    for rank, (own, wanted) in zip(ranks, parts, strict=True):
        F.cross_entropy(rank(own[:16]), wanted[:16]).backward()
    for (name, found), *expected in zip(
        placed.named_parameters(), *(rank.parameters() for rank in ranks), strict=True
    ):
        averaged: Any = sum(p.grad for p in expected)
        assert_close(found.grad, averaged / 4, name)


def test_mixed_precision_is_autocast_and_reproducible(capsys: pytest.CaptureFixture[str]) -> None:
    example = _example("mixed_precision")
    assert example.main()
    first, _ = example.train(seed=0, steps=2)
    other, _ = example.train(seed=1, steps=2)
    assert first != other
    placed = placer.compile(
        example.ConvNet(), placer.load_spec(example.SPEC), (torch.randn(8, 1, 8, 8),), run_on="cpu"
    )
    placed.fc1.register_forward_hook(lambda *values: print("inside", values[2].dtype))
    capsys.readouterr()
    output = placed(torch.randn(8, 1, 8, 8))
    assert set(capsys.readouterr().out.splitlines()) == {"inside torch.bfloat16"}
    assert output.dtype == torch.bfloat16
    assert placed.fc1.weight.dtype == torch.float32


def test_bf16_equals_autocast_on_the_plain_model() -> None:
    example = _example("mixed_precision")
    torch.manual_seed(0)
    model = example.ConvNet(dropout=0.0)
    spec = {"devices": ["cpu:0", "cpu:1"], "precision": "bf16"}
    x = torch.randn(8, 1, 8, 8)
    placed = placer.compile(model, spec, (x,))
    plain: nn.Module = copy.deepcopy(model)
    found = placed(x)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(x)
    assert torch.equal(found, expected)
    found.float().square().mean().backward()
    expected.float().square().mean().backward()
    for (name, a), b in zip(placed.named_parameters(), plain.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.equal(a.grad, b.grad), name
