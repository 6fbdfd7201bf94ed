"""Limits the work of a proof by counting operations, not by a clock, so that results are reproducible."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


class OutOfWork(Exception):
    """A proof has done all the work that it may."""


@dataclass(slots=True)
class Work:
    """The work that a proof may still do, in estimated nanoseconds."""

    left: float = np.inf

    def is_spent(self) -> bool:
        """Whether no work is left."""
        return self.left <= 0

    def take(self, nanoseconds: float) -> None:
        """Subtract work that is done."""
        self.left -= nanoseconds
