"""The exchange between shards that one process runs: everything is a copy between its devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from placer.executor.places.place import Place, on
from placer.executor.places.transfer import copy_to
from placer.space.exchange import Exchange, Pieces


class LocalExchange:
    """Moves pieces between the shards of a stage, one on each of ``places``; see `placer.space.exchange`."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = tuple(places)
        self.shards, self.local, self.leads = len(places), tuple(range(len(places))), (0,)

    def swap(
        self, given: Pieces, wanted: Mapping[tuple[int, int], Sequence[int]], like: Tensor
    ) -> Pieces:
        return {key: self.move(given[key], key[1]) for key in wanted}

    def sum(self, parts: Sequence[Tensor]) -> list[Tensor]:
        total = self.move(parts[0], 0)
        for part in parts[1:]:
            total.add_(self.move(part, 0))
        return [total, *(self.move(total, shard) for shard in self.local[1:])]

    def sum_processes(self, value: Tensor) -> Tensor:
        return value

    def of_batch_norms(self, counts: list[int]) -> tuple[Exchange, list[int]]:
        return self, counts

    def move(self, value: Tensor, shard: int) -> Tensor:
        return copy_to(self._places[shard], value)

    def at(self, shard: int) -> AbstractContextManager[object]:
        return on(self._places[shard])
