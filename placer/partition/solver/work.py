"""How much a proof may do: counted, not timed, so that the same problem has the same answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class Work:
    """What is left of the work that a proof may do, in estimated nanoseconds: no clock decides."""

    left: float = np.inf

    def is_spent(self) -> bool:
        """Is nothing left?"""
        return self.left <= 0

    def take(self, nanoseconds: float) -> None:
        """Less by so much."""
        self.left -= nanoseconds
