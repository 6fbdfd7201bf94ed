"""Measure the rates of a device kind: time a small and a large operation of every class.

The time of the small one is the overhead of its class; the additional time of the large one is due to
its FLOPs or bytes. Classes that are not measured get the rate of a similar one (`placer.machine.rates`).

Others may use the machine, for a second or for less: a kernel of two threads that takes 5 µs waits 8 ms for
its second core. So all samples are timed in several rounds, and of all runs of a sample the fastest counts.
On a GPU, the host launches what is timed while the device is busy with something else
(`placer.profiling.clocks`); the time to launch is measured apart.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from placer._torch import DispatchMode
from placer.cost.operations import Operation, operations_of
from placer.errors import DeviceError
from placer.executor.places.device_map import device_count
from placer.machine.catalogue import DeviceKind
from placer.machine.rates import HEAVY, Key, Peaks, Rate, Rates, complete_rates, with_launch
from placer.operands import tensors_in
from placer.partition.stage_cost.optimizer import optimizer_passes
from placer.profiling.clocks import Clock, clock_for, time_call
from placer.profiling.samples import ROW, Call, Samples, optimizer_nbytes
from placer.program.objects.python_random import keep_random

_SECONDS = 0.15  # per sample, in all rounds; there are two for each of some 40 classes
_ROUNDS = 6
_MORE_ROUNDS = 10  # of samples that are still in doubt
_LONGEST = 45.0  # seconds, after which no other sample is timed but in the first round
_DOUBTFUL = 0.25  # of the large call's seconds is too much for the small one
_MOST_RUNS = 50  # per round
_MOST_CALLS = 50  # per run, for operations that take no longer than a mark
_MARGIN = 2.0  # how far ahead of the device the host is, relative to the seconds of a launch
_LEAST_AHEAD = 200e-6
_BUSY = 1.25  # the median of runs relative to the fastest: too much for an idle machine
_CPU_SCALE, _GPU_SCALE = 1, 64  # larger samples for a GPU
_LARGER = 4  # times as large are those that have to leave the caches of a CPU
_GPU_TILE = 128  # columns, as on an H100
# oneDNN's convolutions work on blocks of channels, as wide as a CPU's vectors: layouts nChw16c, nChw8c
_CPU_TILES = {"AVX512": 16, "AVX2": 8}
# Launching an operation in a training step, with modules and autograd, takes this many times as long
# as in a bare loop (measured on an H100).
_AROUND_LAUNCH = 2.9
_LAUNCHES = 200
_COPIED = 2**28  # bytes
# Samples that are not classes of operations
_FEW_ROWS = "few_rows"
_LARGE_WEIGHTS = "large_weights_"  # and the class
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
    warn: Callable[[str], None] = warnings.warn,
) -> DeviceKind:
    """Measure a device of this machine, for ``seconds`` per sample, and return its device kind.

    ``progress`` is called with the class that is measured next, the number of measurements so far, and
    that of all. ``warn`` is called with a sentence if the machine was busy with something else, so that
    the times are not to be relied on. Raises ``DeviceError`` if there is no such device.
    """
    place = torch.device(device)
    require_device(place)
    timer = _Timer(clock or clock_for(place), seconds / _ROUNDS)
    with keep_random(place):
        timings = _time_all(timer, _samples(place), progress)
    streamed, tile = _bandwidth(timings), _tile(place)
    measured = {
        key: _rate(key, each, streamed, tile)
        for key, each in timings.items()
        if each.operations(key[0])
    }
    measured |= _with_large_weights(timings, measured, tile)
    measured["optimizer", "float32"] = _optimizer(timings["optimizer", "float32"], place)
    if place.type == "cuda":
        measured |= _with_rows(timings, measured)
    rates = complete_rates(measured, _peaks(measured))
    if place.type == "cuda":
        rates = with_launch(rates, **_launches(place))
    scatter = statistics.median(each.scatter for each in timings.values())
    if scatter > _BUSY:
        warn(
            f"the machine is busy: half of the runs took {scatter:.1f} times as long as the fastest, which "
            "count; calibrate again when it is idle"
        )
    return _make_kind(name or device, place, rates, streamed)


def require_device(place: torch.device) -> None:
    """Raise ``DeviceError`` if this machine has no such device."""
    count = device_count(place.type)
    if place.type != "cpu" and (place.index or 0) >= count:
        found = (
            f"there are {count} of type {place.type!r}" if count else "there is none of that type"
        )
        raise DeviceError(str(place), f"is not on this machine: {found}", "try 'cpu'")


def _scale(place: torch.device) -> float:
    return _GPU_SCALE if place.type == "cuda" else _CPU_SCALE


def _tile(place: torch.device) -> int:
    """The columns of a tile of convolutions."""
    if place.type == "cuda":
        return _GPU_TILE
    return _CPU_TILES.get(torch.backends.cpu.get_cpu_capability(), 1)


def _samples(place: torch.device) -> list[Sample]:
    """The samples to time."""
    scale = _scale(place)
    is_gpu = place.type == "cuda"
    found = []
    for dtype in ("float32", "half"):
        make = Samples(place, _DTYPES[dtype], scale)

        def add(name: str, run: Callable[..., Call], *args: Any, **options: Any) -> None:
            key = (name, dtype)  # noqa: B023
            found.append(Sample(key, lambda large: run(*args, large=large, **options)))

        streaming = make if is_gpu else replace(make, scale=_LARGER * scale)
        for name in ("pointwise", "copy", "reduction"):
            add(name, streaming.image_operation, name)
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
        if is_gpu:
            for backward, ending in ((False, ""), (True, "_backward")):
                add(_FEW_ROWS + ending, make.few_rows, backward=backward)
        else:
            for name in ("convolution", "convolution_input", "convolution_weight", "product"):
                add(_LARGE_WEIGHTS + name, make.large_weights, name)
    doubles = Samples(place, torch.float64, scale)
    found.append(Sample(("product", "float64"), lambda large: doubles.product(large=large)))
    singles = Samples(place, torch.float32, scale)
    found.append(Sample(("optimizer", "float32"), lambda large: singles.optimizer(large=large)))
    return found


class _Timer:
    """Measures the seconds of a call on the device, time and again."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def __call__(self, call: Call) -> list[float]:
        """Run ``call`` once to warm up, then repeatedly for the time budget; the seconds of every run.

        An asynchronous device is kept busy while the host launches the calls, as many in a row as make a
        mark negligible.
        """
        call()
        first = time_call(self._clock, call)
        if not first.host:
            ahead, calls, took = 0.0, 1, [first.device]
        else:
            ahead, took = _ahead(first.host), []
            alone = time_call(self._clock, call, ahead=ahead).device
            calls = min(_MOST_CALLS, math.ceil(self._clock.resolution / max(alone, 1e-7)))
            ahead = _ahead(calls * first.host)
        total = sum(took)
        while not took or (total < self._seconds and len(took) < _MOST_RUNS):
            took.append(time_call(self._clock, call, ahead=ahead, calls=calls).device)
            total += max(calls * took[-1], ahead, 1e-7)
        return took


def _ahead(launching: float) -> float:
    """How far ahead of the device the host has to be for work that it launches in ``launching`` seconds."""
    return max(_LEAST_AHEAD, _MARGIN * launching)


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


class _Timings:
    """The seconds of all runs of a sample, and the operations of its large call."""

    def __init__(self) -> None:
        self.small: list[float] = []
        self.large: list[float] = []
        self.ran: list[Operation] = []

    def add(self, timer: _Timer, sample: Sample) -> None:
        """Time the sample in another round; nothing if the device has no such operation."""
        try:
            with torch.set_grad_enabled(sample.key[0].endswith("_backward")):
                small, large = sample.make(False), sample.make(True)
                took = timer(small), timer(large)
                if not self.ran:
                    with _Recorder() as recorder:
                        large()
                    self.ran = recorder.ran
        except (RuntimeError, NotImplementedError):
            return
        self.small += took[0]
        self.large += took[1]

    @property
    def overhead(self) -> float:
        return min(self.small)

    @property
    def beyond(self) -> float:
        """The seconds that the large call takes longer than the small one."""
        took = min(self.large)
        return max(took - self.overhead, took / 10)

    @property
    def is_doubtful(self) -> bool:
        """Has the small call always been held up by something else?"""
        return bool(self.large) and self.overhead > _DOUBTFUL * min(self.large)

    @property
    def scatter(self) -> float:
        """The median of the runs relative to the fastest."""
        return statistics.median(self.large) / (min(self.large) or 1.0)

    def operations(self, name: str) -> list[Operation]:
        """The operations of this class in the large call."""
        return [o for o in self.ran if o.name == name]

    def nbytes(self, name: str) -> int:
        """What these read and write."""
        return sum(o.nbytes for o in self.operations(name))


def _time_all(
    timer: _Timer, samples: list[Sample], progress: Callable[[str, int, int], None]
) -> dict[Key, _Timings]:
    """The timings of all samples that the device can run, in several rounds."""
    found = {sample.key: _Timings() for sample in samples}
    began = time.monotonic()
    for number in range(_ROUNDS * len(samples)):
        sample = samples[number % len(samples)]
        if number >= len(samples) and time.monotonic() - began > _LONGEST:
            break
        progress(" ".join(sample.key), number, _ROUNDS * len(samples))
        found[sample.key].add(timer, sample)
    for sample in _MORE_ROUNDS * samples:
        if found[sample.key].is_doubtful and time.monotonic() - began < _LONGEST:
            found[sample.key].add(timer, sample)
    return {key: timings for key, timings in found.items() if timings.large}


def _bandwidth(timings: Mapping[Key, _Timings]) -> float:
    """The bytes a second that operations read and write which do nothing else.

    Others stay out, because a sum of a tensor that is in the cache reads faster than memory is.
    """
    return max(
        each.nbytes(name) / each.beyond
        for name, each in ((name, timings[name, "float32"]) for name in ("copy", "pointwise"))
    )


def _rate(key: Key, timings: _Timings, streamed: float, tile: int) -> Rate:
    """The rate of a class; ``streamed`` is the bandwidth of a class that is limited by its FLOPs."""
    name, _ = key
    overhead, beyond = timings.overhead, timings.beyond
    flops, nbytes = sum(o.flops for o in timings.operations(name)), timings.nbytes(name)
    if name not in HEAVY or not flops:
        return Rate(overhead=overhead, bandwidth=nbytes / beyond)
    beyond = max(beyond - nbytes / streamed, beyond / 2)
    if not _fills_tiles(key, timings.ran, tile):
        tile = 1
    return Rate(overhead=overhead, flops=flops / beyond, bandwidth=streamed, tile=tile)


def _fills_tiles(key: Key, ran: list[Operation], tile: int) -> bool:
    """Has the class tiles of columns, which its sample fills? Convolutions have."""
    return "convolution" in key[0] and any(o.width and o.width % tile == 0 for o in ran)


def _with_large_weights(
    timings: Mapping[Key, _Timings], measured: Mapping[Key, Rate], tile: int
) -> dict[Key, Rate]:
    """The rates of convolutions and products on a CPU, which reads weights more slowly than it streams.

    On an EPYC with AVX-512, convolutions with 9 MB of weights reached 5 to 10 GB/s, and a copy 39.
    """
    found = {}
    for key, rate in measured.items():
        few = timings.get((_LARGE_WEIGHTS + key[0], key[1]))
        if few is not None:
            ran, took = few.operations(key[0]), min(few.large)
            apart = len(ran) * rate.overhead + sum(o.flops for o in ran) / rate.flops
            if apart < took / 2:  # else the bytes are not what takes long
                reached = few.nbytes(key[0]) / (took - apart)
                found[key] = _rate(key, timings[key], min(reached, rate.bandwidth), tile)
    return found


def _optimizer(timings: _Timings, place: torch.device) -> Rate:
    nbytes = optimizer_passes("adam") * optimizer_nbytes(_scale(place))
    return Rate(overhead=timings.overhead, bandwidth=nbytes / timings.beyond)


def _with_rows(timings: Mapping[Key, _Timings], measured: Mapping[Key, Rate]) -> dict[Key, Rate]:
    """The rates of normalisations on a GPU, with the bandwidth of a single row."""
    found = {}
    for dtype in ("float32", "half"):
        for passes, ending in ((2, ""), (3, "_backward")):
            few = timings.get((_FEW_ROWS + ending, dtype))
            nbytes = passes * ROW * (2 if dtype == "half" else 4)
            for name in ("batch_norm", "group_norm"):
                key = (name + ending, dtype)
                if few is not None and key in measured:
                    found[key] = replace(measured[key], row_bandwidth=nbytes / few.beyond)
    return found


def _peaks(measured: dict[Key, Rate]) -> Peaks:
    """The measured rates, which replace the peak rates of a data sheet."""
    product = measured["product", "float32"].flops
    half = measured.get(("product", "half"), Rate(flops=product)).flops
    double = measured.get(("product", "float64"), Rate(flops=product / 2)).flops
    tensor = measured.get(("convolution", "float32"), Rate(flops=product)).flops
    bandwidth = measured["pointwise", "float32"].bandwidth
    return Peaks(fp32=product, tensor=tensor, half=half, fp64=double, bandwidth=bandwidth)


def _launches(place: torch.device) -> dict[str, float]:
    """Seconds that the host needs in a step to launch an operation, of the kinds of `with_launch`."""
    light, square = torch.zeros(16, device=place), torch.zeros(16, 16, device=place)
    image, weight = torch.zeros(1, 8, 8, 8, device=place), torch.zeros(8, 8, 3, 3, device=place)
    calls: dict[str, Call] = {
        "light": lambda: light + light,
        "product": lambda: square @ square,
        "convolution": lambda: torch.conv2d(image, weight),
    }
    return {name: _launch(place, call) * _AROUND_LAUNCH for name, call in calls.items()}


def _launch(place: torch.device, call: Call) -> float:
    """The host's seconds per call in the fastest of some rounds, of fewer calls than fit a device's queue."""
    found = []
    for _ in range(_ROUNDS + 1):  # the first warms up
        torch.cuda.synchronize(place)
        start = time.perf_counter()
        for _ in range(_LAUNCHES):
            call()
        found.append((time.perf_counter() - start) / _LAUNCHES)
    return min(found[1:])


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
    to_host = _COPIED / min(timer(lambda: there.copy_(host, non_blocking=True)))
    others = [i for i in range(torch.cuda.device_count()) if i != (place.index or 0)]
    link = to_host
    if others:
        other = torch.empty(_COPIED, dtype=torch.uint8, device=f"cuda:{others[0]}")
        link = _COPIED / min(timer(lambda: other.copy_(there, non_blocking=True)))
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
