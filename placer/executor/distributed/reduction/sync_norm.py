"""Synchronized BatchNorm, which uses the statistics of all replicas' rows, also on CPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class _SumOverRanks(torch.autograd.Function):
    """The sum over a group. Every rank's result depends on every value, so backward sums gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = value.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _sum_over_ranks(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _SumOverRanks.apply(value, group)  # type: ignore[no-any-return]


class _SyncBatchNorm(nn.SyncBatchNorm):
    """``nn.SyncBatchNorm`` for the CPU, which torch's own does not support in training.

    Computes the mean and then the variance, in two passes for precision; each is a sum over the group.
    Replicas may have different numbers of rows.
    """

    process_group: dist.ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        axes = [axis for axis in range(input.dim()) if axis != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        count = torch.tensor([float(input.numel() // input.size(1))], dtype=input.dtype)
        dist.all_reduce(count, group=self.process_group)
        total = float(count.item())
        mean = _sum_over_ranks(input.sum(axes), self.process_group) / total
        centered = input - mean.view(shape)
        var = _sum_over_ranks(centered.square().sum(axes), self.process_group) / total
        if self.running_mean is not None and self.running_var is not None:
            self._track(mean.detach(), var.detach() * (total / max(total - 1, 1)))
        result: Tensor = centered * (var + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result

    def _track(self, mean: Tensor, var: Tensor) -> None:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        assert self.running_mean is not None
        assert self.running_var is not None
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(var.to(self.running_var.dtype), share)


def synchronise_norms(part: nn.Module, group: dist.ProcessGroup) -> None:
    """Turn every BatchNorm layer of ``part`` into one that uses the statistics of all ranks of ``group``.

    The layers stay the same objects, with their tensors, names and hooks.
    """
    for module in part.modules():
        if isinstance(module, (*_KINDS, nn.SyncBatchNorm)):
            on_cpu = all(t.device.type == "cpu" for t in (*module.parameters(), *module.buffers()))
            module.__class__ = _SyncBatchNorm if on_cpu else nn.SyncBatchNorm
            module.process_group = group
