"""Brings what all replicas have to the first one, for a loss over the whole batch, and gradients back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from placer.executor.distributed.failures.layer_failure import LayerFailure
from placer.executor.distributed.job.groups import sendable
from placer.executor.execute import MicrobatchRun, PlacedMicrobatch
from placer.executor.places.place import Place
from placer.executor.places.transfer import receive
from placer.executor.scatter import join_target
from placer.program import is_mark, unmarked


@dataclass(frozen=True, slots=True)
class _Described:
    """The shape and dtype of a tensor that another rank sends."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstReplica:
    """The way to a rank of the first replica, the first of ``group``, from those like it in the others.

    All of them make the same calls.
    """

    group: dist.ProcessGroup
    device: torch.device

    @property
    def is_here(self) -> bool:
        """Is this the rank of the first replica?"""
        return dist.get_rank(self.group) == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` on the first, in order of replicas; nothing on the others.

        Values are lists and dicts of tensors and what can be pickled. Tensors of others come to ``device``,
        and require gradients if they did there.
        """
        others: list[Any] | None = [None] * self.group.size() if self.is_here else None
        dist.gather_object(_described(value), others, group=self.group, group_dst=0)
        if others is None:
            self._send(value, 0)
            return []
        return [value, *(self._receive(other, rank) for rank, other in enumerate(others) if rank)]

    def scatter(self, rows: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
        """What the first rank has for this one of ``rows``, which are given there, one for each rank."""
        own: list[Any] = [None]
        described = [_described(list(row)) for row in rows] if self.is_here else None
        dist.scatter_object_list(own, described, group=self.group, group_src=0)
        for rank, row in enumerate(rows):
            if rank:
                self._send(list(row), rank)
        return [] if self.is_here else self._receive(own[0], 0)

    def _send(self, value: Any, rank: int) -> None:
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor):
                dist.send(
                    sendable(tensor.detach().to(self.device)), group=self.group, group_dst=rank
                )

    def _receive(self, described: Any, rank: int) -> Any:
        def tensor_like(given: _Described) -> Tensor:
            tensor = torch.empty(given.shape, dtype=given.dtype, device=self.device)
            dist.recv(tensor, group=self.group, group_src=rank)
            return tensor.requires_grad_(given.requires_grad)

        return tree_map_only(_Described, tensor_like, described)


def _described(value: Any) -> Any:
    return tree_map_only(Tensor, lambda x: _Described(x.shape, x.dtype, x.requires_grad), value)


def loss_over_replicas(
    first: FirstReplica,
    runs: Sequence[MicrobatchRun],
    sizes: Sequence[int],
    whole: PlacedMicrobatch,
    loss_of: Callable[[PlacedMicrobatch, list[list[Any]], Sequence[int]], Tensor],
    *,
    own_rows: bool,
) -> list[Tensor]:
    """The loss of the batch ``whole``, on the first replica; ``runs`` get the gradients of their results.

    ``runs`` are the micro-batches of this replica, with ``sizes`` rows, and have run forward. Each rank calls
    this with its own. With ``own_rows`` the target of ``whole`` is that of the replica's rows.
    ``loss_of(whole, results of all slices, their sizes)`` returns the loss, and runs its backward.
    """
    results = [run.result for run in runs]
    marked = tree_leaves(whole.target, is_leaf=is_mark) if own_rows else []
    target = [leaf.value if is_mark(leaf) else leaf for leaf in marked]
    if not first.is_here:
        first.gather([sizes, results, target])
        lengths = [len(run.result) for run in runs]
        for run in runs:
            run.result = []
        del results
        own = iter(first.scatter([]))
        for run, length in zip(runs, lengths, strict=True):
            for position, gradient in enumerate(itertools.islice(own, length)):
                if gradient is not None:
                    run.add_result_gradient(position, gradient)
        return []
    shares = first.gather([list(sizes), results, target])
    place = whole.replica.output_place
    results = [run.receive_result(place) for run in runs]
    gradients: list[list[Tensor | None]] = [[]]
    for _, of_replica, _ in shares[1:]:
        gradients.append([None] * sum(map(len, of_replica)))
        results += _cut(of_replica, gradients[-1], place)
    joined = (
        join_target(whole.target, [t for *_, t in shares]) if own_rows else unmarked(whole.target)
    )
    every = [size for each, *_ in shares for size in each]
    del shares
    try:
        loss = loss_of(replace(whole, target=joined), results, every)
    except Exception as error:
        raise LayerFailure(len(whole.replica.staged.stages) - 1, "", "loss_fn") from error
    first.scatter(gradients)
    return [loss]


def _cut(
    results: Sequence[Sequence[Any]], gradients: list[Tensor | None], place: Place
) -> list[list[Any]]:
    """Leaves of ``results`` of another replica, cut from any graph; their gradients go to ``gradients``."""
    positions = itertools.count()

    def cut(leaf: Any) -> Any:
        position = next(positions)
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return leaf
        return receive(leaf, place, place, partial(gradients.__setitem__, position))

    return [[cut(leaf) for leaf in slice_] for slice_ in results]
