"""Sends the loss of a step, and what forward wrote, to all ranks while the last gradients are summed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from placer.errors import PlacerError
from placer.executor.loss import StepLoss, without_graph

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class LossReduction:
    """Sends the loss of the whole batch from the ranks of the last stages to all ranks.

    ``source`` is the rank that has all ``losses``, if there is only one replica. The message also says
    whether losses lack a graph, by which rule they were combined, and what was counted in the slices.
    """

    def __init__(
        self,
        losses: Sequence[Tensor],
        *,
        loss_of: StepLoss,
        source: int | None,
        world: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        # The loss and the count of all slices. Then numbers of ranks: whose losses lack a graph, that have
        # slices, that combine by a mean, by a sum, and whose loss has each of the dtypes.
        self._said = [0.0] * (6 + len(_DTYPES))
        if losses:
            loss = torch.stack(list(losses)).sum()
            self._said = [
                0.0,  # the loss itself stays on its device
                loss_of.counts,
                loss_of.lacks_graph,
                loss_of.is_sliced,
                loss_of.combination == "mean",
                loss_of.combination == "sum",
                *(dtype == loss.dtype for dtype in _DTYPES),
            ]
        self._message = torch.tensor(self._said, dtype=torch.float64, device=device)
        if losses:
            self._message[0] = loss
        work: dist.Work | None
        if source is None:
            work = dist.all_reduce(self._message, group=world, async_op=True)
        else:
            work = dist.broadcast(self._message, source, group=world, async_op=True)
        assert work is not None  # this rank is in the group
        self._work = work
        self._loss_of = loss_of

    def wait(self) -> Tensor:
        """The loss of the whole batch, in the dtype that most ranks have."""
        self._work.wait()
        self._said = self._message.tolist()
        dtypes = self._said[6:]
        return self._message[0].to(_DTYPES[dtypes.index(max(dtypes))])

    def check(self) -> None:
        """Raise the same ``PlacerError`` on every rank if the losses of any rank are wrong; after `wait`."""
        _, counts, without, is_sliced, means, sums, *_ = self._said
        if without:
            raise without_graph()
        if is_sliced:
            self._loss_of.require_count(counts)
        if means and sums:
            raise PlacerError(
                "loss_fn",
                "is a mean over rows on some ranks and a sum on others",
                "say which with step(..., reduction=...)",
            )


class SharedTensors:
    """Sends the values of tensors from the first rank of ``group`` to the others, in one message."""

    def __init__(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        # The largest dtypes first, so that each tensor is aligned for its dtype.
        ordered = sorted(tensors, key=Tensor.element_size, reverse=True)
        self._tensors = [tensor.detach() for tensor in ordered]
        self._work = None
        if tensors:
            self._receives = dist.get_rank(group) > 0
            self._bytes = torch.cat([t.reshape(-1).view(torch.uint8) for t in self._tensors])
            source = dist.get_global_rank(group, 0)
            self._work = dist.broadcast(self._bytes, source, group=group, async_op=True)

    def wait(self) -> None:
        """Wait for the message and copy the values into the tensors."""
        if self._work is None:
            return
        self._work.wait()
        if self._receives:
            pieces = self._bytes.split([t.nbytes for t in self._tensors])
            for tensor, piece in zip(self._tensors, pieces, strict=True):
                tensor.copy_(piece.view(tensor.dtype).view_as(tensor))
