"""Divides a batch among the ranks of a job, and gathers the results on all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from placer.emit import StagedModel
from placer.errors import PlacerError
from placer.executor.boxes import check_boxes
from placer.executor.calls.call_cache import Call
from placer.executor.calls.state import CallState
from placer.executor.distributed.job.assignment import RankAssignment
from placer.executor.distributed.job.groups import sendable
from placer.executor.distributed.messages.crossings import CrossingFinder, Crossings, TensorSpec
from placer.executor.distributed.messages.pipeline import Pipeline, Results
from placer.executor.execute import PlacedMicrobatch
from placer.executor.places.place import is_on
from placer.executor.scatter import (
    ScatteredBatch,
    batch_size,
    join_results,
    scatter_batch,
    split_rows,
    split_target,
)
from placer.plan.types import Plan
from placer.program import CallFormat
from placer.schedule import split_batch


def count_rows(rows: Sequence[int], *, own_rows: bool, replicas: int, together: bool) -> int | None:
    """The rows of the whole batch, if each replica was given ``rows``; None for a call without a batch.

    Raises ``PlacerError`` if there are none, or if a replica has none and all of them work ``together``
    (synchronised BatchNorm).
    """
    if rows[0] < 0:
        return None
    cuts = split_batch(rows[0], replicas, 1)
    shares = rows if own_rows else [size for (size,) in cuts]
    total = sum(shares)
    if not total:
        raise PlacerError("batch", "has no rows", "skip it")
    if together and (len(shares) < replicas or 0 in shares):
        raise PlacerError(
            "batch",
            f"{total} rows leave a replica without any, and synchronised BatchNorm waits for all "
            f"{replicas}",
            "give every replica a row (drop the last, smaller batch)",
        )
    return total


def batch_of_replica(
    call: CallFormat, leaves: Sequence[Tensor], *, microbatches: int
) -> tuple[ScatteredBatch, int]:
    """The split batch of a replica that was given its own ``leaves``, and this replica's index in it.

    If the replica has no rows, the batch has one row of another replica (so the index is 1), from which
    the shapes of messages are found.
    """
    empty = batch_size(call, leaves) == 0
    if empty:
        leaves = [
            leaf if dim is None else leaf.new_zeros((*leaf.shape[:dim], 1, *leaf.shape[dim + 1 :]))
            for leaf, dim in zip(leaves, call.batch_dims, strict=True)
        ]
    return scatter_batch(call, leaves, replicas=1, microbatches=microbatches), int(empty)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A rank's share of a batch: the micro-batches of its replica that have rows."""

    batch: ScatteredBatch
    microbatches: Sequence[PlacedMicrobatch]
    crossings: Sequence[Crossings]  # the values between stages for each of these
    largest: Crossings  # the values between stages for the largest micro-batch of all replicas


def take_share(
    called: Call,
    leaves: Sequence[Tensor],
    finder: CrossingFinder,
    pipeline: Pipeline,
    plan: Plan,
    assignment: RankAssignment,
    *,
    target: Any = None,
    count: Callable[[Sequence[Any]], Sequence[float | None]] | None = None,
    own_rows: bool = False,
    grad: bool,
) -> Share:
    """This rank's share of the batch of a call; with ``own_rows`` the inputs are its replica's rows only.

    ``count(targets)`` returns what the loss's normalizer counts in the target of each micro-batch.
    Raises ``PlacerError`` if a stage fails on fake tensors of these shapes.
    """
    programs = called.programs
    call = programs.call
    if own_rows:
        batch, mine = batch_of_replica(call, leaves, microbatches=plan.microbatches)
    else:
        mine = assignment.replica_index
        batch = scatter_batch(call, leaves, replicas=plan.replicas, microbatches=plan.microbatches)
    sizes, slices = batch.sizes, batch.slices
    own, largest = batch.of_replica(mine), batch.largest
    some = {sizes[position]: slices[position] for position in (*own, largest)}
    if called.boxes:
        parts = [called.boxes.get(i, leaf) for i, leaf in enumerate(leaves)]
        slices = split_rows(call, parts, sizes)
    crossings = {size: finder.find(called, slice_, grad=grad) for size, slice_ in some.items()}
    check_boxes(
        crossings[sizes[largest]].staged, leaves, called.boxes, shard=assignment.shard_index
    )
    needed = {
        size: _inputs_needed(c.staged, assignment.stage_indices) for size, c in crossings.items()
    }
    targets = split_target(target, batch.total, sizes)[own.start : own.stop] if own else []
    counts = [None] * len(targets) if count is None else count(targets)
    here = is_on(finder.device, slices[largest])
    state = CallState(finder.part, called.leaves_by_name, sizes, whole=finder.whole)
    found = [crossings[sizes[position]] for position in own]
    given = [
        pipeline.place(
            each.staged,
            state.inputs(each.staged, slices[position], position, needed[sizes[position]]),
            are_here=here,
            leaves=slices[position],
            target=targets[index],
            counted=counts[index],
            numbers=called.leaves_by_name,
            replica_index=assignment.replica_index,
        )
        for index, (position, each) in enumerate(zip(own, found, strict=True))
    ]
    largest_values = crossings[sizes[largest]]
    return Share(batch=batch, microbatches=given, crossings=found, largest=largest_values)


def find_input_readers(staged: StagedModel, assignment: RankAssignment) -> dict[str, list[int]]:
    """For each of the model's inputs, which ranks of a replica have stages that read or return it."""
    device_of = assignment.device_of
    needed = [
        _inputs_needed(staged, [s for s, found in enumerate(device_of) if found == device])
        for device in range(assignment.num_devices)
    ]
    return {
        name: [
            position
            for device, names in enumerate(needed)
            if name in names
            for position in assignment.positions(device)
        ]
        for name in staged.graph_inputs
    }


def _inputs_needed(staged: StagedModel, stage_indices: Sequence[int]) -> set[str]:
    """The names of the values that these stages read or return."""
    needed = {name for index in stage_indices for name in staged.stages[index].inputs}
    if len(staged.stages) - 1 in stage_indices:
        needed.update(str(x) for kind, x in staged.result if kind == "value")
    return needed


def gather_result(
    batch: ScatteredBatch,
    results: Results,
    call: Call,
    finder: CrossingFinder,
    *,
    assignment: RankAssignment,
    broadcast: Callable[[Tensor, int], object],
    own_rows: bool = False,
    grad: bool = False,
) -> tuple[StagedModel, list[Any]]:
    """The leaves of the result for the whole batch, on every rank, and their stages; a collective call.

    ``results`` has the results of micro-batches whose last stage is on this rank. ``broadcast(tensor,
    rank)`` sends a tensor from the given rank to all others; with ``own_rows``, to those of its replica,
    whose rows the batch has. ``grad`` is that of `take_share`.
    """
    gathered = []
    for row in range(len(batch.rows)):
        replica = assignment.replica_index if own_rows else row
        source = assignment.grid.rank(dp=replica, pp=assignment.device_of[-1])
        for index, position in enumerate(batch.of_replica(row)):
            crossings = finder.find(call, batch.slices[position], grad=grad)
            given = results.leaves.get(index) if source == assignment.rank else None
            gathered.append(
                _broadcast_leaves(crossings.result, given, source, finder.device, broadcast)
            )
    joined = join_results(crossings.staged, gathered, batch.sizes)
    return crossings.staged, joined


def _broadcast_leaves(
    expected: Sequence[Any],
    given: Sequence[Any] | None,
    source: int,
    device: torch.device,
    broadcast: Callable[[Tensor, int], object],
) -> list[Any]:
    """The leaves of a result on every rank; only rank ``source`` has them before, as ``given``."""
    received = []
    for position, leaf in enumerate(expected):
        if isinstance(leaf, TensorSpec):
            if given is not None:
                leaf = sendable(given[position])
            else:
                leaf = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
            broadcast(leaf, source)
        elif isinstance(leaf, int | float):  # may depend on the data
            kind = torch.float64 if isinstance(leaf, float) else torch.int64
            number = torch.tensor(leaf if given is None else given[position], dtype=kind)
            number = number.to(device)
            broadcast(number, source)
            leaf = type(leaf)(number.item())
        elif given is not None:
            leaf = given[position]
        received.append(leaf)
    return received
