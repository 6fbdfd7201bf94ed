"""Adjust a cost table to other numbers of rows or ranks, or to regions, without running the model again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from placer.cost.types import CostTable, NodeCost, StateTensor
from placer.regions import RegionKey
from placer.timeline import pinned_nbytes

_SIZES = tuple(field.name for field in fields(NodeCost) if field.name != "cast_nbytes")


def with_added_rows(costs: CostTable, microbatches: int) -> CostTable:
    """``costs`` with the sparse gradients of all micro-batches of a step, whose rows add up."""
    if microbatches == 1 or all(tensor.row_gradient_nbytes is None for tensor in costs.state):
        return costs
    return replace(costs, state=_with_row_gradients(costs, microbatches))


def _with_row_gradients(costs: CostTable, factor: float) -> tuple[StateTensor, ...]:
    return tuple(
        tensor
        if tensor.row_gradient_nbytes is None
        else replace(tensor, row_gradient_nbytes=int(factor * tensor.row_gradient_nbytes))
        for tensor in costs.state
    )


def with_divided_gradients(costs: CostTable, ranks: int) -> CostTable:
    """``costs`` where each of so many ranks keeps a piece of every gradient."""
    if ranks == 1:
        return costs
    state = tuple(replace(tensor, gradient_ranks=ranks) for tensor in costs.state)
    return replace(costs, state=state)


def with_fewer_rows(costs: CostTable, share: float) -> CostTable:
    """Estimate the costs of a micro-batch with the fraction ``share`` of the rows behind ``costs``.

    All bytes and FLOPs are scaled, except those of values made from weights alone. So the result is too low
    if other values do not depend on the batch size either.
    """

    def shrink(nbytes: int) -> int:
        return int(share * nbytes)

    return replace(
        costs,
        nodes=tuple(
            replace(node, **{name: shrink(getattr(node, name)) for name in _SIZES})
            for node in costs.nodes
        ),
        values=tuple(
            value
            if value.fixed
            else replace(
                value,
                nbytes=shrink(value.nbytes),
                parts=tuple((node, shrink(nbytes)) for node, nbytes in value.parts),
            )
            for value in costs.values
        ),
        gradients=tuple(
            replace(
                gradient,
                nbytes=shrink(gradient.nbytes),
                surplus=shrink(gradient.surplus),
                earlier=tuple((node, shrink(nbytes)) for node, nbytes in gradient.earlier),
            )
            for gradient in costs.gradients
        ),
        added=tuple(
            replace(added, nbytes=shrink(added.nbytes), before_sum=shrink(added.before_sum))
            for added in costs.added
        ),
        work=costs.work.with_share(share),
        state=_with_row_gradients(costs, share),
        input_nbytes=tuple(shrink(nbytes) for nbytes in costs.input_nbytes),
    )


def with_regions(costs: CostTable, keys: Sequence[RegionKey | None]) -> CostTable:
    """``costs`` with the region key of each node.

    A recomputed node runs its forward again in backward. The bytes of an offloaded value are counted at
    the first node of each region that saves it. How regions change the bytes retained for backward depends
    on the stages; see `placer.partition.stage_cost`.
    """
    if not any(keys):
        return costs
    hosted, pinned = [0] * len(costs.nodes), [0] * len(costs.nodes)
    for value in costs.values:
        readers: dict[RegionKey, int] = {}
        for node in sorted({*value.savers, *value.users}):
            key = keys[node] if node < len(keys) else None
            if key is None or not key.offload:
                continue
            made_inside = value.producer >= 0 and keys[value.producer] == key
            waits = not made_inside if key.recompute else node in value.savers
            if waits:
                readers.setdefault(key, node)
        for node in readers.values():
            hosted[node] += value.nbytes
            pinned[node] += pinned_nbytes(value.nbytes)
    again = [i for i, key in enumerate(keys) if key is not None and key.recompute]
    nodes = tuple(
        replace(cost, host_nbytes=moved, host_pinned_nbytes=taken)
        for cost, moved, taken in zip(costs.nodes, hosted, pinned, strict=True)
    )
    work = costs.work.with_repeated(again)
    return replace(costs, nodes=nodes, work=work, keys=tuple(keys))
