"""What the ranks tell each other at the end of a step, while the last gradients are on their way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class LossSum:
    """The loss of the whole batch on its way to every rank; it is computed where the last stages are.

    ``source`` is the rank that alone has all ``losses``, where there is but one last stage. Whether any
    rank has its own ``without_graph`` goes with it.
    """

    def __init__(
        self,
        losses: Sequence[Tensor],
        *,
        without_graph: bool,
        source: int | None,
        world: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        # The loss, how many ranks have it without a graph, and how many in each data type.
        self._message = torch.zeros(2 + len(_DTYPES), dtype=torch.float64, device=device)
        if losses:
            loss = torch.stack(list(losses)).sum()
            self._message[0] = loss
            self._message[1] = without_graph
            self._message[2 + _DTYPES.index(loss.dtype)] = 1
        work: dist.Work | None
        if source is None:
            work = dist.all_reduce(self._message, group=world, async_op=True)
        else:
            work = dist.broadcast(self._message, source, group=world, async_op=True)
        assert work is not None  # this rank is in the group
        self._work = work
        self.without_graph = False  # of any rank; not known before `wait`

    def wait(self) -> Tensor:
        """The sum, in the data type that most ranks have."""
        self._work.wait()
        _, without_graph, *counts = self._message.tolist()
        self.without_graph = without_graph > 0
        return self._message[0].to(_DTYPES[counts.index(max(counts))])


class SharedBuffers:
    """Values that the first rank of ``group`` gives to all of it, as bytes of one message."""

    def __init__(self, buffers: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self._receives = dist.get_rank(group) > 0
        # The largest data types first, so that each lies where its type may.
        self._buffers = sorted(buffers, key=Tensor.element_size, reverse=True)
        self._work = None
        if buffers:
            self._bytes = torch.cat([b.reshape(-1).view(torch.uint8) for b in self._buffers])
            source = dist.get_global_rank(group, 0)
            self._work = dist.broadcast(self._bytes, source, group=group, async_op=True)

    def wait(self) -> None:
        """Put the values into the buffers."""
        if self._work is None:
            return
        self._work.wait()
        if self._receives:
            pieces = self._bytes.split([b.nbytes for b in self._buffers])
            for buffer, piece in zip(self._buffers, pieces, strict=True):
                buffer.copy_(piece.view(buffer.dtype).view_as(buffer))
