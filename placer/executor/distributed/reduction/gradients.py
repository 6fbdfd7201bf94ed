"""Sums gradients over the ranks that have the same parameter, in buckets, while backward runs.

Bucketing follows Li et al. 2020, arXiv:2006.15704, section 3.2; torch's ``all_reduce`` does the sums.

``DistributedDataParallel`` around each stage was tried with torch 2.15 and does not work here. A replica
whose last micro-batch has no rows sends nothing, and the others wait for it until they time out. Also,
weights that are tied over stages are summed over other ranks than the rest, but a DDP has one group.

``fully_shard`` on the stage modules was tried as well (two stages, two replicas, gloo). If it sums
instead of averaging (``set_gradient_divide_factor(1.0)``, as losses are weighted already), its gradients
equal the plain model's under GPipe and 1F1B, with uneven replicas and micro-batches without rows. Under
zero bubble they are wrong, without an error: it sums them when the gradient of the input arrives, before
the weights' half of the backward. (``set_manual_backward_finalization`` and ``finalize_backward()`` of
torch 2.15 mend that.) A replica without any rows takes no part in its all-gather, so the others wait for
it. A job with weights tied over stages failed (the reason is not known). And its parameters are shards
(``DTensor``), which our memory estimates, clipping and checkpoints do not support.

Gradients may also be divided over the ranks, which is the second stage of ZeRO (Rajbhandari et al. 2020,
arXiv:1910.02054). Then a bucket is sent after the backward of every micro-batch, and each rank keeps the sum
of its own pieces only::

    rank 0   grad[0:8]  ──┐                  ┌──►  sum[0:4]
    rank 1   grad[0:8]  ──┴──►  scattered  ──┴──►  sum[4:8]

A gradient is whole only until its bucket is sent; a bucket is sent when the one before it has arrived.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from placer._torch import gradient_hook_tables, storage_key
from placer.emit import StagedModel
from placer.executor.distributed.job.groups import sendable
from placer.executor.distributed.job.ownership import Ownership
from placer.executor.distributed.reduction.gradient_piece import GradientPiece
from placer.executor.distributed.reduction.summing import SummingGroup, padded
from placer.plan.step_spans import BUCKET_NBYTES
from placer.state_layout import piece_length

# A gradient of this size or more is summed in place. A copy into a bucket would take more time (new
# memory pages) than a separate message, and keep the gradient twice.
_ALONE_NBYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParameter:
    """A parameter, the group of ranks that have it, and the number of this rank's stages that read it.

    ``sharing`` are the ranks of the group between which its training state is divided, if it is, and
    ``across`` those that have the same piece of it, if there are others.
    ``holders`` are the devices of a replica that have it (several for a tied parameter), and ``name`` is
    the first of its names. These two define an order in which all ranks of a group agree.
    """

    parameter: nn.Parameter
    name: str
    group: SummingGroup
    sharing: SummingGroup
    across: SummingGroup | None
    holders: tuple[int, ...]
    readers: int


def find_shared_parameters(
    part: nn.Module,
    staged: StagedModel,
    ownership: Ownership,
    stage_indices: Sequence[int],
    group_of: Callable[[tuple[int, ...]], SummingGroup],
    sharing: Callable[[tuple[int, ...]], SummingGroup],
    across: SummingGroup | None,
) -> list[SharedParameter]:
    """The trained parameters of a rank's part.

    ``group_of`` returns the group of a set of devices, and ``sharing`` those that divide training state.
    """
    first_name = ownership.first_name
    read = [{first_name[name] for name in staged.stages[i].state} for i in stage_indices]
    found = []
    for name, parameter in part.named_parameters():
        if parameter.requires_grad:
            first = first_name[name]
            holders = ownership.holders[first]
            found.append(
                SharedParameter(
                    parameter=parameter,
                    name=first,
                    group=group_of(holders),
                    sharing=sharing(holders),
                    across=across,
                    holders=holders,
                    readers=max(sum(first in names for names in read), 1),
                )
            )
    return found


@dataclass(slots=True)
class _Bucket:
    """Gradients that are summed in one message.

    The last bucket of a group, which may have no gradients, ends with a number for each parameter of the
    group: the number of ranks that have its gradient.
    """

    members: list[SharedParameter]
    group: SummingGroup
    counted: Sequence[_Bucket] = ()  # in the last bucket of a group, all buckets of that group
    is_divided: bool = False  # sums are divided between the ranks that share state
    first: int = 0  # the number of the first member, counted over all buckets
    waiting: int = 0  # the number of members for whose gradients this waits until it is sent
    # For each member, whether this rank has had a gradient; when sums are there, whether any rank has.
    exists: list[bool] = field(default_factory=list)
    flat: Tensor | None = None
    wait: Callable[[], object] | None = None
    total: Tensor | None = None  # the sum of this rank's pieces so far, if it is divided

    @property
    def sizes(self) -> list[int]:
        """The number of elements of every gradient, or of its largest piece."""
        numels = [member.parameter.numel() for member in self.members]
        return [piece_length(n, self.sharing.size) for n in numels] if self.is_divided else numels

    @property
    def sharing(self) -> SummingGroup:
        """The ranks between which the state of its members is divided."""
        return self.members[0].sharing

    @property
    def is_tied(self) -> bool:
        """Do other stages of the replica have its members as well, if there are any?"""
        return any(len(member.holders) > 1 for member in self.members)


class _Scatter(NamedTuple):
    """Gradients of a bucket that are being summed and divided: ``wait`` until ``part`` has this rank's."""

    bucket: _Bucket
    part: Tensor
    wait: Callable[[], object]
    whole: Tensor  # is kept until then


class GradientReducer:
    """Sums ``.grad`` over each parameter's group, so that all ranks of the group have the same.

    Buckets are sent in a fixed order, each as soon as all its gradients are complete. The last one also
    counts on how many ranks each gradient exists; a gradient that exists on none stays None.

    If sums are ``divided``, each rank has a `GradientPiece` of each. Buckets are then sent in so many rounds,
    one for each micro-batch of a full batch, with what there is of their gradients; a rank with fewer
    micro-batches sends zeros at the end. Tied weights are sent in the last round: in an earlier one a stage
    would wait for another, which has its backward later.
    """

    def __init__(self, shared: Iterable[SharedParameter], *, divided: int | None = None) -> None:
        self._buckets = _fill_buckets(
            [s for s in shared if s.group.size > 1], divided=divided is not None
        )
        rounds = range(divided or 1)
        self._order = [
            bucket
            for number in rounds
            for bucket in self._buckets
            if number == rounds[-1] or _is_sent_in_rounds(bucket)
        ]
        places = [(member, bucket) for bucket in self._buckets for member in bucket.members]
        self._homes = [bucket for _, bucket in places]
        self._left: list[int] = []  # for each of these, how many gradients are still to come
        self._microbatches = 0
        self._next = 0
        self._scattering: list[_Scatter] = []
        # From earlier steps, by the number of the member
        self._before: dict[int, GradientPiece] = {}
        self.is_unsummed = False  # whether ``.grad`` has gradients that are still to be summed
        # The garbage collector does not see hooks of parameters, so they must not keep this alive.
        arrived = weakref.WeakMethod(self._arrived)
        self._hooks = [
            member.parameter.register_post_accumulate_grad_hook(partial(_tell, arrived, number))
            for number, (member, _) in enumerate(places)
        ]
        # The ids of the hooks by which this learns of gradients.
        self.hook_ids = frozenset(hook.id for hook in self._hooks)

    def hooked(self) -> str:
        """The name of a parameter with hooks of the user's on its gradient, or ""."""
        members = (member for bucket in self._buckets for member in bucket.members)
        tables = ((each.name, gradient_hook_tables(each.parameter)) for each in members)
        return next((n for n, both in tables if any(t.keys() - self.hook_ids for t in both)), "")

    def prepare(self, microbatches: int, *, sums: bool = True) -> None:
        """Prepare a step of ``microbatches`` backwards; unless it ``sums``, a later one sums its gradients.

        Divides gradients that are sums already by the number of ranks, so that they count once in the next.
        Pieces are put aside instead.
        """
        self._next, self._microbatches = 0, microbatches
        self._left = [0] * len(self._homes)
        self._scattering.clear()
        self._before = {}
        for bucket in self._buckets:
            bucket.exists, bucket.total = [False] * len(bucket.members), None
            self._await_round(bucket)
            share = 1 / bucket.group.size
            for number, member in enumerate(bucket.members, bucket.first):
                gradient = member.parameter.grad
                if isinstance(gradient, GradientPiece):
                    self._before[number], member.parameter.grad = gradient, None
                elif gradient is not None and not self.is_unsummed:
                    gradient.mul_(share)
        self.is_unsummed = not sums
        if not sums:
            self._left = []

    def _await_round(self, bucket: _Bucket) -> None:
        """Let ``bucket`` wait until every member has the gradients that are sent in its next message."""
        backwards = 1 if _is_sent_in_rounds(bucket) else self._microbatches
        bucket.waiting = 0
        for number, member in enumerate(bucket.members, bucket.first):
            self._left[number] += backwards * member.readers
            bucket.waiting += self._left[number] > 0

    def _arrived(self, number: int) -> None:
        if not self._left:
            return
        self._left[number] -= 1
        if self._left[number] == 0:
            self._homes[number].waiting -= 1
            while self._next < len(self._order) and self._order[self._next].waiting == 0:
                self._send()

    def _send(self) -> None:
        bucket = self._order[self._next]
        self._next += 1
        self._finish_scatters()
        there = [m.parameter.grad is not None for m in bucket.members]
        bucket.exists = [a or b for a, b in zip(bucket.exists, there, strict=True)]
        grads = [_flat_grad(m.parameter) for m in bucket.members]
        if bucket.is_divided:
            self._scatter(bucket, grads)
            return
        if bucket.counted:
            exists = [there for b in bucket.counted for there in b.exists]
            like = (bucket.members or bucket.counted[0].members)[0].parameter
            grads.append(torch.tensor(exists, dtype=like.dtype, device=like.device))
        bucket.flat = sendable(grads[0] if self._may_write(grads) else torch.cat(grads))
        del grads
        _drop_gradients(bucket)  # they are in the bucket now
        bucket.wait = bucket.group.start_sum(bucket.flat)

    def _scatter(self, bucket: _Bucket, grads: list[Tensor]) -> None:
        """Start to sum ``grads``, of which each rank gets its pieces, in the order of the ranks."""
        ranks = bucket.sharing.size
        rows = [
            padded(grad, ranks * length).view(ranks, length)
            for grad, length in zip(grads, bucket.sizes, strict=True)
        ]
        whole = sendable(rows[0] if self._may_write(rows) else torch.cat(rows, dim=1))
        del rows, grads[:]
        _drop_gradients(bucket)
        part = whole.new_empty(whole.shape[1])
        wait = bucket.sharing.start_scatter(whole.view(-1), part)
        self._scattering.append(_Scatter(bucket, part, wait, whole))
        if self._left:
            self._await_round(bucket)

    def _finish_scatters(self, *, tied: bool = False) -> None:
        """Wait for what is being scattered, but for ``tied`` weights only if that is said.

        To send these, another stage may have to get a gradient first that is computed here.
        """
        for scatter in [each for each in self._scattering if tied or not each.bucket.is_tied]:
            self._scattering.remove(scatter)
            scatter.wait()
            bucket = scatter.bucket
            bucket.total = scatter.part if bucket.total is None else bucket.total.add_(scatter.part)

    def _may_write(self, grads: Sequence[Tensor]) -> bool:
        """Is there just one gradient, which shares its memory with no other tensor?"""
        storage = grads[0].untyped_storage()
        if len(grads) > 1 or storage.nbytes() != grads[0].nbytes:
            return False
        flying = [bucket.flat for bucket in self._buckets if bucket.flat is not None]
        flying += [scatter.whole for scatter in self._scattering]
        return all(storage_key(flat) != storage_key(grads[0]) for flat in flying)

    def send_rest(self) -> None:
        """Send the remaining buckets, so that all ranks have sent the same, also one without rows."""
        self._left = []
        while self._next < len(self._order):
            self._send()

    def finish(self) -> None:
        """Send the remaining buckets, wait for all sums, and assign them to ``.grad``."""
        self.send_rest()
        self._finish_scatters(tied=True)
        for bucket in self._buckets:
            if bucket.total is not None and (across := bucket.members[0].across) is not None:
                bucket.wait = across.start_sum(bucket.total)
        for bucket in self._buckets:
            if bucket.wait is not None:
                bucket.wait()
            if bucket.counted:
                assert bucket.flat is not None
                there = iter(self._exist_anywhere(bucket.flat[sum(bucket.sizes) :]))
                for counted in bucket.counted:
                    counted.exists = [next(there) for _ in counted.members]
        for bucket in self._buckets:
            summed = bucket.total if bucket.is_divided else bucket.flat
            assert summed is not None
            pieces = summed[: sum(bucket.sizes)].split(bucket.sizes)
            for at, (piece, exists) in enumerate(zip(pieces, bucket.exists, strict=True)):
                self._assign(bucket, at, piece if exists else None)
            bucket.flat = bucket.wait = bucket.total = None

    def _assign(self, bucket: _Bucket, at: int, found: Tensor | None) -> None:
        """Give a member its sum, or its piece of it; ``found`` is None if there is no gradient."""
        member, before = bucket.members[at], self._before.pop(bucket.first + at, None)
        parameter = member.parameter
        if found is not None and not (bucket.is_divided and parameter.numel()):
            # The bucket itself becomes the gradients: nothing is copied back.
            parameter.grad = found.view_as(parameter)
            return
        if found is None:
            parameter.grad = before
            return
        gradient = GradientPiece(
            found, shape=parameter.shape, name=member.name, group=member.sharing
        )
        parameter.grad = gradient if before is None else before.add_(gradient)

    def _exist_anywhere(self, counts: Tensor) -> list[bool]:
        """Whether each gradient exists on any rank; the dry run, whose counts are fake, overrides this."""
        return [count != 0 for count in counts.tolist()]

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()


def _tell(
    arrived: Callable[[], Callable[[int], None] | None], number: int, _: nn.Parameter
) -> None:
    method = arrived()
    if method is not None:
        method(number)


def _flat_grad(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
    if parameter.grad.layout != torch.strided:
        parameter.grad = parameter.grad.to_dense()
    return parameter.grad.reshape(-1)


def _drop_gradients(bucket: _Bucket) -> None:
    for member in bucket.members:
        member.parameter.grad = None


def _is_sent_in_rounds(bucket: _Bucket) -> bool:
    """Is it sent after every micro-batch?"""
    return bucket.is_divided and not bucket.is_tied


def _fill_buckets(shared: Sequence[SharedParameter], *, divided: bool) -> list[_Bucket]:
    """The buckets of `bucketed`, the last of each group with the numbers of existing gradients.

    If sums are ``divided``, these numbers have a bucket to themselves, as every rank gets all of them.
    """
    buckets = []
    for members in bucketed(shared):
        is_divided = divided and members[0].sharing.size > 1
        is_divided &= any(member.parameter.numel() for member in members)
        buckets.append(_Bucket(members=members, group=members[0].group, is_divided=is_divided))
    for group in dict.fromkeys(bucket.group for bucket in buckets):
        counted = [bucket for bucket in buckets if bucket.group is group]
        last = counted[-1]
        if last.is_divided or last.members[0].parameter.nbytes >= _ALONE_NBYTES:
            last = _Bucket(members=[], group=group)
            buckets.append(last)
        last.counted = counted
    starts = itertools.accumulate((len(bucket.members) for bucket in buckets), initial=0)
    for bucket, first in zip(buckets, starts, strict=False):
        bucket.first = first
    return buckets


def bucketed(shared: Sequence[SharedParameter]) -> list[list[SharedParameter]]:
    """The parameters of each bucket, in about the order in which backward completes gradients.

    That is the last parameter first. Each bucket has parameters of one group, device and dtype. A large
    parameter has a bucket to itself. Tied parameters come last, because they wait for another stage.
    """
    tied = sorted((s for s in shared if len(s.holders) > 1), key=lambda s: (s.holders, s.name))
    alone = [s for s in reversed(shared) if len(s.holders) == 1]
    return [*_fill(alone), *_fill(tied)]


def _fill(ordered: Iterable[SharedParameter]) -> list[list[SharedParameter]]:
    buckets: list[list[SharedParameter]] = []
    filling: dict[tuple[Any, ...], list[SharedParameter]] = {}
    for entry in ordered:
        parameter = entry.parameter
        if parameter.nbytes >= _ALONE_NBYTES:
            buckets.append([entry])
            continue
        key = (entry.holders, parameter.dtype, parameter.device)
        members = filling.setdefault(key, [])
        members.append(entry)
        if sum(member.parameter.nbytes for member in members) >= BUCKET_NBYTES:
            buckets.append(filling.pop(key))
    return [*buckets, *filling.values()]
