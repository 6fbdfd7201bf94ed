"""Between parts and whole values: cut, gather, copy to every shard, and sum over the cut dimensions.

A whole value exists once per process, on the device of its first shard, and so does its gradient, of which
each process has the part that comes from its own shards (`placer.space.exchange`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from placer.space.exchange import Exchange
from placer.space.layout import Layout, is_empty
from placer.space.once import once_differentiable
from placer.space.windowed import cut


class Cut(torch.autograd.Function):
    """The local parts of a whole value."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, layout: Layout, x: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.layout = exchange, layout
        return tuple(
            exchange.move(cut(x, layout.boxes[shard], layout.whole), shard)
            for shard in exchange.local
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, _assemble(ctx.exchange, ctx.layout, gradients, {})


class Gather(torch.autograd.Function):
    """The whole value of the local parts and those of other processes."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, layout: Layout, *parts: Tensor) -> Tensor:
        ctx.exchange, ctx.layout = exchange, layout
        return _gather(exchange, layout, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        exchange, layout = ctx.exchange, ctx.layout
        lead = exchange.local[0]
        boxes = layout.boxes
        others = [shard for shard in range(exchange.shards) if shard not in exchange.local]
        given = {
            (lead, shard): cut(gradient, boxes[shard], layout.whole).contiguous()
            for shard in others
            if not is_empty(boxes[shard])
        }
        wanted = {
            (other, shard): layout.shape_of(boxes[shard], gradient.shape)
            for other in exchange.leads
            for shard in exchange.local
            if other != lead and not is_empty(boxes[shard])
        }
        parts = {
            shard: exchange.move(cut(gradient, boxes[shard], layout.whole), shard)
            for shard in exchange.local
        }
        for (_, shard), piece in exchange.swap(given, wanted, gradient).items():
            parts[shard].add_(piece)
        return None, None, *parts.values()


class Spread(torch.autograd.Function):
    """A whole value on the device of each local shard."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, x: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return tuple(exchange.move(x, shard) for shard in exchange.local)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        lead = ctx.exchange.local[0]
        total = ctx.exchange.move(gradients[0], lead)
        for other in gradients[1:]:
            total.add_(ctx.exchange.move(other, lead))
        return None, total


class Total(torch.autograd.Function):
    """The sum of a tensor of each shard, once per process."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *parts: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.sum(parts)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        total = ctx.exchange.sum_processes(gradient)
        return None, *(ctx.exchange.move(total, shard) for shard in ctx.exchange.local)


def _gather(exchange: Exchange, layout: Layout, parts: tuple[Tensor, ...]) -> Tensor:
    lead, boxes = exchange.local[0], layout.boxes
    given = {
        (shard, other): part.contiguous()
        for shard, part in zip(exchange.local, parts, strict=True)
        for other in exchange.leads
        if other != lead and part.numel()
    }
    wanted = {
        (shard, lead): layout.shape_of(boxes[shard], parts[0].shape)
        for shard in range(exchange.shards)
        if shard not in exchange.local and not is_empty(boxes[shard])
    }
    return _assemble(exchange, layout, parts, exchange.swap(given, wanted, parts[0]))


def _assemble(
    exchange: Exchange,
    layout: Layout,
    parts: tuple[Tensor, ...],
    pieces: Mapping[tuple[int, int], Tensor],
) -> Tensor:
    """The whole value, on the lead; zeros where neither a local part nor a piece of another shard is."""
    lead = exchange.local[0]
    have = {*exchange.local, *(shard for shard, _ in pieces)}
    everything = all(is_empty(box) or shard in have for shard, box in enumerate(layout.boxes))
    shape = layout.shape_of(layout.whole, parts[0].shape)
    whole = parts[0].new_empty(shape) if everything else parts[0].new_zeros(shape)
    for shard, part in zip(exchange.local, parts, strict=True):
        box = layout.boxes[shard]
        if not is_empty(box):
            moved = part if shard == lead else exchange.move(part, lead)
            cut(whole, box, layout.whole).copy_(moved)
    for (shard, _), piece in pieces.items():
        cut(whole, layout.boxes[shard], layout.whole).copy_(piece)
    return whole
