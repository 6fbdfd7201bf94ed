"""Warns of an optimizer that was made for the model that was placed, and so trains nothing."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook


def warn_of_unplaced_optimizers(model: nn.Module, placed: nn.Module) -> None:
    """Warn once when an optimizer steps with parameters of ``model``, and ``placed`` has the gradients.

    There is no warning if any of the optimizer's parameters has a gradient, because it may train both, nor
    with a closure, which computes them only then.
    """
    originals = {id(parameter): weakref.ref(parameter) for parameter in model.parameters()}
    reference = weakref.ref(placed)

    def check(optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: Any) -> None:
        placed = reference()
        given = [p for group in optimizer.param_groups for p in group["params"]]
        closure = any(map(callable, (*args[1:], *kwargs.values())))
        if placed is None or closure or any(p.grad is not None for p in given):
            return
        ours = any(id(p) in originals and originals[id(p)]() is p for p in given)
        if ours and any(p.grad is not None for p in placed.parameters()):
            handle.remove()
            warnings.warn(
                f"{type(optimizer).__name__} has parameters of the model that was placed, and the gradients "
                "are those of the placed module, which has its own parameters: nothing is trained. Make "
                "the optimizer with placed.parameters()",
                stacklevel=3,
            )

    handle = register_optimizer_step_pre_hook(check)
    weakref.finalize(placed, handle.remove)
