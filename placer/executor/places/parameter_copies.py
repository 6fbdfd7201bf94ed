"""Copies of parameters and buffers on the devices that read them but do not own them."""

from __future__ import annotations

import torch

from placer._torch import copy_attributes, is_transformed
from placer.executor.places.place import Place
from placer.executor.places.transfer import attach_copy, copy_to, is_differentiable


class ParameterCopies:
    """One replica's copies of tensors for one call, each made when it is first read.

    The primary is the module's own tensor. Copies are not kept for the next call, because nothing tells
    that a primary has been written through ``.data``, which does not move its version counter.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[int, Place], torch.Tensor] = {}

    def read(self, primary: torch.Tensor, home: Place, place: Place) -> torch.Tensor:
        """``primary`` for use on ``place``: itself at ``home``, elsewhere a copy.

        Gradients of the copy flow back to ``primary``.
        """
        if place == home:
            return primary
        if is_transformed():  # under torch.func ``primary`` may be a wrapper made for this call
            return copy_to(place, primary)
        key = (id(primary), place)
        if key not in self._copies:
            self._copies[key] = copy_to(place, primary.detach())
        found = self._copies[key]
        if is_differentiable(primary):
            with torch.enable_grad():  # forward may enable gradients in a part of it
                found = attach_copy(primary, found, home, place)
        copy_attributes(primary, found)
        return found
