"""The ledger: live bytes per simulated device, counted storage by storage.

Every storage is tagged with a place when it is made: a copy goes where it is copied to, anything
else where its inputs are, and what has no inputs where the running stage is. An operation on
tensors of two places is an error, as it would be with two real devices. Works on fake tensors and
on real ones alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from placer.errors import DeviceError
from placer.runtime.place import Place, current_place

HOST = "caller"  # where the caller's own tensors are; not a device of the plan


@dataclass(frozen=True, slots=True)
class _Entry:
    place: str
    nbytes: int
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A device's peak: its bytes, what was going on, and the live bytes by kind."""

    nbytes: int = 0
    phase: str = ""
    operation: str = ""


class Ledger(TorchDispatchMode):
    """Counts while entered; ``phase`` (forward, backward, optimizer) labels the peaks found."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.live: dict[str, int] = {}
        self.peaks: dict[str, Moment] = {}
        self._entries: dict[int, tuple[weakref.ref[Any], _Entry]] = {}
        self._latest = HOST

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        fresh = [
            leaf
            for leaf in tree_leaves(result)
            if isinstance(leaf, Tensor) and id(leaf.untyped_storage()) not in self._entries
        ]
        place = self._place_of(func, tree_leaves((args, kwargs)))
        for leaf in fresh:
            self.add(leaf, place, str(func))
        self._latest = place
        return result

    def _place_of(self, func: Any, leaves: Iterable[Any]) -> str:
        here = current_place()
        if func is torch.ops.aten._to_copy.default and here is not None:
            return here.name
        found = dict.fromkeys(
            entry.place
            for leaf in leaves
            if isinstance(leaf, Tensor) and leaf.dim() and (entry := self._entry(leaf)) is not None
        )
        if len(found) > 1:
            names = " and ".join(found)
            raise DeviceError(
                str(func),
                f"an operation mixes tensors of {names}",
                "this placement would fail on real devices; report it with the model",
            )
        if found:
            return next(iter(found))
        return here.name if here is not None else self._latest

    def _entry(self, tensor: Tensor) -> _Entry | None:
        known = self._entries.get(id(tensor.untyped_storage()))
        return known[1] if known is not None else None

    def add(self, tensor: Tensor, place: str | Place, operation: str = "") -> None:
        """Count the tensor's storage on ``place`` from now until it is freed."""
        name = place.name if isinstance(place, Place) else place
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._entries:
            return
        entry = _Entry(name, storage.nbytes(), self.phase)

        def gone(_: Any) -> None:
            del self._entries[key]
            self.live[name] -= entry.nbytes

        self._entries[key] = (weakref.ref(storage, gone), entry)
        self.live[name] = self.live.get(name, 0) + entry.nbytes
        if self.live[name] > self.peaks.get(name, Moment()).nbytes:
            self.peaks[name] = Moment(
                nbytes=self.live[name], phase=self.phase, operation=operation
            )

    def reset_peaks(self) -> None:
        """Start new peaks from what is live now."""
        self.peaks = {name: Moment(nbytes=n, phase=self.phase) for name, n in self.live.items()}
