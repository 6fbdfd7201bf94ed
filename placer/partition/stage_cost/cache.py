"""Caches interval tables for later searches, as they do not depend on devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from placer.cost import CostTable
from placer.partition.stage_cost.order_bytes import OrderBytes, find_order_bytes, positions_of
from placer.partition.stage_cost.tables import IntervalTables, build_tables

_MOST_BYTES = 256 * 2**20
_MOST_ORDERS = 4  # orders whose bytes are kept, for tables with other cuts


class TableCache:
    """A cache of the tables that were used last, of up to 256 MiB.

    Useful because searches with other devices or budgets try the same orders of the same nodes.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[CostTable, IntervalTables]] = {}
        self._orders: dict[Any, tuple[CostTable, OrderBytes]] = {}
        self._nbytes = 0

    def build(
        self,
        costs: CostTable,
        order: Sequence[int],
        cuts: Sequence[int],
        *,
        later: bool,
    ) -> IntervalTables:
        """The result of `build_tables` for these arguments."""
        key = id(costs), tuple(order), tuple(cuts), later
        known = self._known.pop(key, None)
        if known is None:  # stored with its costs, so that no other object gets their id
            along = self._along(costs, order)
            known = costs, build_tables(costs, order, cuts, later=later, known=along)
            self._nbytes += known[1].nbytes
        self._known[key] = known  # the last key is the one used last
        while self._nbytes > _MOST_BYTES and len(self._known) > 1:
            _, oldest = self._known.pop(next(iter(self._known)))
            self._nbytes -= oldest.nbytes
        return known[1]

    def _along(self, costs: CostTable, order: Sequence[int]) -> OrderBytes | None:
        """The bytes along an order; None if they depend on its cuts, too."""
        if costs.keys:
            return None
        key = id(costs), tuple(order)
        known = self._orders.pop(key, None) or (costs, find_order_bytes(costs, positions_of(order)))
        self._orders[key] = known
        if len(self._orders) > _MOST_ORDERS:
            self._orders.pop(next(iter(self._orders)))
        return known[1]
