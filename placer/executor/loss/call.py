"""Calls the user's loss function and checks what it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from placer.errors import PlacerError
from placer.operands import tensors_of_tree
from placer.program.call import describe_shapes
from placer.program.objects.paths import function_parts


def without_graph() -> PlacerError:
    """The error for a loss that does not require gradients."""
    remedy = "do not detach it, and leave some parameters unfrozen"
    if not torch.is_grad_enabled():
        remedy = "call step outside torch.no_grad(), or call placed(x) if you want no gradients"
    problem = "the loss depends on nothing that requires a gradient, so there is no backward"
    return PlacerError("loss_fn", problem, remedy)


def require_function(loss_fn: Any) -> None:
    """Raise ``PlacerError`` if ``loss_fn`` cannot be called, or is a module's class."""
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        name = loss_fn.__name__
        raise PlacerError("loss_fn", f"is the class {name}", f"pass an instance: {name}()")
    if not callable(loss_fn):
        raise PlacerError(
            "loss_fn",
            f"is a {type(loss_fn).__name__}, not a function",
            "pass a function of the output and the target that returns the loss",
        )


def call_loss(loss_fn: Callable[..., Tensor], output: Any, target: Any) -> Tensor:
    """``loss_fn(output, target)``, or ``loss_fn(output)`` where there is no target (None).

    Raises ``PlacerError`` if it does not return a tensor with one element. What it raises itself gets a note
    of what it was called with.
    """
    given = (output,) if target is None else (output, target)
    try:
        loss = loss_fn(*given)
    except Exception as error:
        shapes = [describe_shapes(tensors_of_tree(each)) for each in given]
        with_target = f" and a target of {shapes[1]}" if target is not None else ""
        error.add_note(
            f"placer: loss_fn raised this, for a slice of the batch: a result of {shapes[0]}{with_target}"
        )
        raise
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    kind = f"a tensor of {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise PlacerError(
        "loss_fn",
        f"returned {kind}, not a scalar tensor",
        "return a scalar, for example loss.mean()",
    )


def objects_of(function: Any, depth: int = 3) -> Iterator[Any]:
    """The objects that ``function`` is made of: its code, closure, defaults, bound arguments and ``self``.

    A function of a closure is made of such objects too. Globals that it reads are not among them.
    """
    parts = function_parts(function)
    if isinstance(function, FunctionType):
        yield function.__code__
    elif not parts:
        yield function
    for name, part in parts:
        yield name  # an argument of another name is another one
        if depth:
            yield from objects_of(part, depth - 1)
        else:
            yield part
