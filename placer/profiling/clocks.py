"""Clocks: marks in what a device does, and the seconds between two of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes marks while a device works; the seconds between two are known after `wait`."""

    def mark(self) -> Any:
        """A mark after everything that was asked for so far."""

    def wait(self) -> None:
        """Return when the device has done everything."""

    def seconds(self, start: Any, end: Any) -> float:
        """From one mark to another."""


class HostClock:
    """Of a device that works while the program waits for it: a CPU. ``now`` gives seconds."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now

    def mark(self) -> float:
        """The time."""
        return self._now()

    def wait(self) -> None:
        """There is nothing to wait for."""

    def seconds(self, start: float, end: float) -> float:
        """The difference."""
        return end - start


class CudaClock:
    """Of a CUDA device: events on its stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """An event that the device records when it comes to it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self) -> None:
        """Synchronise with the device."""
        torch.cuda.synchronize(self._device)

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """What the device measured between them."""
        return float(start.elapsed_time(end)) / 1e3


def time_call(clock: Clock, call: Callable[[], Any]) -> float:
    """Seconds of ``call``, with nothing else on the device."""
    clock.wait()
    start = clock.mark()
    call()
    end = clock.mark()
    clock.wait()
    return clock.seconds(start, end)


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
