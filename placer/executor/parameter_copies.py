"""Copies of parameters and buffers on the devices that read them but do not own them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from placer._torch import is_transformed
from placer.executor.place import Place
from placer.executor.transfer import attach_copy, copy_to


@dataclass(slots=True)
class _Copy:
    tensor: torch.Tensor
    primary_version: int
    own_version: int  # changes when a replica's BatchNorm writes to the copy, which is then remade
    grads_seen: int  # how many gradients the primary had received when the copy was made


class ParameterCopies:
    """One replica's copies of tensors, made at the first read and remade when the primary changes.

    The primary is the module's own tensor. It counts as changed when its version counter moves, when
    a gradient has reached it since the copy was made (an optimizer may write through ``.data``, which
    does not move the counter), and after `forget`.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[int, Place], _Copy] = {}
        self._grads: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[torch.Tensor]] = {}

    def forget(self) -> None:
        """Remake every copy at its next use."""
        self._copies.clear()

    def read(self, primary: torch.Tensor, home: Place, place: Place) -> torch.Tensor:
        """``primary`` for use on ``place``: itself at ``home``, elsewhere a copy.

        Gradients of the copy flow back to ``primary``.
        """
        if place == home:
            return primary
        if is_transformed():  # under torch.func ``primary`` may be a wrapper made for this call
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
            # The copy outlives this call, and a tensor made under inference_mode cannot be trained.
            with torch.inference_mode(False):
                fresh = copy_to(place, primary.detach())
            kept = _Copy(fresh, primary._version, fresh._version, grads)
            self._copies[key] = kept
        if primary.requires_grad and torch.is_grad_enabled():
            return attach_copy(primary, kept.tensor, home, place)
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
