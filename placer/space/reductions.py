"""The largest or smallest element, and the variance, of a value of which every shard has a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from placer.space.exchange import Exchange
from placer.space.once import once_differentiable


class Extreme(torch.autograd.Function):
    """The ``kind``, "amax" or "amin", over ``dims``, which are kept. Equal extremes share the gradient."""

    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, dims: tuple[int, ...], kind: str, *parts: Tensor
    ) -> Tensor:
        reduce = getattr(torch, kind)
        none = float("-inf" if kind == "amax" else "inf")
        own = [
            reduce(x, dims, keepdim=True) if x.numel() else x.new_full(_kept(x, dims), none)
            for x in parts
        ]
        found = [reduce(each, 0) for each in of_all(exchange, own)]
        ctx.exchange, ctx.dims = exchange, dims
        ctx.save_for_backward(*parts, *found)
        result: Tensor = found[0].clone()
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        exchange, local = ctx.exchange, ctx.exchange.local
        parts, found = ctx.saved_tensors[: len(local)], ctx.saved_tensors[len(local) :]
        total = exchange.sum_processes(gradient)
        equal = [x == extreme for x, extreme in zip(parts, found, strict=True)]
        counts = exchange.sum([each.sum(ctx.dims, keepdim=True) for each in equal])
        shares = [exchange.move(total, shard) / n for shard, n in zip(local, counts, strict=True)]
        return None, None, None, *(mask * each for mask, each in zip(equal, shares, strict=True))


class Variance(torch.autograd.Function):
    """The variance over ``dims``, which are kept, or its root. ``counts`` are the elements of all shards.

    It keeps its input and the means.
    """

    @staticmethod
    def forward(
        ctx: Any,
        exchange: Exchange,
        dims: tuple[int, ...],
        counts: Sequence[int],
        correction: float,
        is_std: bool,
        *parts: Tensor,
    ) -> Tensor:
        own = [
            _moments(x, dims, counts[shard]) for shard, x in zip(exchange.local, parts, strict=True)
        ]
        total, means, found = sum(counts), [], []
        for shard, each in zip(exchange.local, of_all(exchange, own), strict=True):
            with exchange.at(shard):
                mean, squares = moments_of_all(each, counts)
            means.append(mean)
            found.append(squares / max(total - correction, 0))
        result = found[0].sqrt() if is_std else found[0]
        ctx.exchange, ctx.degrees, ctx.is_std = exchange, max(total - correction, 0), is_std
        ctx.save_for_backward(*parts, *means, result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        *saved, result = ctx.saved_tensors
        local = ctx.exchange.local
        if ctx.is_std:
            gradient = (gradient / (2 * result)).masked_fill_(result == 0, 0)
        total = ctx.exchange.sum_processes(gradient) * (2 / ctx.degrees)
        found = [
            (x - mean) * ctx.exchange.move(total, shard)
            for shard, x, mean in zip(local, saved[: len(local)], saved[len(local) :], strict=True)
        ]
        return None, None, None, None, None, *found


def _kept(x: Tensor, dims: Sequence[int]) -> list[int]:
    return [1 if dim in dims else size for dim, size in enumerate(x.shape)]


def _moments(x: Tensor, dims: tuple[int, ...], count: int) -> Tensor:
    """Mean and sum of squared deviations of a part with ``count`` elements over ``dims``; zeros for none."""
    if not x.numel():
        return x.new_zeros(2, *_kept(x, dims))
    var, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    return torch.stack([mean, var * count])


def moments_of_all(each: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The mean and the sum of squared deviations of a whole, from those of its parts.

    ``each`` are those two of every part, (parts, 2, …), and ``counts`` their elements. The formula is that of
    Chan, Golub and LeVeque (1979), which loses no digits where the mean is large.
    """
    n = torch.tensor(counts, dtype=each.dtype, device=each.device)
    n = n.view(-1, *[1] * (each.dim() - 2))
    mean = (each[:, 0] * n).sum(0) / sum(counts)
    return mean, (each[:, 1] + n * (each[:, 0] - mean) ** 2).sum(0)


def of_all(exchange: Exchange, own: Sequence[Tensor]) -> list[Tensor]:
    """A tensor of each shard, stacked, for each local shard."""
    stacked = []
    for shard, each in zip(exchange.local, own, strict=True):
        everyone = each.new_zeros(exchange.shards, *each.shape)
        everyone[shard] = each
        stacked.append(everyone)
    return exchange.sum(stacked)
