"""The loss of a step over the results of all slices together, and the backwards that start from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from placer.emit import StagedModel
from placer.errors import PlacerError
from placer.executor.execute import PlacedMicrobatch, ScheduleRun
from placer.executor.places.place import on
from placer.executor.scatter import check_results, join_results
from placer.executor.slice_store import stored_for_slice
from placer.program import unflatten_output
from placer.schedule import Action

# The loss of a batch, from what the last stage has returned and left behind.
LossOfBatch = Callable[[PlacedMicrobatch, Any, Sequence[Any]], Tensor]


def check_whole_batch(staged: StagedModel, schedule: str) -> None:
    """Raise ``PlacerError`` if the loss of several slices together cannot be computed."""
    check_results(staged)
    if schedule != "GPipe":
        raise PlacerError(
            "whole_batch",
            f"needs the results of all micro-batches before any backward, and {schedule} begins with "
            "backwards before that",
            'write "schedule": "GPipe" in the spec',
        )


def step_whole_batch(
    replicas: Sequence[Sequence[PlacedMicrobatch]],
    order_of: Callable[[int], Sequence[Action]],
    loss_of: Callable[[list[list[Any]]], Tensor],
    after_forward: Callable[[int], None],
) -> Tensor:
    """Run the forwards of all slices in one process, their loss, and all backwards; returns the loss.

    ``order_of(n)`` has the actions of ``n`` micro-batches. ``loss_of(results)`` is the loss, and runs its
    backward. ``after_forward(replica)`` is called after each replica's forwards.
    """
    started = []
    for index, runs in enumerate(replicas):
        started.append(ScheduleRun(dict(enumerate(runs)), order_of(len(runs)), None))
        started[-1].do("F")
        after_forward(index)
    home = replicas[0][0].replica.output_place
    results = [run.receive_result(home) for each in started for run in each.runs.values()]
    loss = loss_of(results)
    for each in started:
        each.do("B")
        each.finish()
    return loss


def loss_of_results(
    whole: PlacedMicrobatch,
    results: list[list[Any]],
    sizes: Sequence[int],
    loss_of: LossOfBatch,
    *,
    model: nn.Module,
    scale: float,
) -> tuple[Tensor, list[Any]]:
    """The detached loss of the batch ``whole``, whose slices have ``results``, and its result's leaves.

    The loss's backward, from ``scale`` times it, is run, and ends at ``results``. That list is emptied, so
    that they are freed. There are no leaves unless forward stores any of them, in ``model``.
    """
    staged, kept = whole.replica.staged, list[Any]()
    with on(whole.replica.output_place):
        joined = join_results(staged, results, sizes)
        results.clear()
        output, left = unflatten_output(staged.call, joined), staged.stored_leaves(joined)
        if staged.stored:
            kept = tree_map_only(Tensor, Tensor.detach, joined)
        with stored_for_slice(staged, joined, model):
            del joined
            loss = loss_of(whole, output, left)
        del output, left
        if loss.requires_grad:
            (loss * scale).backward()
    return loss.detach(), kept
