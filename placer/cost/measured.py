"""What a recorded run says of the nodes that ran: the part of a cost table that needs the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from placer.cost.gradients import backward_needs, pending_gradients
from placer.cost.lifetimes import Lifetime, find_lifetimes
from placer.cost.record import Recording
from placer.cost.storages import NodeOperations
from placer.cost.types import AddedGradient, NodeCost, PendingGradient, StoredValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The costs of the nodes of a run, by position; the loss is last. The fields are those of `CostTable`."""

    nodes: tuple[NodeCost, ...]
    values: tuple[StoredValue, ...]
    results: tuple[tuple[int, ...], ...]
    gradients: tuple[PendingGradient, ...]
    added: tuple[AddedGradient, ...]
    saving: frozenset[int]
    operations: tuple[NodeOperations, ...]
    row_gradients: Mapping[str, int]
    loss: str
    weights: tuple[int, ...]  # how many weights with gradients each node is the first to read


def measured(recording: Recording, *, training: bool) -> Measured:
    """The costs that ``recording`` shows."""
    lifetimes = find_lifetimes(recording)
    forward = [s for s in lifetimes.storages if not s.backward]
    number = {id(s): i for i, s in enumerate(forward)}
    needs = backward_needs(lifetimes)
    return Measured(
        nodes=tuple(
            NodeCost(
                forward_flops=sum(operation.flops for operation in mine.forward),
                backward_flops=sum(operation.flops for operation in mine.backward),
                forward_transient=lifetimes.forward_transient[i],
                forward_transient_offloaded=lifetimes.forward_transient[i],
                backward_transient=needs.alone[i],
                backward_transient_offloaded=needs.fetched[i],
                backward_incoming=needs.incoming[i],
                output_nbytes=recording.output_nbytes[i],
                cast_nbytes=mine.cast_nbytes,
            )
            for i, mine in enumerate(recording.operations)
        ),
        values=tuple(
            StoredValue(
                nbytes=s.nbytes,
                producer=s.made_by,
                users=tuple(sorted(s.uses.users)),
                savers=tuple(sorted(s.uses.savers)) if training else (),
                fixed=s.uses.fixed,
                parts=_parts(s),
            )
            for s in forward
        ),
        results=tuple(
            tuple(dict.fromkeys(number[id(s)] for s in held if id(s) in number))
            for held in lifetimes.results[: len(recording.order)]
        ),
        gradients=pending_gradients(lifetimes),
        added=needs.added,
        saving=recording.saving if training else frozenset(),
        operations=recording.operations,
        row_gradients=recording.row_gradients,
        loss=recording.loss,
        weights=recording.weights,
    )


def _parts(stored: Lifetime) -> tuple[tuple[int, int], ...]:
    """(node, bytes) of each node that saves only views of a part of ``stored``."""
    found: dict[int, list[int]] = {}
    for saver, nbytes in stored.uses.saved_nbytes:
        found.setdefault(saver, []).append(nbytes)
    return tuple(
        (saver, min(sum(sizes), stored.nbytes))
        for saver, sizes in sorted(found.items())
        if max(sizes) < stored.nbytes
    )
