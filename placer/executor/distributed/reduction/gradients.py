"""Gradients summed over the ranks that hold the same parameter, in buckets, while backward runs.

The buckets are ours (Li et al. 2020, arXiv:2006.15704, section 3.2), the sums torch's.
``DistributedDataParallel`` around each stage was tried with torch 2.15 and does not do: a replica whose
last micro-batch has no rows sends nothing, and the others wait for it until they time out; and weights
that are tied over stages are summed over other ranks than the rest, where one DDP has one group.

``fully_shard`` on the stage modules was tried as well (two stages, two replicas, gloo): gradients
equal the plain model's under GPipe, 1F1B and zero bubble, with uneven replicas and micro-batches
without rows, when it sums (``set_gradient_divide_factor(1.0)``; losses are weighted here already).
A replica without any rows takes no part in its all-gather, and the others wait for it; a job with
weights tied over stages broke off (not looked into). Its parameters are shards (``DTensor``), which
estimates of memory, clipping and checkpoints here do not know. Not offered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from placer._torch import storage_key
from placer.emit import StagedModel
from placer.executor.distributed.job.groups import wait_of
from placer.executor.distributed.job.ownership import Ownership

_BUCKET_NBYTES = 25 * 2**20  # DistributedDataParallel's default
# From this size on a gradient is summed where it is: a copy into a bucket would cost more time (new
# pages) than a message of its own, and hold it twice.
_ALONE_NBYTES = 2**20


class Summing(Protocol):
    """Ranks that sum tensors."""

    @property
    def size(self) -> int:
        """How many ranks."""

    def start_sum(self, tensor: Tensor) -> Callable[[], object]:
        """Start to sum ``tensor`` over the ranks, in place; it is done when the answer has been called."""


class GroupSum:
    """The ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @property
    def size(self) -> int:
        return dist.get_world_size(self._group)

    def start_sum(self, tensor: Tensor) -> Callable[[], object]:
        return wait_of(dist.all_reduce(tensor, group=self._group, async_op=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A parameter, the ranks that hold it too, and how many of this rank's stages read it.

    ``holders`` are the devices of a replica that hold it (several for a tied parameter), ``name``
    is the first of its names: together the order that all ranks of the group agree on.
    """

    parameter: nn.Parameter
    name: str
    group: Summing
    holders: tuple[int, ...]
    readers: int


def find_shared(
    part: nn.Module,
    staged: StagedModel,
    ownership: Ownership,
    stage_indices: Sequence[int],
    group_of: Callable[[tuple[int, ...]], Summing],
) -> list[Shared]:
    """The trained parameters of a rank's part; ``group_of`` gives the ranks of a set of devices."""
    first_name = ownership.first_name
    read = [{first_name[name] for name in staged.stages[i].state} for i in stage_indices]
    found = []
    for name, parameter in part.named_parameters():
        if parameter.requires_grad:
            first = first_name[name]
            holders = ownership.holders[first]
            found.append(
                Shared(
                    parameter=parameter,
                    name=first,
                    group=group_of(holders),
                    holders=holders,
                    readers=max(sum(first in names for names in read), 1),
                )
            )
    return found


@dataclass(slots=True)
class _Bucket:
    """Gradients that are summed in one message.

    The last bucket of a group has at its end a number for each of the group's parameters: how many
    ranks have its gradient. It may have no gradients itself.
    """

    members: list[Shared]
    group: Summing
    counted: Sequence[_Bucket] = ()  # of the last bucket: all of the group's
    waiting: int = 0  # members whose last gradient of this step has not come
    exists: list[bool] = field(default_factory=list)  # per member: has this rank a gradient?
    flat: Tensor | None = None
    wait: Callable[[], object] | None = None

    @property
    def sizes(self) -> list[int]:
        """Elements of every gradient."""
        return [member.parameter.numel() for member in self.members]


class GradientReducer:
    """Sums ``.grad`` over each parameter's group; every rank of a group ends with the same.

    Buckets are sent in one fixed order, a bucket as soon as all its gradients are there. With the
    last one ranks tell each other which of them exist, so that one that exists nowhere stays None.
    """

    def __init__(self, shared: Iterable[Shared]) -> None:
        self._buckets = _fill_buckets([s for s in shared if s.group.size > 1])
        self._home = {s.parameter: bucket for bucket in self._buckets for s in bucket.members}
        self._left: dict[nn.Parameter, int] = {}
        self._next = 0
        # A parameter's hooks are out of the garbage collector's sight: they must not hold this.
        arrived = weakref.WeakMethod(self._arrived)

        def tell(parameter: nn.Parameter) -> None:
            method = arrived()
            if method is not None:
                method(parameter)

        self._hooks = [p.register_post_accumulate_grad_hook(tell) for p in self._home]

    def prepare(self, microbatches: int) -> None:
        """Before a step of ``microbatches`` backwards: gradients that are there already count once."""
        self._next = 0
        self._left = {}
        for bucket in self._buckets:
            bucket.waiting = len(bucket.members)
            share = 1 / bucket.group.size
            for member in bucket.members:
                self._left[member.parameter] = microbatches * member.readers
                if member.parameter.grad is not None:
                    member.parameter.grad.mul_(share)

    def _arrived(self, parameter: nn.Parameter) -> None:
        if parameter not in self._left:
            return
        self._left[parameter] -= 1
        if self._left[parameter] == 0:
            self._home[parameter].waiting -= 1
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
        bucket.flat = grads[0] if self._may_write(grads) else torch.cat(grads)
        del grads
        for member in bucket.members:  # they are in the bucket now: not held twice
            member.parameter.grad = None
        bucket.wait = bucket.group.start_sum(bucket.flat)

    def _may_write(self, grads: Sequence[Tensor]) -> bool:
        """Is there but one gradient, and its memory not a part of another's?"""
        storage = grads[0].untyped_storage()
        if len(grads) > 1 or storage.nbytes() != grads[0].nbytes:
            return False
        flying = (b.flat for b in self._buckets[: self._next - 1] if b.flat is not None)
        return all(storage_key(flat) != storage_key(grads[0]) for flat in flying)

    def send_rest(self) -> None:
        """Send what is left: after this all ranks of a group have sent the same, with rows or without."""
        self._left = {}
        while self._next < len(self._buckets):
            self._send()

    def finish(self) -> None:
        """Send what is left, wait for all, and put the sums into ``.grad``."""
        self.send_rest()
        exists: dict[nn.Parameter, bool] = {}
        for bucket in self._buckets:
            assert bucket.flat is not None
            assert bucket.wait is not None
            bucket.wait()
            if bucket.counted:
                counts = bucket.flat[sum(bucket.sizes) :]
                parameters = [m.parameter for b in bucket.counted for m in b.members]
                exists.update(zip(parameters, self._positive(counts), strict=True))
        for bucket in self._buckets:
            assert bucket.flat is not None
            pieces = bucket.flat[: sum(bucket.sizes)].split(bucket.sizes)
            for member, piece in zip(bucket.members, pieces, strict=True):
                if exists[member.parameter]:
                    # The bucket itself becomes the gradients: nothing is copied back.
                    member.parameter.grad = piece.view_as(member.parameter)
            bucket.flat = bucket.wait = None

    def _positive(self, counts: Tensor) -> list[bool]:
        return [count != 0 for count in counts.tolist()]

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()


def _flat_grad(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
    if parameter.grad.layout != torch.strided:
        parameter.grad = parameter.grad.to_dense()
    return parameter.grad.reshape(-1)


def _fill_buckets(shared: Sequence[Shared]) -> list[_Bucket]:
    """Buckets of one group, device and dtype each, from the last parameter to the first.

    That is about the order in which gradients come. Large ones are alone; tied parameters come last,
    for they wait for another stage.
    """
    tied = sorted((s for s in shared if len(s.holders) > 1), key=lambda s: (s.holders, s.name))
    alone = [s for s in reversed(shared) if len(s.holders) == 1]
    buckets = [*_fill(alone), *_fill(tied)]
    for group in dict.fromkeys(bucket.group for bucket in buckets):
        counted = [bucket for bucket in buckets if bucket.group is group]
        last = counted[-1]
        if last.members[0].parameter.nbytes >= _ALONE_NBYTES:
            last = _Bucket(members=[], group=group)
            buckets.append(last)
        last.counted = counted
    return buckets


def _fill(ordered: Iterable[Shared]) -> list[_Bucket]:
    buckets: list[_Bucket] = []
    filling: dict[tuple[Any, ...], _Bucket] = {}
    for entry in ordered:
        parameter = entry.parameter
        if parameter.nbytes >= _ALONE_NBYTES:
            buckets.append(_Bucket(members=[entry], group=entry.group))
            continue
        key = (entry.holders, parameter.dtype, parameter.device)
        bucket = filling.setdefault(key, _Bucket(members=[], group=entry.group))
        bucket.members.append(entry)
        if sum(member.parameter.nbytes for member in bucket.members) >= _BUCKET_NBYTES:
            buckets.append(filling.pop(key))
    return [*buckets, *filling.values()]
