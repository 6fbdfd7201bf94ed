"""Exchanges the statistics that norms collected on every replica, for deferred running statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from placer.executor.place import Place
from placer.executor.statistics import Moments, NormCall, join_moments, update_statistics


class SharedMoments:
    """Gathers the moments of all ranks of ``group`` on each of them, in one message.

    ``calls`` are the calls that the stages here make; they are known without running the stages, because
    a rank may have no rows. Of ``copies`` ranks in a row, the shards of a replica, all have the same. `wait`
    then makes the same update to the running statistics of ``part`` on all ranks. Raises ``ValueError`` if
    ``own`` has other calls. The message is in float64::

        count, momentum | count, momentum | … | mean, deviations per channel | …
    """

    def __init__(
        self,
        part: nn.Module,
        calls: Sequence[NormCall],
        own: Mapping[NormCall, Moments],
        *,
        group: dist.ProcessGroup,
        copies: int,
        place: Place,
    ) -> None:
        unknown = [call for call in own if call not in calls]
        if unknown:
            raise ValueError(
                f"{unknown[0].mean} is updated more often than with fake tensors, so that depends on "
                'the data; use "batch_norm": "per_microbatch", or run the spec in one process'
            )
        self._part, self._copies = part, copies
        self._calls = calls
        self._place = place
        self._widths = [part.get_buffer(call.mean).numel() for call in calls]
        heads = [(own[c].count, own[c].momentum) if c in own else (0, 0.0) for c in calls]
        message = torch.zeros(
            2 * (len(calls) + sum(self._widths)), dtype=torch.float64, device=place.device
        )
        head, *bodies = self._split(message)
        head.copy_(torch.tensor(heads, dtype=torch.float64))
        for call, body in zip(calls, bodies, strict=True):
            if call in own:
                body[0], body[1] = own[call].mean, own[call].deviations
        self._messages = [torch.empty_like(message) for _ in range(dist.get_world_size(group))]
        self._work = dist.all_gather(self._messages, message, group=group, async_op=True)

    def wait(self) -> None:
        """Wait for the message and update the running statistics."""
        assert self._work is not None  # this rank is in the group
        self._work.wait()
        replicas = [self._read(message) for message in self._messages[:: self._copies]]
        update_statistics(
            self._part,
            {c: join_moments(c, (found[c] for found in replicas)) for c in self._calls},
        )

    def _split(self, message: Tensor) -> list[Tensor]:
        """Views of its parts: one of shape (calls, 2), then one of shape (2, channels) for each call."""
        parts = message.split([2 * n for n in (len(self._calls), *self._widths)])
        return [parts[0].view(-1, 2), *(part.view(2, -1) for part in parts[1:])]

    def _read(self, message: Tensor) -> dict[NormCall, Moments]:
        head, *bodies = self._split(message)
        return {
            call: Moments(
                place=self._place,
                count=int(count),
                mean=mean,
                deviations=deviations,
                momentum=momentum,
            )
            for call, (count, momentum), (mean, deviations) in zip(
                self._calls, head.tolist(), bodies, strict=True
            )
        }
