"""Scale a cost table to other numbers of rows or ranks, without running the model again."""

from __future__ import annotations

from dataclasses import fields, replace

from placer.cost.types import CostTable, NodeCost, StateTensor

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
