"""How long the copies that a stage receives are needed: by backward, or only by their readers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placer.cost import CostTable, StoredValue


@dataclass(frozen=True, slots=True, kw_only=True)
class LastKeepers:
    """Per node, and per input of the model: the last position that keeps its result for backward.

    -1 where none does. A stage that starts after it may drop its copy after the last reader.
    """

    nodes: tuple[int, ...]
    inputs: tuple[int, ...]


def last_keepers(costs: CostTable, place: NDArray[np.int64]) -> LastKeepers:
    """From ``costs``, with ``place`` the position of every node."""
    last = [_last_keeper(costs, value, place) for value in costs.values]
    inputs = [at for value, at in zip(costs.values, last, strict=True) if value.producer < 0]
    if len(inputs) != len(costs.input_readers):  # some share a storage
        inputs = [max(inputs, default=-1)] * len(costs.input_readers)
    nodes = (max((last[value] for value in held), default=-1) for held in costs.results)
    return LastKeepers(nodes=tuple(nodes), inputs=tuple(inputs))


def _last_keeper(costs: CostTable, value: StoredValue, place: NDArray[np.int64]) -> int:
    def keeps(node: int) -> bool:
        key = costs.keys[node] if node < len(costs.keys) else None
        if key is None:
            return node in value.savers
        return key.recompute and not key.offload

    found = (int(place[node]) for node in {*value.users, *value.savers} if keeps(node))
    return max(found, default=-1)
