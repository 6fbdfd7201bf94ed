"""Copies that run beside a device's kernels: on a CUDA stream of their own, one after the other.

The stream that kernels run on, torch's current one, is called the device's main stream here.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from placer.executor.place import Place, on


class SideStream(Protocol):
    """A stream of copies beside the main stream of one device."""

    def copy(self, source: Tensor, target: Tensor | None, place: Place) -> tuple[Tensor, Any]:
        """Begin to copy ``source`` to ``target``; the target, and a mark for when that has ended.

        It begins when all that was given to the main stream before has ended, and earlier copies. Until
        the main stream waits for the mark, both tensors must be kept, and what is in them left alone.
        Without a target one is made on ``place``, which is a CPU.
        """

    def wait(self, mark: Any) -> None:
        """What is given to the main stream from now on begins when the copy with this mark has ended."""


class _CudaStream:
    """Has been run on no GPU yet."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, source: Tensor, target: Tensor | None, place: Place) -> tuple[Tensor, Any]:
        assert target is not None, "memory of the host is pinned"
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), on(place):
            target.copy_(source, non_blocking=True)
            return target, self._stream.record_event()

    def wait(self, mark: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)


class _NoStream:
    """A CPU has none: copies take their turn. A dry run so has the tensors that a GPU would have."""

    def copy(self, source: Tensor, target: Tensor | None, place: Place) -> tuple[Tensor, Any]:
        with on(place):
            return source.to(place.device, copy=True), None

    def wait(self, mark: Any) -> None:
        pass


@cache
def side_stream(device: torch.device) -> SideStream:
    """The stream for copies from and to ``device``; there is one for each."""
    return _CudaStream(device) if device.type == "cuda" else _NoStream()
