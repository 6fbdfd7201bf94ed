"""Policies for saved activations (keep, recompute, offload), and the memory limits of a stage.

The nodes of a stage are split into blocks. A policy decides for each block whether its saved activations are
kept, recomputed or offloaded. A partial policy decides this for the first blocks only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What happens to the saved activations of a block. With neither flag, they are kept on the device."""

    recompute: bool = False
    offload: bool = False


KEEP = Policy()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimits:
    """The memory limits of a stage, in bytes, and what else is on its device at the peak.

    ``budget`` limits the peak, which includes ``static`` bytes of parameters, buffers and optimizer state.
    ``host_budget`` limits the host memory that one micro-batch takes. ``in_flight`` micro-batches are in
    flight at the peak; ``all_gradients`` says whether the gradients of all parameters exist then. ``others``
    are the bytes that the device's other stages need while this one runs; ``later`` is the most that they
    need while one of them runs and this stage only retains its saved activations.
    """

    static: float
    budget: float
    in_flight: float
    all_gradients: bool
    others: float = 0.0
    later: float = 0.0
    host_budget: float = math.inf

    def fits(self, partial: PartialPolicy) -> bool:
        """Whether the policy is within the budgets of the device and of the host."""
        return self.peak(partial) <= self.budget and partial.hosted <= self.host_budget

    def peak(self, partial: PartialPolicy) -> float:
        """Peak bytes of the device under a policy for all blocks."""
        running = self.others + (self.in_flight - 1) * partial.kept + partial.backward_peak
        retained = self.later + self.in_flight * partial.kept if self.later else 0.0
        return self.static + max(running, retained)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialPolicy:
    """A policy for the first blocks of a stage, with its costs in bytes of one micro-batch.

    ``on_device`` and ``on_host`` are sets of values, with one bit per value.
    """

    seconds: float  # extra time compared with keeping everything
    kept: float  # bytes of ``on_device``, which stay on the device from forward to backward
    backward_peak: float  # the most bytes at any moment in the backward of these blocks
    on_device: int
    on_host: int
    hosted: float  # bytes of host memory that offloaded values take
    policy: Policy  # the decision for the last blocks, from span[0] to span[1] - 1
    span: tuple[int, int]
    before: PartialPolicy | None = None  # the partial policy that this one extends
