"""Sparse gradients of embeddings in runs on fake tensors.

Torch's fake kernels lose the elements of sparse tensors (torch 2.15: ``clone`` and ``coalesce`` return none).
So there a sparse gradient is two plain tensors that its weight keeps, indices and values, and the weight's
``grad`` stays None. They have as many rows as the batch looks up, which is the most that there can be::

    backward of 4 x 5 words of width 8:  indices 1 x 20, values 20 x 8
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

EMBEDDINGS = tuple(getattr(torch.nn.functional, n) for n in ("embedding", "embedding_bag"))


def look_up(function: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
    """Call ``function``, one of `EMBEDDINGS`, so that a sparse gradient of its weight is kept as rows.

    The gradient of a weight that is computed from others, such as another device's copy, is dense.
    """
    call = inspect.signature(function).bind(*args, **kwargs)
    is_sparse, call.arguments["sparse"] = call.arguments.get("sparse", False), False
    words, weight = (call.arguments[name] for name in ("input", "weight"))
    if not (is_sparse and weight.is_leaf and weight.requires_grad and torch.is_grad_enabled()):
        return function(*call.args, **call.kwargs)
    result: Tensor = _LookUp.apply(weight, words, lambda: function(*call.args, **call.kwargs))
    return result


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, words: Tensor, run: Callable[[], Tensor]) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(words)
        return run()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (words,) = ctx.saved_tensors
        rows, width = words.numel(), ctx.weight.size(1)
        indices = words.new_empty((1, rows), dtype=torch.int64)
        values = grads[0].new_empty((rows, width))
        before = row_gradient(ctx.weight)
        if before:
            indices, values = torch.cat([before[0], indices], 1), torch.cat([before[1], values])
        ctx.weight.row_gradient = (indices, values)
        return None, None, None


def row_gradient(parameter: Tensor) -> tuple[Tensor, ...]:
    """The indices and values of the parameter's sparse gradient; none if it is dense."""
    found: tuple[Tensor, ...] = getattr(parameter, "row_gradient", ())
    return found


def clear_row_gradients(parameters: Iterable[Tensor]) -> None:
    """Forget the sparse gradients, as ``zero_grad`` does dense ones."""
    for parameter in parameters:
        if row_gradient(parameter):
            del parameter.row_gradient  # type: ignore[attr-defined]
