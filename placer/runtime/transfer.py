"""Moving values between places, differentiably."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map

from placer.runtime.place import Place, on


def copy_to(place: Place, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` on ``place``; always a copy, also where two places share one device."""
    with on(place):
        return tensor.to(place.device, copy=True)


class _Transfer(torch.autograd.Function):
    """Copy from one place to another; the gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, source: Place, target: Place) -> torch.Tensor:
        ctx.source = source
        ctx.target = target
        ctx.set_materialize_grads(False)
        return copy_to(target, tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return transfer(grads[0], ctx.target, ctx.source), None, None


def transfer(value: Any, source: Place, target: Place) -> Any:
    """``value`` (any pytree) with its tensors moved from ``source`` to ``target``.

    A value that stays at its place is passed on as it is. A ``torch.device`` becomes the target's.
    """
    if source == target:
        return value

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return _Transfer.apply(leaf, source, target)
        return target.device if isinstance(leaf, torch.device) else leaf

    return tree_map(move, value)


class _Receive(torch.autograd.Function):
    """A value from another stage as the start of a new graph; ``deliver`` gets its gradient.

    The anchor is what makes the result require grad. Unlike a leaf, the result is kept alive only
    by those who save it, and in-place operations on it are allowed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        tensor: torch.Tensor,
        source: Place,
        target: Place,
        deliver: Callable[[torch.Tensor], None],
    ) -> torch.Tensor:
        ctx.source = source
        ctx.target = target
        ctx.deliver = deliver
        ctx.set_materialize_grads(False)
        return tensor.detach() if source == target else copy_to(target, tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None, None, None]:
        if grads[0] is not None:
            ctx.deliver(grads[0] if ctx.source == ctx.target else copy_to(ctx.source, grads[0]))
        return None, None, None, None, None


def receive(
    tensor: torch.Tensor, source: Place, target: Place, deliver: Callable[[torch.Tensor], None]
) -> torch.Tensor:
    """``tensor`` on ``target``, cut off from its graph; ``deliver`` is given its gradient, moved home."""
    with on(target):
        anchor = torch.zeros((), requires_grad=True)
    return _Receive.apply(anchor, tensor.detach(), source, target, deliver)  # type: ignore[no-any-return]


class _Root(torch.autograd.Function):
    """A scalar over a tensor; in backward the tensor's gradient is what ``take`` gives.

    Given to ``torch.autograd.backward`` directly, the gradient would be held to the end of it.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, take: Callable[[], torch.Tensor]) -> torch.Tensor:
        ctx.take = take
        return tensor.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.take(), None


def gradient_root(tensor: torch.Tensor, take: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A scalar whose backward starts that of ``tensor`` with the gradient from ``take()``.

    It does not keep the tensor alive, only its graph.
    """
    return _Root.apply(tensor, take)  # type: ignore[no-any-return]


class _Mirror(torch.autograd.Function):
    """A parameter's copy on another place; its gradient goes home to the parameter."""

    @staticmethod
    def forward(
        ctx: Any, primary: torch.Tensor, mirrored: torch.Tensor, home: Place
    ) -> torch.Tensor:
        ctx.home = home
        ctx.set_materialize_grads(False)
        return mirrored.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        return None if grads[0] is None else copy_to(ctx.home, grads[0]), None, None


def attach(primary: torch.Tensor, mirrored: torch.Tensor, home: Place) -> torch.Tensor:
    """``mirrored``, as a differentiable function of ``primary``, which lives at ``home``."""
    return _Mirror.apply(primary, mirrored, home)  # type: ignore[no-any-return]
