"""A GPU's memory as `torch.cuda` reports it, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch


class FakeCuda:
    """Bytes allocated and reserved, with their peaks, as torch counts them.

    ``step`` is called at the end of each training step (its `synchronize`) with the number of calls.
    """

    def __init__(
        self, *, total: int, context: int, step: Callable[[FakeCuda, int], None] = lambda *_: None
    ) -> None:
        self.total, self.context, self.step = total, context, step
        self.reserved = self.reserved_peak = self.allocated = self.allocated_peak = 0
        self.limit: float | None = None
        self.synchronized = 0

    def take(self, allocated: int, reserved: int) -> None:
        """Both are what there is from now on."""
        self.allocated, self.reserved = allocated, reserved
        self.allocated_peak = max(self.allocated_peak, allocated)
        self.reserved_peak = max(self.reserved_peak, reserved)

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def synchronize() -> None:
            self.synchronized += 1
            self.step(self, self.synchronized)

        def reset() -> None:
            self.allocated_peak, self.reserved_peak = self.allocated, self.reserved

        def limit(fraction: float) -> None:
            if not isinstance(fraction, float) or not 0 <= fraction <= 1:
                raise ValueError(fraction)  # torch raises TypeError or ValueError
            self.limit = fraction

        for name, function in {
            "synchronize": synchronize,
            "reset_peak_memory_stats": reset,
            "max_memory_allocated": lambda: self.allocated_peak,
            "max_memory_reserved": lambda: self.reserved_peak,
            "memory_reserved": lambda: self.reserved,
            "mem_get_info": lambda: (self.total - self.context - self.reserved, self.total),
            "get_device_properties": lambda _: SimpleNamespace(total_memory=self.total),
            "set_per_process_memory_fraction": limit,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)
