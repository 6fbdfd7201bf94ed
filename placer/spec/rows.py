"""Derive the devices of further replicas from those of the first replica."""

from __future__ import annotations

from collections.abc import Sequence


def shifted_rows(names: Sequence[str], replicas: int) -> list[list[str]]:
    """``names`` for replica 0. For further replicas, indices are shifted by the number of devices per type.

    >>> shifted_rows(["cuda:0", "cuda:1"], 2)
    [['cuda:0', 'cuda:1'], ['cuda:2', 'cuda:3']]
    >>> shifted_rows(["cuda:0", "cpu"], 3)
    [['cuda:0', 'cpu'], ['cuda:1', 'cpu:1'], ['cuda:2', 'cpu:2']]
    """
    types = [name.partition(":")[0] for name in names]
    return [
        [name if replica == 0 else _shift(name, replica * types.count(kind))
         for name, kind in zip(names, types, strict=True)]
        for replica in range(replicas)
    ]  # fmt: skip


def _shift(name: str, places: int) -> str:
    kind, _, index = name.partition(":")
    return f"{kind}:{int(index or 0) + places}"
