"""Copies between a device and the host that overlap with kernels, on a CUDA stream of their own.

Here the device's main stream is torch's current stream, on which kernels run.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from placer.executor.places.place import Place, on


class SideStream(Protocol):
    """A stream for copies, next to the main stream of one device."""

    def copy(self, source: Tensor, target: Tensor | None, place: Place) -> tuple[Tensor, Any]:
        """Start to copy ``source`` to ``target``; returns the target and an event to wait for.

        The copy starts after earlier copies and after all work that the main stream has been given so
        far. Until the main stream waits for the event, the caller must keep both tensors alive and must
        not change them. Without a target one is created on ``place``, which must be a CPU.
        """

    def wait(self, event: Any) -> None:
        """Let later work of the main stream start only after the copy that returned ``event``."""


class _CudaStream:
    """A CUDA stream for copies. Not yet run on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, source: Tensor, target: Tensor | None, place: Place) -> tuple[Tensor, Any]:
        assert target is not None, "memory of the host is pinned"
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), on(place):
            target.copy_(source, non_blocking=True)
            return target, self._stream.record_event()

    def wait(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)


class _SynchronousCopies:
    """Copies at once, for a CPU. A dry run with it creates the same tensors as a run on a GPU."""

    def copy(self, source: Tensor, target: Tensor | None, place: Place) -> tuple[Tensor, Any]:
        with on(place):
            return source.to(place.device, copy=True), None

    def wait(self, event: Any) -> None:
        pass


@cache
def side_stream(device: torch.device) -> SideStream:
    """The one stream for copies from and to ``device``."""
    return _CudaStream(device) if device.type == "cuda" else _SynchronousCopies()
