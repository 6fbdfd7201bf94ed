"""Costs that are known already, for plans that must all be judged by the same ones."""

from __future__ import annotations

from typing import Any

from placer.cost import CostTable, Estimate


def known_costs(costs: CostTable) -> Estimate:
    """An estimate that gives ``costs``, whatever it is asked for."""

    def estimate(*_: Any, **__: Any) -> CostTable:
        return costs

    return estimate
