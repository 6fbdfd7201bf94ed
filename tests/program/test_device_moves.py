"""Models that were split by hand: their forward moves tensors from device to device."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

import placer
from placer.cli.main import app
from placer.errors import CaptureError
from placer.program import IgnoreDeviceMoves, lower
from tests.oracle import assert_same

SPEC = {"devices": ["cpu:0", "cpu:1"], "microbatches": 2}


class Block(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, outside, 3, padding=1)
        self.norm = nn.GroupNorm(1, outside)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class SplitUNet(nn.Module):
    """Moved when it is made; skips go to the other device and back, by device, by number, by ``cuda``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.device("cuda", 0), torch.device("cuda:1")
        self.down1 = Block(1, 2).to(self.first)
        self.down2 = Block(2, 4).to(self.first)
        self.bottom = Block(4, 4).to(self.second)
        self.up2 = Block(8, 2).to(self.second)
        self.up1 = Block(4, 2).to(self.first)
        self.out = nn.Conv2d(2, 1, 1).to(self.first)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x.to(self.first, non_blocking=True))
        b = self.down2(F.max_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2).to(1))  # the second device
        c = F.interpolate(c, scale_factor=2)
        d = self.up2(torch.cat([c, b.cuda(1)], 1))
        d = F.interpolate(d, scale_factor=2).to(device=0)
        e = self.up1(torch.cat([a, d], 1))
        mask = torch.zeros(e.shape[2:], device=self.first).to(dtype=e.dtype)
        return self.out(e + mask)


def make() -> nn.Module:
    with IgnoreDeviceMoves():
        return SplitUNet().double()


def test_a_model_split_by_hand_names_its_line() -> None:
    lines, start = inspect.getsourcelines(SplitUNet)
    line = start + next(i for i, text in enumerate(lines) if "# the second device" in text)
    with pytest.raises(CaptureError) as raised:
        lower(make(), (torch.zeros(4, 1, 8, 8, dtype=torch.float64),))
    assert "cuda:0" in raised.value.problem
    assert f"cuda:1 ({__file__}:{line})" in raised.value.problem
    assert "ignore_device_moves=True" in raised.value.remedy


def test_a_model_split_by_hand_is_placed() -> None:
    model, x = make(), torch.randn(4, 1, 8, 8, dtype=torch.float64)
    plan = placer.make_plan(model, SPEC, (x,), ignore_device_moves=True)
    assert len(plan.stages) == 2
    assert placer.simulate(model, plan, (x,), ignore_device_moves=True).step_ok
    assert placer.verify(model, plan, (x,), run_on="cpu", ignore_device_moves=True).ok
    placed = placer.compile(model, plan, (x,), run_on="cpu", ignore_device_moves=True)
    with IgnoreDeviceMoves():
        torch.testing.assert_close(placed(x), model(x))
    placed.eval()  # another program: captured again, and under the same option
    with IgnoreDeviceMoves():
        torch.testing.assert_close(placed(x[:3]), model.eval()(x[:3]))


class OneDevice(nn.Module):
    """Names a single device: the one of its time, which is that of the stage."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(self.name))
        return self.last(x + torch.ones(4, device=self.name, dtype=x.dtype))


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_single_device_is_that_of_the_stage(name: str) -> None:
    model = OneDevice(name).double()
    x = torch.randn(4, 4, dtype=torch.float64)
    placed = placer.compile(model, SPEC, (x,))
    with IgnoreDeviceMoves():
        torch.testing.assert_close(placed(x), model(x))


def test_a_single_device_other_than_the_first_names_its_line() -> None:
    x = torch.randn(4, 4, dtype=torch.float64)
    with pytest.raises(
        CaptureError, match=r"moves tensors to cuda:1 \(.*test_device_moves.py:"
    ) as error:
        placer.compile(OneDevice("cuda:1").double(), SPEC, (x,))
    assert "ignore_device_moves=True" in error.value.remedy
    placer.compile(OneDevice("cuda:1").double(), SPEC, (x,), ignore_device_moves=True)


def test_a_device_of_the_cpu_is_no_split() -> None:
    class OnTheCPU(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x.to("cpu")) + torch.ones(4, device="cpu", dtype=x.dtype))

    assert_same(OnTheCPU().double(), SPEC, (torch.randn(4, 4, dtype=torch.float64),))


def test_the_command_line(tmp_path: Path) -> None:
    path, spec = tmp_path / "by_hand.py", tmp_path / "spec.json"
    source = "import torch\nfrom torch import Tensor, nn\nfrom torch.nn import functional as F\n"
    source += "\n".join(textwrap.dedent(inspect.getsource(cls)) for cls in (Block, SplitUNet))
    path.write_text(source)
    spec.write_text('{"devices": ["cpu:0", "cpu:1"]}')
    arguments = [f"{path}:SplitUNet", str(spec), "-i", "4x1x8x8"]
    for command in ("check", "plan", "verify"):
        result = CliRunner().invoke(app, [command, *arguments, "--ignore-device-moves"])
        assert result.exit_code == 0, result.output
