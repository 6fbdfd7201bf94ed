"""What forward stores, for the loss of a slice of the batch, which may read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from placer.emit import StagedModel
from placer.program import Target, store


@contextmanager
def stored_for_slice(
    staged: StagedModel, result: Sequence[Any], model: nn.Module
) -> Iterator[None]:
    """In this block, ``model`` has the values that forward stored for one slice, which its loss may read."""
    kept, leaves = [], []
    rest = list(staged.stored_leaves(result))
    for each in staged.stored:
        own, rest = rest[: each.count], rest[each.count :]
        if each.root in ("model", "code") and each.kind not in ("write", "requires_grad"):
            kept.append(each)
            leaves += own
    undo = store(kept, leaves, Target(model=model))
    try:
        yield
    finally:
        undo()
