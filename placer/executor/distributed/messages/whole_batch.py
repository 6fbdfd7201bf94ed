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
from placer.executor.distributed.job.groups import gather_objects, sendable
from placer.executor.execute import MicrobatchRun, PlacedMicrobatch
from placer.executor.place import Place
from placer.executor.scatter import join_target
from placer.executor.transfer import receive
from placer.program import is_mark, unmarked


@dataclass(frozen=True, slots=True)
class _Described:
    """The shape and dtype of a tensor that another rank sends."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstReplica:
    """The way to a rank of the first replica from those with the same stages in the others.

    ``ranks`` are those of all replicas in order, and belong to ``group``, which may have more. All of them
    make the same calls.
    """

    ranks: Sequence[int]
    group: dist.ProcessGroup
    device: torch.device

    @property
    def is_here(self) -> bool:
        """Is this the rank of the first replica?"""
        return dist.get_rank() == self.ranks[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` on the first, in order of replicas; nothing on the others.

        Values are lists and dicts of tensors and what can be pickled. Tensors of others come to ``device``,
        and require gradients if they did there.
        """
        described = tree_map_only(
            Tensor, lambda x: _Described(x.shape, x.dtype, x.requires_grad), value
        )
        if len(self.ranks) == 1:
            return [value]
        everyone = self._exchange(described)
        if not self.is_here:
            for tensor in tree_leaves(value):
                if isinstance(tensor, Tensor):
                    dist.send(sendable(tensor.to(self.device)), self.ranks[0], group=self.group)
            return []
        others = zip(self.ranks[1:], everyone[1:], strict=True)
        return [value, *(tree_map_only(_Described, self._receiver(r), v) for r, v in others)]

    def scatter(self, rows: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
        """What the first rank has for this one of ``rows``, which are given there, one for each rank."""
        if len(self.ranks) == 1:
            return []
        shapes = [[x if x is None else _Described(x.shape, x.dtype) for x in row] for row in rows]
        described = self._exchange(shapes)[0]
        if not self.is_here:
            receive = self._receiver(self.ranks[0])
            own = described[self.ranks.index(dist.get_rank())]
            return [None if x is None else receive(x) for x in own]
        for rank, row in zip(self.ranks[1:], rows[1:], strict=True):
            for tensor in row:
                if tensor is not None:
                    dist.send(sendable(tensor), rank, group=self.group)
        return []

    def _exchange(self, value: Any) -> list[Any]:
        of_group = dict(
            zip(
                dist.get_process_group_ranks(self.group),
                gather_objects(value, self.group),
                strict=True,
            )
        )
        return [of_group[rank] for rank in self.ranks]

    def _receiver(self, source: int) -> Any:
        def receive(given: _Described) -> Tensor:
            tensor = torch.empty(given.shape, dtype=given.dtype, device=self.device)
            dist.recv(tensor, source, group=self.group)
            return tensor.requires_grad_(given.requires_grad)

        return receive


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
