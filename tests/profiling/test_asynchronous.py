"""Seconds on a device that works while the host goes on: its kernels, apart from the host's launches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import KERNEL, LAUNCH, FakeGpu
from torch import Tensor, nn

import placer
from placer.cost import estimate_costs
from placer.machine.catalogue import CATALOGUE
from placer.machine.kindfile import find_kind, kind_to_json, save_kind
from placer.machine.rates import Rate
from placer.profiling import NodeTimes, calibration, measure_nodes
from placer.profiling.clocks import CudaClock, time_call
from placer.profiling.profile import _with_profile
from placer.program import flatten_call, lower

SMALL = {"relu": KERNEL, "addmm": KERNEL, "mm": KERNEL, "threshold_backward": KERNEL}
LARGE = dict.fromkeys(SMALL, 50 * LAUNCH)


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with FakeGpu(dict(SMALL), LAUNCH) as mode:
        yield mode


@pytest.fixture
def clock(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> CudaClock:
    return gpu.clock(monkeypatch)


def test_a_kernel_takes_as_long_as_the_kernel(clock: CudaClock) -> None:
    """On an idle device, a kernel of 2 µs would seem to take the 20 µs of its launch."""
    x = torch.randn(4)
    took = calibration._Timer(clock, 1e-3)(x.relu)
    assert took
    assert took == pytest.approx([KERNEL] * len(took), rel=0.05)
    assert time_call(clock, x.relu).device > LAUNCH  # what it was


def test_launches_are_measured_on_the_host(gpu: FakeGpu, clock: CudaClock) -> None:
    gpu.kernels = {"add": KERNEL, "mm": KERNEL, "convolution": KERNEL}
    found = calibration._launches(torch.device("cpu"))
    around = calibration._AROUND_LAUNCH
    assert found == pytest.approx(
        dict.fromkeys(("light", "product", "convolution"), LAUNCH * around)
    )


def test_a_row_has_no_launch_in_it() -> None:
    """The bandwidth of a block, from a small and a large normalisation of 8 rows."""
    few = calibration._Timings()
    nbytes = 2 * 2**19 * 4
    few.small, few.large = [5e-6], [5e-6 + nbytes / 16e9]
    key = ("batch_norm", "float32")
    found = calibration._with_rows({("few_rows", "float32"): few}, {key: Rate(bandwidth=1e12)})
    assert found[key].row_bandwidth == pytest.approx(16e9)
    assert found[key].bandwidth == 1e12


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


X = torch.randn(16, 8)


def _measured(gpu: FakeGpu, clock: CudaClock, *, training: bool = True) -> NodeTimes:
    model = Net()
    program = lower(model, (X,))

    def placed_step() -> None:
        model(X).sum().backward()

    return measure_nodes(
        program, model, flatten_call(program.call, (X,), {}),
        device=torch.device("cpu"), clock=clock, rounds=3, warm=1, training=training,
        placed_step=placed_step if training else None,
    )  # fmt: skip


def test_nodes_have_the_times_of_device_and_host(gpu: FakeGpu, clock: CudaClock) -> None:
    times = _measured(gpu, clock)
    assert times.forward == pytest.approx(
        {"first": KERNEL, "relu": KERNEL, "second": KERNEL, "loss": 0}, abs=KERNEL / 10
    )
    assert times.backward == pytest.approx(
        {"first": KERNEL, "relu": KERNEL, "second": 2 * KERNEL, "loss": 0}, abs=KERNEL / 10
    )
    launches = (*times.forward_launch.values(), *times.backward_launch.values())
    assert sum(launches) == pytest.approx(7 * LAUNCH, rel=0.05)
    assert times.step == pytest.approx(7 * LAUNCH, rel=0.05)  # the host is the limit


def test_a_limit_of_the_device_is_one_of_the_device(gpu: FakeGpu, clock: CudaClock) -> None:
    gpu.kernels = LARGE
    times = _measured(gpu, clock)
    nodes = sum(times.forward.values()) + sum(times.backward.values())
    assert nodes == pytest.approx(times.step)
    assert times.step == pytest.approx(7 * LARGE["mm"], rel=0.05)
    launches = sum(times.forward_launch.values()) + sum(times.backward_launch.values())
    assert launches == pytest.approx(7 * LAUNCH, rel=0.1)


def test_a_queue_that_is_full_is_not_taken_for_a_slow_host(gpu: FakeGpu, clock: CudaClock) -> None:
    """Of 2,000 kernels, the host can launch a thousand before it has to wait for the device."""
    gpu.kernels = {**LARGE, "relu": 10 * LAUNCH}

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            for _ in range(40):
                x = x.relu()
            return x

    model = Deep()
    program = lower(model, (X,))

    def placed_step() -> None:
        for _ in range(60):
            model(X)

    with torch.no_grad():
        times = measure_nodes(
            program, model, flatten_call(program.call, (X,), {}), device=torch.device("cpu"),
            clock=clock, rounds=1, warm=1, training=False, placed_step=placed_step,
        )  # fmt: skip
    assert sum(times.forward_launch.values()) == pytest.approx(41 * (LAUNCH + 1e-6), rel=0.05)


def _plan(times: NodeTimes, path: Path, *devices: str, **fields: Any) -> placer.Plan:
    program = lower(Net(), (X,))
    costs = estimate_costs(program, flatten_call(program.call, (X,), {}), kernels="cuda")
    kind = _with_profile(CATALOGUE["a100"], program, costs, times, "fp32")
    save_kind(kind_to_json(kind, device="x", device_type="cuda", torch="2", measured=""), path)
    assert find_kind(str(path)).profile.forward_launch == pytest.approx(
        times.forward_launch, rel=1e-4
    )
    spec = {"devices": [{"name": d, "kind": str(path)} for d in devices], "optimizer": "sgd"}
    return placer.make_plan(Net(), {**spec, **fields}, (X,))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("kernels", [SMALL, LARGE], ids=["small", "large"])
def test_a_plan_takes_the_longer_of_the_two(
    kernels: dict[str, float], gpu: FakeGpu, clock: CudaClock, tmp_path: Path
) -> None:
    gpu.kernels = kernels
    times = _measured(gpu, clock)
    plan = _plan(times, tmp_path / "net.json", "cuda:0")
    assert 0 <= plan.step_seconds - times.step < 25e-6  # the optimizer of an A100


def test_one_process_launches_for_both_devices(
    gpu: FakeGpu, clock: CudaClock, tmp_path: Path
) -> None:
    """If launches were seconds of the device, two stages would seem to share them."""
    times = _measured(gpu, clock)
    pinned = {"first": "cuda:0", "second": "cuda:1"}
    plan = _plan(times, tmp_path / "net.json", "cuda:0", "cuda:1", layers=pinned, microbatches=4)
    assert plan.step_seconds > 4 * 0.95 * 7 * LAUNCH
    assert sum(stage.forward_seconds for stage in plan.stages) < 3 * LAUNCH / 5
