"""The costs of a micro-batch of fewer rows, without a run of the model."""

from __future__ import annotations

from dataclasses import fields, replace

from placer.cost.types import CostTable, NodeCost

_SIZES = tuple(field.name for field in fields(NodeCost))


def with_fewer_rows(costs: CostTable, share: float) -> CostTable:
    """About the costs of a micro-batch with ``share`` of the rows of that of ``costs``.

    All that a node makes shrinks with the rows, which what it makes of weights alone does not: the
    result is at most what a run would say, but for rounding and values that do not depend on the batch.
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
            replace(added, nbytes=shrink(added.nbytes), waiting=shrink(added.waiting))
            for added in costs.added
        ),
        work=costs.work.with_share(share),
        input_nbytes=tuple(shrink(nbytes) for nbytes in costs.input_nbytes),
    )
