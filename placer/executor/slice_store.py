"""What forward stores, for the loss of a slice of the batch, which may read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from placer.emit import StagedModel
from placer.errors import PlacerError
from placer.operands import tensors_in
from placer.program import Target, is_there, store


@contextmanager
def stored_for_slice(
    staged: StagedModel, result: Sequence[Any], model: nn.Module
) -> Iterator[None]:
    """In this block, ``model`` has the values that forward stored for one slice, which its loss may read.

    Raises ``PlacerError`` for one with a graph that a part of a model has no module for.
    """
    target = Target(model=model)
    kept, leaves = [], []
    rest = list(staged.stored_leaves(result))
    for each in staged.stored:
        own, rest = rest[: each.count], rest[each.count :]
        if each.root not in ("model", "code") or each.kind in ("write", "requires_grad"):
            continue
        if not is_there(each, target) and any(t.requires_grad for t in tensors_in(*own)):
            raise PlacerError(
                each.name,
                "is stored with its graph by a layer of another rank, and was not in the call that "
                "placer.compile was given, so the loss would lack it here",
                "call placer.compile with an example, and in a mode, in which forward stores it",
            )
        kept.append(each)
        leaves += own
    undo = store(kept, leaves, target)
    try:
        yield
    finally:
        undo()
