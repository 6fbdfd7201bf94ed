"""What the ranks tell each other at the end of a step, while the last gradients are on their way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class LossSum:
    """The loss of the whole batch on its way to every rank; it is computed where the last stages are."""

    def __init__(
        self,
        losses: Sequence[Tensor],
        *,
        world: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        # The loss, and per data type how many ranks have theirs in it.
        self._message = torch.zeros(1 + len(_DTYPES), dtype=torch.float64, device=device)
        if losses:
            loss = torch.stack(list(losses)).sum()
            self._message[0] = loss
            self._message[1 + _DTYPES.index(loss.dtype)] = 1
        self._work = dist.all_reduce(self._message, group=world, async_op=True)

    def wait(self) -> Tensor:
        """The sum, in the data type that most ranks have."""
        self._work.wait()
        _, *counts = self._message.tolist()
        return self._message[0].to(_DTYPES[counts.index(max(counts))])


class SharedBuffers:
    """Values that the first rank of ``group`` gives to all of it, in a message per data type."""

    def __init__(self, buffers: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self._receives = dist.get_rank(group) > 0
        by_kind: dict[torch.dtype, list[Tensor]] = {}
        for buffer in buffers:
            by_kind.setdefault(buffer.dtype, []).append(buffer)
        source = dist.get_global_rank(group, 0)
        self._messages = []
        for alike in by_kind.values():
            flat = torch.cat([b.reshape(-1) for b in alike])
            work = dist.broadcast(flat, source, group=group, async_op=True)
            assert work is not None  # this rank is in the group
            self._messages.append((alike, flat, work))

    def wait(self) -> None:
        """Put the values into the buffers."""
        for alike, flat, work in self._messages:
            work.wait()
            if self._receives:
                for buffer, piece in zip(
                    alike, flat.split([b.numel() for b in alike]), strict=True
                ):
                    buffer.copy_(piece.view_as(buffer))
