"""Keeps saved activations in host memory between forward and backward.

Like `torch.autograd.graph.save_on_cpu`, but a tensor is copied once in each direction, however many
operations save it, and weights stay on the device. By default a copy runs between kernels, on the same
stream; overlapped copies run while kernels do (`placer.executor.places.side_stream`)::

    forward    kernels │ make a │ make b      │ make c           │ …
               copies           │ a to host   │ b to host        │ c to host
                                  keeps a ────┘ keeps b ─────────┘

    backward   kernels          │ use c       │ use b            │ use a
               copies  │ c back │ b back      │ a back

With overlapped copies a device needs room for one more tensor: in forward a tensor stays until the next
copy starts, and in backward one is copied back before it is needed.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from placer.executor.places.place import HOST, Place, on, place_of
from placer.executor.places.side_stream import SideStream, side_stream
from placer.executor.stages.segment_state import changed_in_place


class _HostCopy:
    """A tensor's data on the host, and during backward again on its device.

    Shared by all tensors over the same data that autograd saved, and freed with the last of them.
    """

    __slots__ = ("__weakref__", "_back", "_host", "_place")

    def __init__(self, data: Tensor, place: Place) -> None:
        self._place = place
        self._back: Tensor | None = None
        with on(HOST):
            if data.device.type == "cpu":
                self._host = data.to(HOST.device, copy=True)
            else:  # pinned memory, so that copies in both directions are asynchronous
                self._host = _pinned_like(data).copy_(data, non_blocking=True)

    def fetch(self) -> Tensor:
        """The data on the device."""
        if self._back is None:
            with on(self._place):
                self._back = self._host.to(self._place.device, copy=True, non_blocking=True)
        return self._back


class _OverlappedHostCopy(_HostCopy):
    """The same with copies that overlap with kernels.

    A source tensor is freed only after the main stream has been told to wait for its copy. Whatever
    reuses the memory comes later on that stream, so ``record_stream`` is not needed.
    """

    __slots__ = ("_before", "_event", "_queue", "_source")

    def __init__(self, data: Tensor, queue: _CopyQueue) -> None:
        self._queue, self._place = queue, queue.place
        self._back: Tensor | None = None
        self._source: Tensor | None = None
        self._event: Any = None
        queue.free_newest_source()
        target = None if data.device.type == "cpu" else _pinned_like(data)
        self._host, self._event = queue.stream.copy(data, target, HOST)
        self._source = data
        self._before, queue.newest = queue.newest, weakref.ref(self)

    def fetch(self) -> Tensor:
        """The data on the device; also starts to copy back the tensor that was saved before this one."""
        self._queue.free_newest_source()
        self._start_copy_back()
        self._free_source()
        before = self._before()
        if before is not None:
            before._start_copy_back()
        assert self._back is not None
        return self._back

    def _start_copy_back(self) -> None:
        if self._back is None:
            cpu = self._place.device.type == "cpu"
            room = None if cpu else torch.empty_like(self._host, device=self._place.device)
            self._back, self._event = self._queue.stream.copy(self._host, room, self._place)
            self._source = self._back  # kept until the copy has ended

    def _free_source(self) -> None:
        """Make the main stream wait for the current copy, and drop the reference to its device tensor."""
        if self._source is not None:
            self._queue.stream.wait(self._event)
            self._source = self._event = None

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._free_source()


class _CopyQueue:
    """The copies of one place, which run one after the other."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.stream: SideStream = side_stream(place.device)
        self.newest: Callable[[], _OverlappedHostCopy | None] = lambda: None  # a weak reference

    def free_newest_source(self) -> None:
        """Free the device tensor that was copied to the host last."""
        newest = self.newest()
        if newest is not None and newest._back is None:
            newest._free_source()


_queue_of = cache(_CopyQueue)


def _pinned_like(data: Tensor) -> Tensor:
    return torch.empty_like(data, device=HOST.device, pin_memory=True)


@dataclass(frozen=True, slots=True)
class _Saved:
    """A tensor that autograd saved: all data of a host copy, or a view of it."""

    copied: _HostCopy
    view: tuple[torch.Size, tuple[int, ...], int | torch.SymInt] | None  # size, stride, offset


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor that autograd saved and that stays on its device."""

    tensor: Tensor
    version: int
    name: str  # of the parameter or buffer, or empty

    def get(self) -> Tensor:
        """The tensor, if it was not written since, which autograd itself checks without hooks."""
        if self.tensor._version != self.version:
            raise changed_in_place(self.name or "a tensor", "reads it", "offload")
        return self.tensor


def offload_saved(
    kept: Iterable[tuple[str, Tensor]], places: Sequence[Place], *, overlapped: bool = False
) -> torch.autograd.graph.saved_tensors_hooks:
    """A context in which tensors that autograd saves on ``places`` are moved to the host, except ``kept``.

    These have names for errors. ``overlapped``: copies run while kernels do.
    """
    keep = {id(tensor.untyped_storage()): name for name, tensor in kept}
    # The weak reference to a storage tells whether its id is still that of the same storage.
    seen: dict[tuple[Any, ...], tuple[weakref.ref[Any], weakref.ref[_HostCopy]]] = {}

    def pack(tensor: Tensor) -> _Kept | _Saved:
        data, storage = tensor.detach(), tensor.untyped_storage()
        place = place_of(tensor, places) if tensor.layout == torch.strided else None
        if id(storage) in keep or place is None or not storage.nbytes():
            return _Kept(data, data._version, keep.get(id(storage), ""))
        view = (tensor.size(), tensor.stride(), tensor.storage_offset())
        # Tensors that cover their whole storage share a copy. A part of a storage is copied by itself,
        # as other parts may have version counters of their own (unsafe_chunk, as in an LSTM).
        whole = tensor.numel() * tensor.element_size() == storage.nbytes()
        if whole:
            data = data.as_strided((tensor.numel(),), (1,), 0)
        key = (id(storage), tensor._version, tensor.dtype, None if whole else view)
        source, known = seen.get(key, (None, None))
        same = source is not None and source() is storage
        copied = known() if same and known is not None else None
        if copied is None:
            queue = _queue_of(place) if overlapped else None
            copied = _HostCopy(data, place) if queue is None else _OverlappedHostCopy(data, queue)
            seen[key] = (weakref.ref(storage), weakref.ref(copied))
        return _Saved(copied, view if whole else None)

    def unpack(packed: _Kept | _Saved) -> Tensor:
        if isinstance(packed, _Kept):
            return packed.get()
        back = packed.copied.fetch()
        return back if packed.view is None else back.as_strided(*packed.view)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
