"""A limit for the work of a proof: counted, not timed, so that the answer is always the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class Work:
    """What is left of the work that a proof may do, in estimated nanoseconds."""

    left: float = np.inf

    def is_spent(self) -> bool:
        """Is nothing left?"""
        return self.left <= 0

    def take(self, nanoseconds: float) -> None:
        """Count work that is done."""
        self.left -= nanoseconds
