"""Calibration finds the rates of a device whose clock runs by known ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from placer.cost.operations import operations_of
from placer.errors import DeviceError
from placer.machine.kindfile import find_kind, kind_to_json, save_kind
from placer.machine.rates import CLASSES, DTYPES, HEAVY, Key, Rate
from placer.operands import tensors_in
from placer.profiling import calibrate
from placer.profiling.clocks import HostClock

OVERHEAD, BANDWIDTH = 1e-7, 1e12
SLOWER = {"pooling": 4.0, "batch_norm_backward": 4.0}


def _rate(key: Key) -> Rate:
    name, dtype = key
    flops = 1e10 * (1 + CLASSES.index(name)) * (2 if dtype == "half" else 1)
    slow = SLOWER.get(name, 1.0)
    return Rate(
        overhead=OVERHEAD, flops=flops if name in HEAVY else 0.0, bandwidth=BANDWIDTH / slow
    )


class Known(TorchDispatchMode):
    """Time passes by rates that are known."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.delay = 0.0  # of every operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs, outputs = tensors_in(args, kwargs or {}), tensors_in(result)
        for o in operations_of(func, args, kwargs or {}, result, inputs, outputs):
            self.now += _rate((o.name, o.dtype)).seconds(o.flops, o.nbytes) + self.delay
        return result


def test_known_rates_are_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("placer.profiling.calibration._CPU_SCALE", 1 / 8)
    heard: list[int] = []
    with Known() as known:
        kind = calibrate(
            "cpu", name="known", clock=HostClock(lambda: known.now), seconds=1e-9,
            progress=lambda what, number, count: heard.append(count - number),
        )  # fmt: skip
    assert heard == sorted(heard, reverse=True)
    assert heard[-1] == 1
    for name in set(CLASSES) - {"recurrent", "optimizer", "unaligned_product"}:
        for dtype in ("float32", "half"):
            rate, truth = kind.rates[name, dtype], _rate((name, dtype))
            if name not in HEAVY:
                assert rate.bandwidth == pytest.approx(truth.bandwidth, rel=0.05), (name, dtype)
            elif not (name.startswith("attention") or "depthwise" in name):  # several operations
                assert rate.flops == pytest.approx(truth.flops, rel=0.35), (name, dtype)
    assert kind.rates["product", "float64"].flops == pytest.approx(
        _rate(("product", "float64")).flops, rel=0.35
    )
    path = tmp_path / "known.json"
    save_kind(kind_to_json(kind, device="x", device_type="cpu", torch="2", measured=""), path)
    read = find_kind(str(path))
    assert read.name == "known"
    for key in ((name, dtype) for name in CLASSES for dtype in DTYPES):
        assert read.rates[key].flops == pytest.approx(kind.rates[key].flops, rel=1e-5)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("busy", ["in every second round", "in all rounds"])
def test_a_machine_that_is_busy_for_a_while_is_measured_and_told(
    busy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations wait for a core that somebody else has; more rounds follow if none was faster."""
    monkeypatch.setattr("placer.profiling.calibration._CPU_SCALE", 1 / 64)
    said: list[str] = []
    with Known() as known:

        def progress(what: str, number: int, count: int) -> None:
            last = number == count - 1
            now = number * 6 // count % 2 == 0 if busy == "in every second round" else not last
            known.delay = 8e-3 if now else 0.0

        kind = calibrate(
            "cpu", clock=HostClock(lambda: known.now), seconds=1e-9, progress=progress, warn=said.append
        )  # fmt: skip
    assert len(said) == 1
    assert said[0].startswith("the machine is busy: half of the runs took")
    for name in ("convolution", "batch_norm", "pointwise", "reduction"):
        rate = kind.rates[name, "float32"]
        assert rate.overhead < 1e-5


def test_heavy_classes_do_not_read_as_fast_as_a_sum_in_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("placer.profiling.calibration._CPU_SCALE", 1 / 64)
    monkeypatch.setitem(SLOWER, "reduction", 0.1)
    state = torch.get_rng_state()
    with Known() as known:
        kind = calibrate("cpu", clock=HostClock(lambda: known.now), seconds=1e-9)
    assert torch.equal(torch.get_rng_state(), state)  # no random number of the caller's is drawn
    assert kind.rates["reduction", "float32"].bandwidth == pytest.approx(10 * BANDWIDTH, rel=0.05)
    for name in ("convolution", "product", "attention"):
        assert kind.rates[name, "half"].bandwidth == pytest.approx(BANDWIDTH, rel=0.05)
    assert kind.host_bandwidth == pytest.approx(BANDWIDTH / 2, rel=0.05)


def test_large_weights_are_read_at_a_rate_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("placer.profiling.calibration._CPU_SCALE", 1 / 8)
    names = ("convolution", "convolution_input", "convolution_weight", "product")
    for name in names:
        monkeypatch.setitem(SLOWER, name, 1000.0)
    with Known() as known:
        kind = calibrate("cpu", clock=HostClock(lambda: known.now), seconds=1e-9)
    for name in names:
        rate, truth = kind.rates[name, "float32"], _rate((name, "float32"))
        assert rate.bandwidth == pytest.approx(truth.bandwidth, rel=0.15)
        assert rate.flops == pytest.approx(truth.flops, rel=0.35)


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(DeviceError, match="cuda:77: is not on this machine"):
        calibrate("cuda:77")
