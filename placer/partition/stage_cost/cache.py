"""Interval tables that searches for one model share: they depend on no budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from placer.cost import CostTable
from placer.partition.stage_cost.tables import IntervalTables, build_tables

_MOST_BYTES = 256 * 2**20


class TableCache:
    """The tables that were built last, up to 256 MiB of them.

    Searches with other devices or budgets start from the same orders of the same nodes.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[CostTable, IntervalTables]] = {}
        self._nbytes = 0

    def build(
        self,
        costs: CostTable,
        order: Sequence[int],
        cuts: Sequence[int],
        *,
        later: bool,
    ) -> IntervalTables:
        """As `build_tables`."""
        key = id(costs), tuple(order), tuple(cuts), later
        known = self._known.pop(key, None)
        if known is None:  # with its costs, so that their id stays theirs
            known = costs, build_tables(costs, order, cuts, later=later)
            self._nbytes += known[1].nbytes
        self._known[key] = known  # as the latest
        while self._nbytes > _MOST_BYTES and len(self._known) > 1:
            _, oldest = self._known.pop(next(iter(self._known)))
            self._nbytes -= oldest.nbytes
        return known[1]
