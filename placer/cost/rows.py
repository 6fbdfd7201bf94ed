"""Scale a cost table to a micro-batch of fewer rows, without running the model again."""

from __future__ import annotations

from dataclasses import fields, replace

from placer.cost.types import CostTable, NodeCost

_SIZES = tuple(field.name for field in fields(NodeCost))


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
            NodeCost(**{name: shrink(getattr(node, name)) for name in _SIZES})
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
        input_nbytes=tuple(shrink(nbytes) for nbytes in costs.input_nbytes),
    )
