"""Placements with several stages per device: found if they lower the largest peak, as simulated."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_same
from placements import assert_valid_plan, estimated_plan
from torch import nn
from unet3d import unet3d

import placer
from placer.partition import choose
from placer.program import lower

pytestmark = pytest.mark.usefixtures("one_capture")

DEVICES = ["cpu:0", "cpu:1", "cpu:2"]


def _unet(norm: str = "group") -> nn.Module:
    return unet3d(width=4, depth=3, norm=norm)


def test_a_unet_is_folded_and_peaks_lower_as_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model, x = _unet(), torch.empty(1, 1, 32, 32, 32)
    spec = {"devices": DEVICES, "objective": "memory"}
    plan = assert_valid_plan(model, spec, (x,))
    devices = [stage.devices[0] for stage in plan.stages]
    assert len(devices) > len(set(devices)) == 3
    found = placer.simulate(model, plan, (x,)).devices
    for device in found:
        assert 0.999 * device.peak <= device.predicted <= 1.02 * device.peak
    assert plan.optimality.value == max(device.predicted for device in found)
    monkeypatch.setattr(choose, "find_noncontiguous", lambda *_: None)
    chain = placer.make_plan(model, spec, (x,))
    assert len(chain.stages) == 3
    least = max(device.peak for device in placer.simulate(model, chain, (x,)).devices)
    assert max(device.peak for device in found) < 0.99 * least


class _Towers(nn.Module):
    """Two towers that run level by level, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (
            nn.ModuleList(nn.Conv2d(1 if i == 0 else 8, 8, 3, padding=1) for i in range(6))
            for _ in range(2)
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for a, b in zip(self.a, self.b, strict=True):
            x, y = a(x).relu(), b(y).relu()
        both: torch.Tensor = self.head(torch.cat([x.mean((2, 3)), y.mean((2, 3))], 1))
        return both


def test_pinned_towers_that_do_not_fit_are_few_stages() -> None:
    """The stages of a device count together: short ones are not smaller."""
    with torch.device("meta"):
        model, x = _Towers(), torch.empty(2, 1, 64, 64)
    layers = {"a": "cpu:0", "b": "cpu:1", "head": "cpu:0"}

    def plan(memory: str) -> placer.Plan:
        devices = [{"name": f"cpu:{i}", "memory": memory} for i in range(2)]
        return placer.make_plan(model, {"devices": devices, "layers": layers}, (x, x))

    assert not plan("2MiB").fits and len(plan("2MiB").stages) == 3
    sent = [(transfer.source, transfer.target) for transfer in plan("1GiB").sent]
    assert sent == [(1, 2)]  # what stage 2 reads of stage 0 is on its device already


def test_towers_run_at_the_same_time_unless_one_has_what_joins_them() -> None:
    with torch.device("meta"):
        model, x = _Towers(), torch.empty(64, 1, 256, 256)
    seconds = {}
    for head in ("cuda:0", "cuda:1"):
        devices = [{"name": f"cuda:{i}", "kind": "a100"} for i in range(2)]
        layers = {"a": "cuda:0", "b": "cuda:1", "head": head}
        seconds[head] = placer.make_plan(
            model, {"devices": devices, "layers": layers}, (x, x)
        ).step_seconds
    assert seconds["cuda:0"] is not None and seconds["cuda:1"] is not None
    assert 1.8 < seconds["cuda:1"] / seconds["cuda:0"] < 2.1


def test_what_needs_one_stage_per_device_gets_it() -> None:
    with torch.device("meta"):
        model, x = _unet(), torch.empty(2, 1, 16, 16, 16)
    spec = {"devices": DEVICES, "objective": "memory"}
    assert len(placer.make_plan(model, spec, (x,), processes=True).stages) == 3
    assert len(placer.make_plan(model, spec | {"microbatches": 2}, (x,)).stages) == 3


def test_pins_stay_and_a_folded_plan_computes_what_the_model_does() -> None:
    torch.manual_seed(0)
    model, x = _unet().double(), torch.randn(1, 1, 16, 16, 16, dtype=torch.float64)
    layers = {"encoder.0.0": "cpu:1"}
    spec = placer.PlacementSpec.model_validate(
        {
            "devices": DEVICES,
            "objective": "memory",
            "layers": layers,
            "loss": "mean_square",  # which takes the most on the last stage
        }
    )
    plan = assert_valid_plan(model, spec, (x,))
    assert len(plan.stages) > 3
    assert_same(model, spec, (x,), {})


class Inception(nn.Module):
    """Blocks of four branches that read one value and are concatenated."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self._block(32 if i else 8) for i in range(blocks))
        self.head = nn.Linear(32, 10)

    def _block(self, channels: int) -> nn.ModuleList:
        def conv(inner: int, size: int) -> nn.Module:
            made = nn.Conv2d(inner, 8, size, padding=size // 2, bias=False)
            return nn.Sequential(made, nn.ReLU())

        return nn.ModuleList(
            [
                conv(channels, 1),
                nn.Sequential(conv(channels, 1), conv(8, 3)),
                nn.Sequential(conv(channels, 1), conv(8, 3), conv(8, 3)),
                nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(channels, 1)),
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.cat([branch(x) for branch in block], 1)
        return self.head(x.mean((2, 3)))


def test_a_stage_runs_its_branches_in_program_order() -> None:
    """Its peak was recorded in that order; a value's first reader decides which gradients are pending."""
    with torch.device("meta"):
        model, x = Inception(4), torch.empty(4, 8, 16, 16)
    place = {node: i for i, node in enumerate(lower(model, (x,)).order)}
    for count in (2, 3):
        devices = [f"cpu:{i}" for i in range(count)]
        plan = assert_valid_plan(model, {"devices": devices, "objective": "memory"}, (x,))
        for stage in plan.stages:
            assert list(stage.nodes) == sorted(stage.nodes, key=place.__getitem__)


def test_as_many_devices_as_a_search_has_boundaries() -> None:
    """A model that fits on none of up to 64 devices, where there is no room to fold stages."""
    layers = [layer for _ in range(40) for layer in (nn.Linear(8, 8), nn.Tanh())]
    with torch.device("meta"):
        model, x = nn.Sequential(*layers), torch.empty(64, 8)
    devices = [{"name": f"cpu:{i}", "memory": 3000} for i in range(50)]
    plan = estimated_plan(model, {"devices": devices, "objective": "memory"}, (x,))
    assert not plan.fits and len(plan.stages) == 50
