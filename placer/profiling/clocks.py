"""Clocks that measure the seconds between two points of a device's work.

A GPU works asynchronously: the host launches an operation, which takes it some 20 µs, and the device runs it
in perhaps 2 µs. If the device is idle, the time between two marks is then the host's. So before a measurement
a clock gives the device something to do (`Clock.begin`), and the host launches meanwhile:

    host     launch busy work | mark | launch the operation | mark
    device                    [ busy work ....................][ mark ][ operation ][ mark ]
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Clock(Protocol):
    """Records marks while a device works. The time between two marks is known after `wait`."""

    resolution: float
    """Seconds in comparison to which a mark takes no time."""

    def mark(self) -> Any:
        """A mark after all work that was submitted so far."""

    def begin(self, ahead: float) -> tuple[Any, Any]:
        """A mark that ends what was measured before, and one that begins something new.

        Between the two, an asynchronous device gets work for about ``ahead`` seconds, in which the host can
        launch what is measured.
        """

    def wait(self) -> None:
        """Wait until the device has finished all work."""

    def seconds(self, start: Any, end: Any) -> float:
        """The device's seconds between two marks."""

    def launching(self, start: Any, end: Any) -> float:
        """The host's seconds between two marks; 0 if the host is the device."""


class HostClock:
    """A clock for the CPU, which works synchronously. ``now`` returns the time in seconds."""

    resolution = 0.0

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now

    def mark(self) -> float:
        return self._now()

    def begin(self, ahead: float) -> tuple[float, float]:
        now = self._now()
        return now, now

    def wait(self) -> None:
        """Does nothing: the CPU has finished when a call returns."""

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def launching(self, start: float, end: float) -> float:
        return 0.0  # launching an operation is running it


class CudaMark(NamedTuple):
    """A point of the device's work, and the time at which the host submitted it."""

    event: torch.cuda.Event
    host: float


class CudaClock:
    """A clock for a CUDA device, with events on its current stream."""

    resolution = 100e-6

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._busy: tuple[Tensor, Tensor] | None = None
        self._net = 0.0  # seconds of a product on the device, less those of the host to launch it

    def mark(self) -> CudaMark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return CudaMark(event, time.perf_counter())

    def begin(self, ahead: float) -> tuple[CudaMark, CudaMark]:
        """Marks before and after some products, which begin once the device has finished all work.

        If the host did not wait, it would get ever further ahead, and have to wait for a place in the
        device's queue (of about a thousand launches) while something is measured.
        """
        end = self.mark()
        self.wait()
        if ahead > 0:
            self._occupy(ahead)
        return end, self.mark()

    def _occupy(self, seconds: float) -> None:
        if self._busy is None:
            a = torch.ones(_SIZE, _SIZE, device=self._device)
            self._busy = a, torch.empty_like(a)
            self._multiply(1)
            self.wait()
            start = self.mark()
            self._multiply(_TRIED)
            end = self.mark()
            self.wait()
            took = self.seconds(start, end)
            self._net = max(took - self.launching(start, end), took / 4) / _TRIED
        self._multiply(math.ceil(seconds / self._net))

    def _multiply(self, times: int) -> None:
        assert self._busy is not None
        a, product = self._busy
        with torch.no_grad():
            for _ in range(times):
                torch.mm(a, a, out=product)

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def seconds(self, start: CudaMark, end: CudaMark) -> float:
        return float(start.event.elapsed_time(end.event)) / 1e3

    def launching(self, start: CudaMark, end: CudaMark) -> float:
        return end.host - start.host


# Twice 4 MiB, so that little is lost of a GPU's cache; 2 GFLOP take longer than their launch.
_SIZE = 1024
_TRIED = 20


class Took(NamedTuple):
    """Seconds of a call on the device, and of the host until the call returned."""

    device: float
    host: float


def time_call(clock: Clock, call: Callable[[], Any], *, ahead: float = 0.0, calls: int = 1) -> Took:
    """Seconds that ``call`` takes, the mean of ``calls`` in a row.

    With ``ahead`` 0 the device is idle before; those of the device then include waiting for the host. If
    the host launches all calls in ``ahead`` seconds, they do not.
    """
    clock.wait()
    _, start = clock.begin(ahead)
    for _ in range(calls):
        call()
    end = clock.mark()
    clock.wait()
    return Took(clock.seconds(start, end) / calls, clock.launching(start, end) / calls)


def clock_for(device: torch.device) -> Clock:
    """The clock for ``device``."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
