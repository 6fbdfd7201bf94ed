"""The user's loss function, called for one micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from placer.errors import PlacerError


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
