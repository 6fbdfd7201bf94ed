"""Clocks that measure the seconds between two points of a device's work."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Records marks while a device works. The time between two marks is known after `wait`."""

    def mark(self) -> Any:
        """A mark after all work that was submitted so far."""

    def wait(self) -> None:
        """Wait until the device has finished all work."""

    def seconds(self, start: Any, end: Any) -> float:
        """The seconds between two marks."""


class HostClock:
    """A clock for the CPU, which works synchronously. ``now`` returns the time in seconds."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now

    def mark(self) -> float:
        """The current time."""
        return self._now()

    def wait(self) -> None:
        """Does nothing: the CPU has finished when a call returns."""

    def seconds(self, start: float, end: float) -> float:
        """The seconds between two marks."""
        return end - start


class CudaClock:
    """A clock for a CUDA device, with events on its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self) -> None:
        """Synchronize with the device."""
        torch.cuda.synchronize(self._device)

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """The seconds that the device measured between two events."""
        return float(start.elapsed_time(end)) / 1e3


def time_call(clock: Clock, call: Callable[[], Any]) -> float:
    """Seconds that ``call`` takes on an otherwise idle device."""
    clock.wait()
    start = clock.mark()
    call()
    end = clock.mark()
    clock.wait()
    return clock.seconds(start, end)


def clock_for(device: torch.device) -> Clock:
    """The clock for ``device``."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
