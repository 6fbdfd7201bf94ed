"""Saved activations in host memory: written out when autograd saves them, read back when it needs them.

As `torch.autograd.graph.save_on_cpu`, but a tensor crosses once each way, however many operations
save it, and weights stay where they are. Copies take turns with the kernels of their device; overlapped,
they run beside them (`placer.executor.side_stream`)::

    forward    kernels │ make a │ make b      │ make c           │ …
               copies           │ a to host   │ b to host        │ c to host
                                  keeps a ────┘ keeps b ─────────┘

    backward   kernels          │ use c       │ use b            │ use a
               copies  │ c back │ b back      │ a back

So a device holds one tensor longer in forward (until the next copy begins, or backward), and has one
earlier than it needs it in backward.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from placer.executor.place import HOST, Place, on
from placer.executor.side_stream import SideStream, side_stream


class _Waiting:
    """A tensor's data on the host, and on its device while backward needs it there.

    All that autograd saved of the tensor shares it; it dies with the last of them.
    """

    __slots__ = ("__weakref__", "_back", "_host", "_place")

    def __init__(self, data: Tensor, place: Place) -> None:
        self._place = place
        self._back: Tensor | None = None
        with on(HOST):
            if data.device.type == "cpu":
                self._host = data.to(HOST.device, copy=True)
            else:  # pinned, so that neither way has to wait
                self._host = _pinned_like(data).copy_(data, non_blocking=True)

    def fetch(self) -> Tensor:
        """The data on the device."""
        if self._back is None:
            with on(self._place):
                self._back = self._host.to(self._place.device, copy=True, non_blocking=True)
        return self._back


class _Overlapped(_Waiting):
    """The same with copies beside the kernels.

    A tensor is let go of only after the main stream waits for its copy: memory that is free then can be
    used again by whatever comes later on that stream, so that the allocator need not be told.
    """

    __slots__ = ("_before", "_lane", "_mark", "_source")

    def __init__(self, data: Tensor, lane: _Lane) -> None:
        self._lane, self._place = lane, lane.place
        self._back: Tensor | None = None
        self._source: Tensor | None = None
        self._mark: Any = None
        lane.settle()
        target = None if data.device.type == "cpu" else _pinned_like(data)
        self._host, self._mark = lane.stream.copy(data, target, HOST)
        self._source = data
        self._before, lane.newest = lane.newest, weakref.ref(self)

    def fetch(self) -> Tensor:
        """The data on the device; that of the tensor saved before it is on its way then."""
        self._lane.settle()
        self._bring()
        self._settle()
        before = self._before()
        if before is not None:
            before._bring()
        assert self._back is not None
        return self._back

    def _bring(self) -> None:
        if self._back is None:
            cpu = self._place.device.type == "cpu"
            room = None if cpu else torch.empty_like(self._host, device=self._place.device)
            self._back, self._mark = self._lane.stream.copy(self._host, room, self._place)
            self._source = self._back  # until it has come

    def _settle(self) -> None:
        """Have the main stream wait for the copy that is under way, and let go of what it needs."""
        if self._source is not None:
            self._lane.stream.wait(self._mark)
            self._source = self._mark = None

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._settle()


def _nothing() -> None:
    """As a weak reference to what is gone."""
    return


class _Lane:
    """The copies of one place, one after the other."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.stream: SideStream = side_stream(place.device)
        self.newest: weakref.ref[_Overlapped] | Any = _nothing

    def settle(self) -> None:
        """Let go of the tensor that went to the host last."""
        newest = self.newest()
        if newest is not None and newest._back is None:
            newest._settle()


_lane = cache(_Lane)


def _pinned_like(data: Tensor) -> Tensor:
    return torch.empty_like(data, device=HOST.device, pin_memory=True)


@dataclass(frozen=True, slots=True)
class _Saved:
    """A tensor that autograd saved: all of what waits, or a view of it."""

    waiting: _Waiting
    view: tuple[torch.Size, tuple[int, ...], int | torch.SymInt] | None


def offload_saved(
    kept: Iterable[Tensor], place: Place, *, overlapped: bool = False
) -> torch.autograd.graph.saved_tensors_hooks:
    """A context in which what autograd saves on ``place`` waits on the host, ``kept`` apart.

    ``overlapped``: copies run beside the kernels.
    """
    keep = {id(tensor.untyped_storage()) for tensor in kept}
    lane = _lane(place) if overlapped else None
    # The weak reference tells whether an identity still stands for the same storage.
    seen: dict[tuple[Any, ...], tuple[weakref.ref[Any], weakref.ref[_Waiting]]] = {}

    def pack(tensor: Tensor) -> Tensor | _Saved:
        storage = tensor.untyped_storage()
        elsewhere = tensor.device.type != place.device.type or tensor.layout != torch.strided
        if id(storage) in keep or elsewhere or not storage.nbytes():
            return tensor.detach()
        data = tensor.detach()
        view = (tensor.size(), tensor.stride(), tensor.storage_offset())
        # Tensors over the whole of a storage share a copy. Of a part there may be others with
        # version counters of their own (unsafe_chunk, as in an LSTM): it is copied by itself.
        whole = tensor.numel() * tensor.element_size() == storage.nbytes()
        if whole:
            data = data.as_strided((tensor.numel(),), (1,), 0)
        key = (id(storage), tensor._version, tensor.dtype, None if whole else view)
        source, known = seen.get(key, (None, None))
        same = source is not None and source() is storage
        waiting = known() if same and known is not None else None
        if waiting is None:
            waiting = _Waiting(data, place) if lane is None else _Overlapped(data, lane)
            seen[key] = (weakref.ref(storage), weakref.ref(waiting))
        return _Saved(waiting, view if whole else None)

    def unpack(packed: Tensor | _Saved) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        back = packed.waiting.fetch()
        return back if packed.view is None else back.as_strided(*packed.view)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
