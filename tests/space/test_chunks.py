"""``"chunks"`` in a spec: the same results without the concatenations of skips, in less memory."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from oracle import assert_same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from unet3d import unet3d

import placer
from placer.program import lower
from placer.space import count_chunked, spec_rewrites

pytestmark = pytest.mark.usefixtures("one_capture")

D = torch.float64
DEVICES = {"devices": ["cpu:0", "cpu:1"]}


def _unet(norm: str = "group") -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return unet3d(width=4, depth=3, norm=norm).to(D), torch.randn(4, 1, 8, 8, 12, dtype=D)


class Residual(nn.Module):
    """Two convolutions read the concatenation, one of them transposed; another is read by a norm, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding="same")
        self.up = nn.ConvTranspose2d(7, 4, 3, stride=2, padding=1, output_padding=1)
        self.across = nn.ConvTranspose2d(7, 4, 2, stride=2)
        self.norm = nn.BatchNorm2d(8)
        self.last = nn.Conv2d(8, 2, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.first(x), x], dim=1)
        both = torch.cat((self.up(joined), self.across(joined)), 1)
        return self.last(both) + self.last(self.norm(both))


SPECS: dict[str, dict[str, Any]] = {
    "one device": {"devices": ["cpu"]},
    "stages": DEVICES,
    "slices": {**DEVICES, "replicas": 2, "microbatches": 2, "schedule": "1F1B"},
    "recomputed": {**DEVICES, "checkpoint": ["decoder", "encoder.0"], "microbatches": 2},
    "offloaded": {**DEVICES, "offload": ["decoder.1"]},
}


@pytest.mark.matrix(1)
@pytest.mark.parametrize("chunks", [2, 3, 16])
@pytest.mark.parametrize("name", SPECS)
def test_a_unet_in_chunks_computes_what_it_does_in_one(name: str, chunks: int) -> None:
    model, x = _unet()
    placed = assert_same(model, {**SPECS[name], "chunks": chunks}, (x,))
    assert any("2 convolutions of concatenated channels" in note for note in placed.plan.notes)


def test_convolutions_of_all_kinds_that_read_a_concatenation() -> None:
    torch.manual_seed(0)
    model, x = Residual().to(D), torch.randn(4, 3, 6, 6, dtype=D)
    spec = placer.PlacementSpec(devices=["cpu"], chunks=3)
    program = lower(model, (x,), None, spec_rewrites(spec, ["x"], processes=False))
    assert count_chunked(program) == 2, "what a norm reads as well is made"
    assert_same(model, {**DEVICES, "chunks": 3}, (x,))


class WritesLater(nn.Module):
    """Writes to a part of a concatenation before, or after, a convolution reads that."""

    def __init__(self, *, before: bool, given: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(6, 2, 3)
        self.before, self.given = before, given

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x.clone())
        part = x if self.given else made + 1
        joined = torch.cat([part, made], 1)
        if self.before:
            part.mul_(2)
        y = self.second(joined)
        if not self.before:
            part.mul_(2)
        return y.sum() + part.sum()


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_a_part_that_is_written_later_is_copied(before: bool, given: bool) -> None:
    torch.manual_seed(0)
    model = WritesLater(before=before, given=given).to(D)
    x = torch.randn(4, 3, 6, 6, dtype=D)
    placed = placer.compile(copy.deepcopy(model), {"devices": ["cpu"], "chunks": 3}, x)
    found, expected = placed(x.clone()), model(x.clone())
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    for ours, theirs in zip(placed.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_what_is_not_read_by_convolutions_alone_stays() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(3, 3, 3))
    x = torch.randn(2, 3, 4)
    notes = placer.make_plan(model, {"devices": ["cpu"], "chunks": 4}, x).notes
    assert any("no convolution reads a concatenation of channels" in note for note in notes)


def test_under_the_callers_own_checkpoint() -> None:
    model, x = _unet()
    placed = placer.compile(copy.deepcopy(model), {"devices": ["cpu"], "chunks": 3}, x)
    checkpoint(placed, x, use_reentrant=False).square().sum().backward()
    model(x).square().sum().backward()
    for ours, theirs in zip(placed.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@cache
def _wide_unet() -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        return unet3d(width=16, depth=3), torch.empty(1, 1, 32, 32, 32)


def test_less_memory_and_the_plan_says_so() -> None:
    model, x = _wide_unet()
    device = {"name": "cuda:0", "kind": "a100"}
    whole, chunked = (
        placer.make_plan(model, {"devices": [device], "chunks": chunks}, x) for chunks in (1, 8)
    )
    assert chunked.devices[0].peak < 0.95 * whole.devices[0].peak
    report = placer.simulate(model, chunked, x)
    assert report.devices[0].peak == chunked.devices[0].peak


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("share", "chunked"), [(1.2, False), (0.97, True)])
def test_auto_needs_a_reason(share: float, chunked: bool) -> None:
    model, x = _wide_unet()
    spec: dict[str, Any] = {"devices": ["cpu:0"], "reserve": 0, "chunks": "auto"}
    peak = placer.make_plan(model, {**spec, "chunks": 1}, x).devices[0].peak
    spec["devices"] = [{"name": "cpu:0", "memory": str(int(share * peak))}]
    plan = placer.make_plan(model, spec, x)
    assert plan.fits
    assert bool(plan.rewrites) == chunked
