"""Persistent copies of parameters and buffers on places other than their home."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from placer._torch import is_transformed
from placer.executor.place import Place
from placer.executor.transfer import attach, copy_to


@dataclass(slots=True)
class _Copy:
    tensor: torch.Tensor
    primary_version: int
    own_version: int  # a replica's BatchNorm writes its copy; it is then made anew
    grads_seen: int


class ParameterCopies:
    """The copies of one replica, made when first asked for and remade when the primary changed.

    A primary counts as changed when its version counter moved, when a gradient reached it since
    (the optimizer may write through ``.data``, which moves no counter), or after `forget`.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[int, Place], _Copy] = {}
        self._grads: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[torch.Tensor]] = {}

    def forget(self) -> None:
        """Remake every copy at its next use."""
        self._copies.clear()

    def read(self, primary: torch.Tensor, home: Place, place: Place) -> torch.Tensor:
        """``primary`` as ``place`` sees it: itself at home, else its copy, tied to it by autograd."""
        if place == home:
            return primary
        if is_transformed():  # it may be a wrapper that the transform made for this call
            return copy_to(place, primary)
        self._watch(primary)
        key = (id(primary), place)
        grads = self._grads.get(id(primary), 0)
        kept = self._copies.get(key)
        if (
            kept is None
            or kept.primary_version != primary._version
            or kept.own_version != kept.tensor._version
            or kept.grads_seen != grads
        ):
            self._copies.pop(key, None)
            del kept
            # A copy outlives the call: one made under inference_mode could not be trained later.
            with torch.inference_mode(False):
                fresh = copy_to(place, primary.detach())
            kept = _Copy(fresh, primary._version, fresh._version, grads)
            self._copies[key] = kept
        if primary.requires_grad and torch.is_grad_enabled():
            return attach(primary, kept.tensor, home, place)
        return kept.tensor

    def _watch(self, primary: torch.Tensor) -> None:
        """Count the gradients that reach ``primary``, and drop its copies when it dies."""
        key = id(primary)
        known = self._watched.get(key)
        if known is not None and known() is primary:
            return
        for stale in [k for k in self._copies if k[0] == key]:
            del self._copies[stale]
        self._watched[key] = weakref.ref(primary)
        if primary.requires_grad and primary.is_leaf:
            counts = self._grads

            def count(_: torch.Tensor) -> None:
                counts[key] = counts.get(key, 0) + 1

            primary.register_post_accumulate_grad_hook(count)

    def __deepcopy__(self, memo: object) -> ParameterCopies:
        return ParameterCopies()
