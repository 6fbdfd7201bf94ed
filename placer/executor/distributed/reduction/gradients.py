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
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from placer._torch import storage_key
from placer.emit import StagedModel
from placer.executor.distributed.job.groups import sendable, wait_function
from placer.executor.distributed.job.ownership import Ownership
from placer.plan.step_spans import BUCKET_NBYTES

# A gradient of this size or more is summed in place. A copy into a bucket would take more time (new
# memory pages) than a separate message, and keep the gradient twice.
_ALONE_NBYTES = 2**20


class SummingGroup(Protocol):
    """A group of ranks that have the same parameters; it can sum tensors, and gather them."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def start_sum(self, tensor: Tensor) -> Callable[[], object]:
        """Start to sum ``tensor`` over the ranks, in place; call the returned function to wait for it."""

    @property
    def rank(self) -> int:
        """This rank's number in the group."""

    def start_gather(self, whole: Tensor, part: Tensor) -> Callable[[], object]:
        """Start to fill ``whole`` with every rank's ``part``, in order of rank; returns a function to wait.

        ``part`` may be this rank's part of ``whole``.
        """


class GroupSum:
    """Sums over the ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @property
    def size(self) -> int:
        return dist.get_world_size(self._group)

    def start_sum(self, tensor: Tensor) -> Callable[[], object]:
        return wait_function(dist.all_reduce(tensor, group=self._group, async_op=True))

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group)

    def start_gather(self, whole: Tensor, part: Tensor) -> Callable[[], object]:
        work = dist.all_gather_into_tensor(whole, part, group=self._group, async_op=True)
        return wait_function(work)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParameter:
    """A parameter, the group of ranks that have it, and the number of this rank's stages that read it.

    ``sharing`` are the ranks of the group between which its training state is divided, if it is.
    ``holders`` are the devices of a replica that have it (several for a tied parameter), and ``name`` is
    the first of its names. These two define an order in which all ranks of a group agree.
    """

    parameter: nn.Parameter
    name: str
    group: SummingGroup
    sharing: SummingGroup
    holders: tuple[int, ...]
    readers: int


def find_shared_parameters(
    part: nn.Module,
    staged: StagedModel,
    ownership: Ownership,
    stage_indices: Sequence[int],
    group_of: Callable[[tuple[int, ...]], SummingGroup],
    sharing: Callable[[tuple[int, ...]], SummingGroup],
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
    waiting: int = 0  # the number of members whose last gradient of this step is still to come
    # For each member, whether this rank has a gradient; when the sums are there, whether any rank has.
    exists: list[bool] = field(default_factory=list)
    flat: Tensor | None = None
    wait: Callable[[], object] | None = None

    @property
    def sizes(self) -> list[int]:
        """The number of elements of every gradient."""
        return [member.parameter.numel() for member in self.members]


class GradientReducer:
    """Sums ``.grad`` over each parameter's group, so that all ranks of the group have the same.

    Buckets are sent in a fixed order, each as soon as all its gradients are complete. The last one also
    counts on how many ranks each gradient exists; a gradient that exists on none stays None.
    """

    def __init__(self, shared: Iterable[SharedParameter]) -> None:
        self._buckets = _fill_buckets([s for s in shared if s.group.size > 1])
        places = [(member, bucket) for bucket in self._buckets for member in bucket.members]
        self._homes = [bucket for _, bucket in places]
        self._left: list[int] = []  # for each of these, how many gradients are still to come
        self._next = 0
        self.is_unsummed = False  # whether ``.grad`` has gradients that are still to be summed
        # The garbage collector does not see hooks of parameters, so they must not keep this alive.
        arrived = weakref.WeakMethod(self._arrived)
        self._hooks = [
            member.parameter.register_post_accumulate_grad_hook(partial(_tell, arrived, number))
            for number, (member, _) in enumerate(places)
        ]
        # The ids of the hooks by which this learns of gradients.
        self.hook_ids = frozenset(hook.id for hook in self._hooks)

    def prepare(self, microbatches: int, *, sums: bool = True) -> None:
        """Prepare a step of ``microbatches`` backwards; unless it ``sums``, a later one sums its gradients.

        Divides gradients that are sums already by the number of ranks, so that they count once in the next.
        """
        self._next = 0
        self._left = []
        for bucket in self._buckets:
            bucket.waiting = len(bucket.members)
            share = 1 / bucket.group.size
            for member in bucket.members:
                self._left.append(microbatches * member.readers)
                if member.parameter.grad is not None and not self.is_unsummed:
                    member.parameter.grad.mul_(share)
        self.is_unsummed = not sums
        if not sums:
            self._left = []

    def _arrived(self, number: int) -> None:
        if not self._left:
            return
        self._left[number] -= 1
        if self._left[number] == 0:
            self._homes[number].waiting -= 1
            while self._next < len(self._buckets) and self._buckets[self._next].waiting == 0:
                self._send()

    def _send(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.exists = [m.parameter.grad is not None for m in bucket.members]
        grads = [_flat_grad(m.parameter) for m in bucket.members]
        if bucket.counted:
            exists = [there for b in bucket.counted for there in b.exists]
            like = (bucket.members or bucket.counted[0].members)[0].parameter
            grads.append(torch.tensor(exists, dtype=like.dtype, device=like.device))
        bucket.flat = sendable(grads[0] if self._may_write(grads) else torch.cat(grads))
        del grads
        for member in bucket.members:  # free them, as they are in the bucket now
            member.parameter.grad = None
        bucket.wait = bucket.group.start_sum(bucket.flat)

    def _may_write(self, grads: Sequence[Tensor]) -> bool:
        """Whether there is just one gradient, which shares its memory with no other tensor."""
        storage = grads[0].untyped_storage()
        if len(grads) > 1 or storage.nbytes() != grads[0].nbytes:
            return False
        flying = (b.flat for b in self._buckets[: self._next - 1] if b.flat is not None)
        return all(storage_key(flat) != storage_key(grads[0]) for flat in flying)

    def send_rest(self) -> None:
        """Send the remaining buckets, so that all ranks have sent the same, also one without rows."""
        self._left = []
        while self._next < len(self._buckets):
            self._send()

    def finish(self) -> None:
        """Send the remaining buckets, wait for all sums, and assign them to ``.grad``."""
        self.send_rest()
        for bucket in self._buckets:
            assert bucket.flat is not None
            assert bucket.wait is not None
            bucket.wait()
            if bucket.counted:
                there = iter(self._exist_anywhere(bucket.flat[sum(bucket.sizes) :]))
                for counted in bucket.counted:
                    counted.exists = [next(there) for _ in counted.members]
        for bucket in self._buckets:
            assert bucket.flat is not None
            pieces = bucket.flat[: sum(bucket.sizes)].split(bucket.sizes)
            for member, piece, exists in zip(bucket.members, pieces, bucket.exists, strict=True):
                if exists:
                    # The bucket itself becomes the gradients: nothing is copied back.
                    member.parameter.grad = piece.view_as(member.parameter)
            bucket.flat = bucket.wait = None

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


def _fill_buckets(shared: Sequence[SharedParameter]) -> list[_Bucket]:
    """The buckets of `bucketed`, the last of each group with the numbers of existing gradients."""
    buckets = [_Bucket(members=members, group=members[0].group) for members in bucketed(shared)]
    for group in dict.fromkeys(bucket.group for bucket in buckets):
        counted = [bucket for bucket in buckets if bucket.group is group]
        last = counted[-1]
        if last.members[0].parameter.nbytes >= _ALONE_NBYTES:
            last = _Bucket(members=[], group=group)
            buckets.append(last)
        last.counted = counted
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
