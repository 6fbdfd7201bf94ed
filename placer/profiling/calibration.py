"""Measure the rates of a device kind: time a small and a large operation of every class.

The time of the small one is the overhead of its class; the additional time of the large one is due to
its FLOPs or bytes. Classes that are not measured get the rate of a similar one (`placer.rates`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from placer._torch import DispatchMode
from placer.catalogue import DeviceKind
from placer.cost.operations import Operation, operations_of
from placer.errors import DeviceError
from placer.executor.device_map import device_count
from placer.operands import tensors_in
from placer.partition.stage_cost.optimizer import optimizer_passes
from placer.profiling.clocks import Clock, clock_for, time_call
from placer.profiling.samples import Call, Samples
from placer.rates import HEAVY, Key, Peaks, Rate, Rates, complete_rates, with_launch

_SECONDS = 0.15  # per sample; there are two for each of some 40 classes
_MOST_RUNS = 50
_CPU_SCALE, _GPU_SCALE = 1, 64  # larger samples for a GPU
_GPU_TILE = 128  # columns, as on an H100
# Launching an operation in a training step, with modules and autograd, takes this many times as long
# as in a bare loop (measured on an H100).
_AROUND_LAUNCH = 2.9
_LAUNCHES = 200
_COPIED = 2**28  # bytes
_IMAGE_OPERATIONS = ("batch_norm", "group_norm", "layer_norm", "pooling", "upsampling")
_DTYPES = {"float32": torch.float32, "half": torch.bfloat16, "float64": torch.float64}


class Sample(NamedTuple):
    """One class of operations in one data type, and the calls to time."""

    key: Key
    make: Callable[[bool], Call]  # whether it is the large one -> the call


def calibrate(
    device: str = "cpu",
    *,
    name: str | None = None,
    clock: Clock | None = None,
    seconds: float = _SECONDS,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> DeviceKind:
    """Measure a device of this machine, for ``seconds`` per sample, and return its device kind.

    ``progress`` is called with the class that is measured next, its number, and the number of classes.
    Raises ``DeviceError`` if there is no such device.
    """
    place = torch.device(device)
    _check_there(place, device)
    timer = _Timer(clock or clock_for(place), seconds)
    samples = [*_samples(place)]
    measured: dict[Key, Rate] = {}
    bandwidth = 0.0
    for number, sample in enumerate(samples):
        progress(" ".join(sample.key), number, len(samples))
        rate = _rate(timer, sample, bandwidth)
        if rate is not None:
            measured[sample.key] = rate
            bandwidth = max(bandwidth, rate.bandwidth)
    if place.type == "cuda":
        measured |= _with_rows(timer, place, measured)
    measured["optimizer", "float32"] = _optimizer(timer, place)
    rates = complete_rates(measured, _peaks(measured))
    if place.type == "cuda":
        rates = with_launch(rates, *_launches(place))
    return _make_kind(name or device, place, rates, bandwidth)


def _check_there(place: torch.device, device: str) -> None:
    count = device_count(place.type)
    if place.type != "cpu" and (place.index or 0) >= count:
        found = (
            f"there are {count} of type {place.type!r}" if count else "there is none of that type"
        )
        raise DeviceError(device, f"is not on this machine: {found}", "try 'cpu'")


def _samples(place: torch.device) -> list[Sample]:
    """The samples to time; those that only read and write memory come first."""
    scale = _GPU_SCALE if place.type == "cuda" else _CPU_SCALE
    found = []
    for dtype in ("float32", "half"):
        make = Samples(place, _DTYPES[dtype], scale)

        def add(name: str, run: Callable[..., Call], *args: Any, **options: Any) -> None:
            key = (name, dtype)  # noqa: B023
            found.append(Sample(key, lambda large: run(*args, large=large, **options)))

        for name in ("pointwise", "copy", "reduction"):
            add(name, make.image_operation, name)
        for name in _IMAGE_OPERATIONS:
            add(name, make.image_operation, name)
            add(f"{name}_backward", make.image_operation, name, backward=True)
        add("gather", make.gather)
        add("product", make.product)
        if dtype == "half":
            add("unaligned_product", make.product, uneven=True)
        add("attention", make.attention, backward=False)
        add("attention_backward", make.attention, backward=True)
        for part, ending in (("forward", ""), ("input", "_input"), ("weight", "_weight")):
            add(f"convolution{ending}", make.convolution, part)
            add(f"transposed_convolution{ending}", make.transposed, part)
        add("depthwise_convolution", make.depthwise)
    doubles = Samples(place, torch.float64, scale)
    found.append(Sample(("product", "float64"), lambda large: doubles.product(large=large)))
    return found


class _Timer:
    """Measures the median seconds of a call."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def __call__(self, call: Call) -> float:
        """Run ``call`` once to warm up, then repeatedly for the time budget; the median in seconds."""
        total = 0.0
        took: list[float] = []
        call()
        while total < self._seconds and len(took) < _MOST_RUNS:
            took.append(time_call(self._clock, call))
            total += max(took[-1], 1e-7)
        return statistics.median(took)


class _Recorder(DispatchMode):
    """Records the operations that a call runs."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[Operation] = []

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator and record its operations."""
        result = func(*args, **kwargs)
        inputs, outputs = tensors_in(args, kwargs), tensors_in(result)
        self.ran += operations_of(func, args, kwargs, result, inputs, outputs)
        return result


def _rate(timer: _Timer, sample: Sample, bandwidth: float) -> Rate | None:
    """Measure the rate of the sample's class; None if the device has no such operation."""
    name, _ = sample.key
    try:
        with torch.no_grad() if not name.endswith("_backward") else torch.enable_grad():
            small, large = sample.make(False), sample.make(True)
            overhead, took = timer(small), timer(large)
            with _Recorder() as recorder:
                large()
    except (RuntimeError, NotImplementedError):
        return None
    mine = [o for o in recorder.ran if o.name == name]
    if not mine:
        return None
    flops, nbytes = sum(o.flops for o in mine), sum(o.nbytes for o in mine)
    beyond = max(took - overhead, took / 10)
    if name not in HEAVY or not flops:
        return Rate(overhead=overhead, bandwidth=nbytes / beyond)
    beyond = max(beyond - nbytes / bandwidth, beyond / 2) if bandwidth else beyond
    tiled = _is_tiled(sample.key, mine)
    return Rate(
        overhead=overhead, flops=flops / beyond, bandwidth=bandwidth, tile=_GPU_TILE if tiled else 1
    )


def _is_tiled(key: Key, ran: list[Operation]) -> bool:
    """Does the class have tiles of columns? On GPUs, convolutions do; their samples fill a tile."""
    return "convolution" in key[0] and any(o.width == _GPU_TILE for o in ran)


def _with_rows(timer: _Timer, place: torch.device, measured: dict[Key, Rate]) -> dict[Key, Rate]:
    """The rates of normalisations on a GPU, with the bandwidth of a single row."""
    found = {}
    for dtype in ("float32", "half"):
        make = Samples(place, _DTYPES[dtype], _GPU_SCALE)
        for backward, ending in ((False, ""), (True, "_backward")):
            call = make.few_rows(backward=backward)
            passes = 3 if backward else 2
            nbytes = passes * 8 * 2**19 * (2 if dtype == "half" else 4)
            row = nbytes / timer(call) / 8
            for name in ("batch_norm", "group_norm"):
                key = (name + ending, dtype)
                if key in measured:
                    found[key] = replace(measured[key], row_bandwidth=row)
    return found


def _optimizer(timer: _Timer, place: torch.device) -> Rate:
    make = Samples(place, torch.float32, _GPU_SCALE if place.type == "cuda" else _CPU_SCALE)
    (small, _), (large, nbytes) = make.optimizer(large=False), make.optimizer(large=True)
    overhead = timer(small)
    beyond = max(timer(large) - overhead, 1e-9)
    return Rate(overhead=overhead, bandwidth=optimizer_passes("adam") * nbytes / beyond)


def _peaks(measured: dict[Key, Rate]) -> Peaks:
    """The measured rates, which replace the peak rates of a data sheet."""
    product = measured["product", "float32"].flops
    half = measured.get(("product", "half"), Rate(flops=product)).flops
    double = measured.get(("product", "float64"), Rate(flops=product / 2)).flops
    tensor = measured.get(("convolution", "float32"), Rate(flops=product)).flops
    bandwidth = measured["pointwise", "float32"].bandwidth
    return Peaks(fp32=product, tensor=tensor, half=half, fp64=double, bandwidth=bandwidth)


def _launches(place: torch.device) -> tuple[float, float]:
    """Seconds that the host needs in a step to launch a light and a heavy operation."""
    found = []
    light, heavy = torch.zeros(16, device=place), torch.zeros(16, 16, device=place)
    for call in (lambda: light + light, lambda: heavy @ heavy):
        call()
        torch.cuda.synchronize(place)
        start = time.perf_counter()
        for _ in range(_LAUNCHES):
            call()
        found.append((time.perf_counter() - start) / _LAUNCHES * _AROUND_LAUNCH)
        torch.cuda.synchronize(place)
    return found[0], found[1]


def _make_kind(name: str, place: torch.device, rates: Rates, bandwidth: float) -> DeviceKind:
    if place.type != "cuda":
        return DeviceKind(
            name=name,
            device_type=place.type,
            memory=None,
            rates=rates,
            link_bandwidth=bandwidth / 2,  # a copy reads and writes
            host_bandwidth=bandwidth / 2,
            context=0,
        )
    host = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
    timer = _Timer(clock_for(place), _SECONDS)
    there = torch.empty(_COPIED, dtype=torch.uint8, device=place)
    to_host = _COPIED / timer(lambda: there.copy_(host, non_blocking=True))
    others = [i for i in range(torch.cuda.device_count()) if i != (place.index or 0)]
    link = to_host
    if others:
        other = torch.empty(_COPIED, dtype=torch.uint8, device=f"cuda:{others[0]}")
        link = _COPIED / timer(lambda: other.copy_(there, non_blocking=True))
    memory, context = gpu_memory(place)
    return DeviceKind(
        name=name,
        device_type=place.type,
        memory=memory,
        rates=rates,
        link_bandwidth=link,
        host_bandwidth=to_host,
        context=context,
    )


def gpu_memory(place: torch.device) -> tuple[int, int]:
    """The bytes of a GPU, and of the CUDA context: neither free nor reserved by torch's allocator.

    Memory of other processes counts as context too, so the device should be idle.
    """
    free, total = torch.cuda.mem_get_info(place)
    context = max(0, total - free - torch.cuda.memory_reserved(place))
    return torch.cuda.get_device_properties(place).total_memory, context
