"""Backward functions that cannot be differentiated themselves, and say so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from placer.errors import PlacerError


def once_differentiable(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """``backward`` of an autograd function; to differentiate its gradients again raises ``PlacerError``.

    Unlike torch's function of this name, also where the incoming gradient has no graph: the gradients may
    depend on saved tensors, and a penalty on them would lose that part without a word.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            found = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return found
        return _Refusal.apply(torch.zeros((), requires_grad=True), *found)  # type: ignore[no-any-return]

    return run


class _Refusal(torch.autograd.Function):
    """The values that it is given, with a graph whose backward raises."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *values: Any) -> tuple[Any, ...]:
        return tuple(v.view_as(v) if isinstance(v, Tensor) else v for v in values)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise PlacerError(
            "gradients of gradients",
            "operations that are split in space or in chunks can be differentiated once only",
            'leave "space" and "chunks" out of the spec; stages, replicas, micro-batches, "checkpoint" and '
            '"offload" work',
        )
