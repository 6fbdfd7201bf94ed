"""Caches interval tables between searches; they depend neither on devices nor on budgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from placer.cost import CostTable
from placer.partition.stage_cost.order_bytes import OrderBytes, find_order_bytes, positions_of
from placer.partition.stage_cost.tables import IntervalTables, build_tables

_MOST_BYTES = 256 * 2**20
_MOST_ORDERS = 4  # orders whose bytes are kept, to build tables for other cuts


class TableCache:
    """A cache of up to 256 MiB for the most recently used tables.

    It helps because searches with other devices or budgets try the same orders of the same nodes.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[CostTable, IntervalTables]] = {}
        self._orders: dict[Any, tuple[CostTable, OrderBytes]] = {}
        self._nbytes = 0

    def build(
        self, costs: CostTable, order: Sequence[int], cuts: Sequence[int], *, later: bool
    ) -> IntervalTables:
        """The result of `build_tables` for these arguments."""
        key = id(costs), tuple(order), tuple(cuts), later
        known = self._known.pop(key, None)
        if known is None:  # stored with the costs, so that their id is not reused
            along = self._along(costs, order)
            known = costs, build_tables(costs, order, cuts, later=later, known=along)
            self._nbytes += known[1].nbytes
        self._known[key] = known  # moved to the end: the most recently used
        while self._nbytes > _MOST_BYTES and len(self._known) > 1:
            _, oldest = self._known.pop(next(iter(self._known)))
            self._nbytes -= oldest.nbytes
        return known[1]

    def _along(self, costs: CostTable, order: Sequence[int]) -> OrderBytes | None:
        """The bytes along an order; None if they depend on the cuts too, as with regions."""
        if costs.keys:
            return None
        key = id(costs), tuple(order)
        known = self._orders.pop(key, None) or (costs, find_order_bytes(costs, positions_of(order)))
        self._orders[key] = known
        if len(self._orders) > _MOST_ORDERS:
            self._orders.pop(next(iter(self._orders)))
        return known[1]
