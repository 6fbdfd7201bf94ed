"""The user's loss function, called for one micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from placer.errors import PlacerError


class WatchedLoss:
    """A loss function that remembers whether any of its losses can be differentiated."""

    def __init__(self, loss_fn: Callable[..., Tensor]) -> None:
        self._loss_fn = loss_fn
        self._has_graph: bool | None = None  # None: it was not called

    def __call__(self, *given: Any) -> Tensor:
        loss = self._loss_fn(*given)
        self._has_graph = bool(self._has_graph or getattr(loss, "requires_grad", False))
        return loss

    @property
    def lacks_graph(self) -> bool:
        """Was it called, and is there nothing to go backward through?"""
        return self._has_graph is False

    def require_graph(self) -> None:
        """Raise ``PlacerError`` when there was nothing to go backward through, as eager would."""
        if self.lacks_graph:
            raise without_graph()


def without_graph() -> PlacerError:
    """That there is nothing to go backward through."""
    remedy = "do not detach it, and leave some parameters unfrozen"
    if not torch.is_grad_enabled():
        remedy = "call step outside torch.no_grad(), or placed(x) where no gradient is wanted"
    problem = "the loss depends on nothing that requires a gradient, so there is none"
    return PlacerError("loss_fn", problem, remedy)


def call_loss(loss_fn: Callable[..., Tensor], output: Any, target: Any) -> Tensor:
    """``loss_fn(output, target)``, or ``loss_fn(output)`` where there is no target (None).

    Raises ``PlacerError`` for what is not one number in a tensor.
    """
    loss = loss_fn(output) if target is None else loss_fn(output, target)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    kind = f"a tensor of {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise PlacerError(
        "loss_fn",
        f"returned {kind}, not a scalar tensor",
        "reduce it, by .mean() say, and return it",
    )
