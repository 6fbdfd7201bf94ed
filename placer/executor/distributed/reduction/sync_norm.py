"""Synchronized BatchNorm, which uses the statistics of all replicas' rows, also on CPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from placer.executor.distributed.messages.exchange import GroupExchange
from placer.space import Cuts, Layout
from placer.space.norms import Groups, Normalize, update_running


class _SyncBatchNorm(nn.SyncBatchNorm):
    """``nn.SyncBatchNorm`` as stages that are split in space compute it: replicas are like shards.

    torch's own does not train on a CPU. Replicas may have different numbers of rows.
    """

    process_group: dist.ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        own = GroupExchange(self.process_group, input.device, self.process_group)
        groups = Groups(Layout(Cuts((), ()), tuple(input.shape), ()), None)
        everyone, counts = own.of_batch_norms(groups.counts(len(input)) * own.shards)
        given = self.weight, self.bias, input
        with torch.autocast(input.device.type, enabled=False):
            mean, var, result = Normalize.apply(everyone, groups, counts, self.eps, *given)
        update_running(self, mean, var, sum(counts))
        return result  # type: ignore[no-any-return]


def synchronise_norms(part: nn.Module, group: dist.ProcessGroup) -> None:
    """Turn every BatchNorm layer of ``part`` into one that uses the statistics of all ranks of ``group``.

    The layers stay the same objects, with their tensors, names and hooks.
    """
    for module in part.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)):
            module.__class__ = _SyncBatchNorm
            module.process_group = group
