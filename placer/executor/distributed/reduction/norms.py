"""Statistics of norms over all replicas: joined after a step, or used in it (synchronized BatchNorm)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from placer._torch import all_gather_single
from placer.executor.distributed.job.groups import gather_objects
from placer.executor.distributed.messages.exchange import GroupExchange
from placer.executor.places.place import Place
from placer.executor.stages.statistics import Moments, NormCall, join_moments
from placer.space import Cuts, Layout
from placer.space.norms import Groups, Normalize, update_running


def moments_of_replicas(
    own: Mapping[NormCall, Moments], *, group: dist.ProcessGroup, copies: int, place: Place
) -> dict[NormCall, Moments]:
    """The moments of all replicas' rows, on ``place``, from this rank's ``own``; a collective call.

    Ranks may have different calls, or none, so they first tell each other which. The moments follow in one
    float64 message, mean and deviations call after call. Of ``copies`` ranks in a row of ``group``, the
    shards of a replica, all have the same.
    """
    mine = [(call, x.count, x.momentum, x.mean.numel()) for call, x in own.items()]
    calls_of = gather_objects(mine, group)
    sizes = [sum(2 * width for *_, width in calls) for calls in calls_of]
    if not any(sizes):
        return {}
    message = torch.zeros(max(sizes), dtype=torch.float64, device=place.device)
    if own:
        values = torch.cat([value for x in own.values() for value in (x.mean, x.deviations)])
        message[: len(values)] = values
    messages = message.new_empty(len(calls_of), len(message))
    all_gather_single(messages.view(-1), message, group)
    found: dict[NormCall, list[Moments]] = {}
    for calls, size, sent in list(zip(calls_of, sizes, messages, strict=True))[::copies]:
        parts = sent[:size].split([width for *_, width in calls for _ in range(2)])
        for (call, count, momentum, _), mean, deviations in zip(
            calls, parts[::2], parts[1::2], strict=True
        ):
            moments = Moments(
                place=place, count=count, mean=mean, deviations=deviations, momentum=momentum
            )
            found.setdefault(call, []).append(moments)
    return {call: join_moments(call, each) for call, each in found.items()}


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
