"""Saved activations in host memory: written out when autograd saves them, read back when it needs them.

As `torch.autograd.graph.save_on_cpu`, but a tensor crosses once each way, however many operations
save it, and weights stay where they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from placer.executor.place import HOST, Place, on


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
                self._host = torch.empty_like(data, device=HOST.device, pin_memory=True)
                self._host.copy_(data, non_blocking=True)

    def fetch(self) -> Tensor:
        """The data on the device."""
        if self._back is None:
            with on(self._place):
                self._back = self._host.to(self._place.device, copy=True, non_blocking=True)
        return self._back


@dataclass(frozen=True, slots=True)
class _Saved:
    """A tensor that autograd saved: all of what waits, or a view of it."""

    waiting: _Waiting
    view: tuple[torch.Size, tuple[int, ...], int | torch.SymInt] | None


def offload_saved(kept: Iterable[Tensor], place: Place) -> torch.autograd.graph.saved_tensors_hooks:
    """A context in which what autograd saves on ``place`` waits on the host, ``kept`` apart."""
    keep = {id(tensor.untyped_storage()) for tensor in kept}
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
            waiting = _Waiting(data, place)
            seen[key] = (weakref.ref(storage), weakref.ref(waiting))
        return _Saved(waiting, view if whole else None)

    def unpack(packed: Tensor | _Saved) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        back = packed.waiting.fetch()
        return back if packed.view is None else back.as_strided(*packed.view)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
