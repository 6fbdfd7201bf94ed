"""The gradients of a rank's parameters: summed over ranks in a step, accumulated over steps, clipped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from placer.emit import StagedModel
from placer.errors import PlacerError
from placer.executor.distributed.checks import refuse_unsummed_steps
from placer.executor.distributed.connection import Connection
from placer.executor.distributed.job.assignment import RankAssignment
from placer.executor.distributed.job.ownership import Ownership
from placer.executor.distributed.reduction.gradient_piece import GradientPiece
from placer.executor.distributed.reduction.gradients import (
    GradientReducer,
    find_shared_parameters,
)
from placer.executor.distributed.reduction.pieces import Pieces
from placer.executor.distributed.reduction.summing import GroupSum
from placer.plan.types import Plan


class RankGradients:
    """Sums, accumulates and clips the gradients of ``part``, the parameters that this rank has.

    The reducer, and the pieces that optimizers update, are for the parameters that are trained. Both are
    made anew when these change.
    """

    def __init__(
        self,
        part: nn.Module,
        *,
        plan: Plan,
        staged: StagedModel,
        ownership: Ownership,
        assignment: RankAssignment,
        connection: Connection,
    ) -> None:
        self._part, self._plan, self._staged = part, plan, staged
        self._ownership, self._assignment = ownership, assignment
        self._connection = connection
        self._reducer: GradientReducer | None = None
        self._pieces = Pieces([])
        self._trained: tuple[int, ...] = ()  # ids of the parameters that these are for
        self.are_accumulated = False  # in `accumulating`: steps do not sum over replicas

    @property
    def _are_divided(self) -> bool:
        return self._plan.shard_state == "gradients"

    @property
    def pieces(self) -> Pieces:
        """The pieces of parameters that optimizers update here; none unless their state is sharded."""
        if self._plan.shard_state != "none":
            parameters = self._part.parameters()
            self.reducer(tuple(id(p) for p in parameters if p.requires_grad))
        return self._pieces

    def require_whole(self) -> None:
        """`Pieces.require_whole`, for the parameters of the last step."""
        self._pieces.require_whole()

    def reducer(self, trained: tuple[int, ...]) -> GradientReducer:
        """The reducer for the parameters with these ids."""
        if self._reducer is None or trained != self._trained:
            self.require_whole()
            if self._reducer is not None:
                self._reducer.close()
            groups = self._connection.groups
            shared = find_shared_parameters(
                self._part,
                self._staged,
                self._ownership,
                self._assignment.stage_indices,
                cache(lambda devices: GroupSum(groups.of_holders(devices))),
                cache(lambda devices: GroupSum(groups.sharing[devices])),
                None if groups.across is None else GroupSum(groups.across),
            )
            before = self._reducer
            # Divided gradients are summed after every micro-batch.
            rounds = self._plan.microbatches if self._are_divided else None
            self._reducer = GradientReducer(shared, divided=rounds)
            self._reducer.is_unsummed = before is not None and before.is_unsummed
            if self._plan.shard_state != "none":
                self._pieces = Pieces(shared)
            self._connection.before_closing = self._reducer.close
            self._trained = trained
        return self._reducer

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """In this block, steps add to this rank's gradients and do not sum them over replicas."""
        refuse_unsummed_steps(self._part, self.require_sums)
        # Divided gradients cannot wait for their sum: no rank has room for whole ones.
        self.are_accumulated = not self._are_divided
        try:
            yield
        finally:
            self.are_accumulated = False

    def refuse_hooks(self, trained: tuple[int, ...]) -> None:
        """Raise ``PlacerError`` if a step's gradients have hooks, but will be summed over ranks later."""
        reducer = self.reducer(trained)
        later = self.are_accumulated or reducer.is_unsummed
        if later and (name := reducer.hooked()):
            raise PlacerError(
                name,
                "has a hook on its gradient, which is not summed over ranks in every step",
                "call placed.step outside of placed.accumulate(), or remove the hook",
            )

    def require_sums(self, what: str) -> None:
        """Raise ``PlacerError`` for the call ``what`` if gradients are not summed over replicas yet."""
        if self._reducer is not None and self._reducer.is_unsummed:
            raise PlacerError(
                what,
                "gradients of steps in placed.accumulate() are not summed over replicas yet",
                "call the last placed.step before it outside of placed.accumulate()",
            )

    def clip(self, max_norm: float, norm_type: float, device: torch.device) -> Tensor:
        """Clip the gradients of all ranks by their total norm, which is returned; a collective call."""
        largest = norm_type == float("inf")
        norm = torch.zeros((), dtype=torch.float64, device=device)
        for copies, found in self._counted_here().items():
            part = nn.utils.get_total_norm(found, norm_type).to(norm)
            norm = torch.maximum(norm, part) if largest else norm + part**norm_type / copies
        groups = self._connection.groups
        with self._connection.watch():
            op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            dist.all_reduce(norm, op, group=groups.world if self._are_divided else groups.pp)
        total: Tensor = norm if largest else norm ** (1 / norm_type)
        nn.utils.clip_grads_with_norm_(self._part.parameters(), max_norm, total)
        return total

    def _counted_here(self) -> Mapping[float, Sequence[Tensor]]:
        """The gradients that this rank counts, or its pieces of them, by how many ranks count the same.

        Whole ones are counted by their first stage in each replica, pieces by every rank that has them.
        """
        replicas, index = self._plan.replicas * self._plan.shards, self._assignment.device_index
        found = defaultdict[float, list[Tensor]](list)
        for name, parameter in self._part.named_parameters():
            first, gradient = self._ownership.first_name[name], parameter.grad
            holders = self._ownership.holders[first]
            if isinstance(gradient, GradientPiece):
                if gradient.piece.numel():
                    found[replicas * len(holders) / gradient.group.size].append(gradient.piece)
            elif gradient is not None and holders[0] == index:
                found[replicas if self._are_divided else 1].append(gradient)
        return found
