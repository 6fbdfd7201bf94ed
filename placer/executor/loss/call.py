"""The user's loss function, called for one slice of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from placer.errors import PlacerError


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
