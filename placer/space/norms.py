"""Batch, instance and group normalisation with the statistics of the whole value.

The moments of parts are combined by the pairwise formula of Chan, Golub and LeVeque (Algorithms for Computing
the Sample Variance, The American Statistician 37(3), 1983): a mean of squares less the square of the mean
would lose digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from placer.space.exchange import Exchange
from placer.space.layout import Layout, sizes
from placer.space.once import once_differentiable
from placer.space.reductions import moments_of_all, of_all


@dataclass(frozen=True)
class Groups:
    """Which values of an input in ``layout`` are normalised together: per channel, or per row and group.

    ``number`` is None for batch norm, which has statistics per channel, over rows too.
    """

    layout: Layout
    number: int | None

    def counts(self, rows: int) -> list[int]:
        """How many values each shard has of one statistic."""
        channels = self.layout.shape[1]
        factor = rows if self.number is None else channels // self.number
        return [math.prod(sizes(box)[2:]) * factor for box in self.layout.boxes]

    def statistics(self, x: Tensor) -> int:
        """The number of statistics of ``x``."""
        return x.size(1) if self.number is None else x.size(0) * self.number

    def expand(
        self, x: Tensor, each: Sequence[Tensor | None], affine: Sequence[Tensor | None]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """A view of ``x`` for which ``batch_norm`` does the arithmetic per channel, and tensors for it.

        ``each`` have a value per statistic, ``affine`` one per channel.
        """
        if self.number is None:
            return x, [*each, *affine]
        rows, channels = x.shape[:2]
        repeated = [
            None if t is None else t.repeat_interleave(channels // self.number) for t in each
        ]
        tiled = [None if t is None else t.repeat(rows) for t in affine]
        return x.reshape(1, rows * channels, *x.shape[2:]), [*repeated, *tiled]


class Normalize(torch.autograd.Function):
    """Normalises the local parts; returns mean and variance of the whole, then the results.

    It keeps its input only. ``tensors`` are, for each local shard, weight, bias and input; ``counts`` are the
    values of one statistic that each shard of ``exchange`` has.
    """

    @staticmethod
    def forward(
        ctx: Any,
        exchange: Exchange,
        groups: Groups,
        counts: Sequence[int],
        eps: float,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        weights, biases, inputs = tensors[::3], tensors[1::3], tensors[2::3]
        moments = [_moments(x, groups) for x in inputs]
        kept, results = [], []
        total = float(sum(counts))
        for shard, each, weight, bias, x in zip(
            exchange.local, of_all(exchange, moments), weights, biases, inputs, strict=True
        ):
            with exchange.at(shard):
                mean, squares = moments_of_all(each, counts)
            var = squares / total
            affine = [None if t is None else t.to(mean.dtype) for t in (weight, bias)]
            view, (m, v, w, b) = groups.expand(x, (mean, var), affine)
            y = F.batch_norm(view, m, v, w, b, False, 0.0, eps) if x.numel() else view.clone()
            # No view: those of a function with several results must not be changed in place.
            results.append(y if y.shape == x.shape else torch.ops.aten._unsafe_view(y, x.shape))
            kept += [mean, var, weight, x]
        ctx.exchange, ctx.groups, ctx.eps, ctx.total = exchange, groups, eps, total
        ctx.biased = [bias is not None for bias in biases]
        ctx.save_for_backward(*kept)
        mean, var = kept[:2]
        ctx.mark_non_differentiable(mean, var)
        return mean, var, *results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _mean: Tensor, _var: Tensor, *gradients: Tensor) -> tuple[Any, ...]:
        exchange, groups, eps = ctx.exchange, ctx.groups, ctx.eps
        saved = ctx.saved_tensors
        rows = list(zip(saved[::4], saved[1::4], saved[2::4], saved[3::4], strict=True))
        sums, affine = [], []
        for (mean, var, weight, x), dy in zip(rows, gradients, strict=True):
            own, of_affine = _local_sums(groups, eps, mean, var, weight, x, dy)
            sums.append(own)
            affine.append(of_affine)
        found: list[Tensor | None] = []
        for (mean, var, weight, x), dy, total, of_affine, biased in zip(
            rows, gradients, exchange.sum(sums), affine, ctx.biased, strict=True
        ):
            inverse = (var + eps).rsqrt()
            of_x = -inverse * inverse * total[1] / ctx.total
            constant = -inverse * total[0] / ctx.total - of_x * mean
            view, (r, a, c, w) = groups.expand(x, (inverse, of_x, constant), (weight,))
            assert r is not None and a is not None and c is not None
            tail = [1, -1] + [1] * (view.dim() - 2)
            scale = (r if w is None else r * w).to(dy.dtype)
            dx = dy.contiguous().view(view.shape) * scale.view(tail)
            dx = dx.addcmul_(view.to(dx.dtype), a.to(dx.dtype).view(tail))
            dx = dx.add_(c.to(dx.dtype).view(tail)).view(x.shape)
            found += [
                None if weight is None else of_affine[1],
                of_affine[0] if biased else None,
                dx,
            ]
        return None, None, None, None, *found


def _local_sums(
    groups: Groups,
    eps: float,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    x: Tensor,
    dy: Tensor,
) -> tuple[Tensor, Tensor]:
    """The sums of dy and of dy * normalised x over a shard: per statistic, weighted, and per channel."""
    if not x.numel():
        none = mean.new_zeros(2, groups.statistics(x))
        return none, mean.new_zeros(2, x.size(1))
    view, (m, v, w) = groups.expand(x, (mean, var), (weight,))
    assert m is not None and v is not None
    # A CPU reads the statistics as running ones, CUDA as those that were saved.
    _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
        dy.contiguous().view(view.shape),
        view,
        torch.ones_like(m),
        m,
        v,
        m,
        (v + eps).rsqrt(),
        False,
        eps,
        [False, True, True],
    )
    own = torch.stack([of_bias, of_weight])
    affine = own if groups.number is None else own.view(2, x.size(0), -1).sum(1)
    own = own if w is None else own * w
    return (own if groups.number is None else own.view(2, groups.statistics(x), -1).sum(2)), affine


def _moments(x: Tensor, groups: Groups) -> Tensor:
    """Mean and sum of squared deviations of each statistic of a part; zeros for an empty one."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if not x.numel():
        return x.new_zeros(2, groups.statistics(x), dtype=wide)
    shape = x.shape[:2] if groups.number is None else (1, groups.statistics(x))
    view = x.reshape(*shape, -1)
    if view.dtype == wide and not isinstance(view, FakeTensor):
        # The kernel of batch norm: on a CPU, var_mean takes four times as long. It has no fake kernel.
        mean, var = torch.ops.aten.batch_norm_update_stats(view, None, None, 0.0)
    else:
        var, mean = torch.var_mean(view.to(wide), (0, 2), correction=0)
    return torch.stack([mean, var * (view.numel() // view.size(1))])


def update_running(module: nn.Module, mean: Tensor, var: Tensor, count: int) -> None:
    """Update the running statistics of a batch norm from those of the whole batch, as torch does."""
    norm: Any = module
    if norm.running_mean is None or not norm.training:
        return
    with torch.no_grad():
        norm.num_batches_tracked.add_(1)
        factor = norm.momentum
        if factor is None:
            factor = 1.0 / float(norm.num_batches_tracked)
        unbiased = var * (count / max(count - 1, 1))
        track(norm.running_mean, norm.running_var, mean, unbiased, factor, count)


def track(
    running_mean: Tensor,
    running_var: Tensor,
    mean: Tensor,
    var: Tensor,
    momentum: float,
    count: int,
) -> None:
    """Update running statistics by those of ``count`` values, as batch norm does.

    Modes for torch functions see the call, as they see one of ``batch_norm``.
    """
    given = running_mean, running_var, mean, var, momentum, count
    if has_torch_function((running_mean,)):
        handle_torch_function(track, (running_mean,), *given)
        return
    for buffer, value in ((running_mean, mean), (running_var, var)):
        buffer.lerp_(value.to(buffer.dtype), momentum)
