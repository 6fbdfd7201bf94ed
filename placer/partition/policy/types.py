"""Policies for saved activations (keep, recompute, offload), and the limits of a stage.

The nodes of a stage are split into blocks. A policy says for each block whether its saved activations are
kept, recomputed or offloaded. A partial policy says so for the first blocks only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is done with a block's saved activations: they are kept, or one or both of these."""

    recompute: bool = False
    offload: bool = False


KEEP = Policy()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimits:
    """Bytes that a stage may use: ``budget`` is the limit, which includes ``static`` bytes of state.

    ``host_budget`` is the host memory that a micro-batch may take. ``held`` micro-batches are in flight at
    the peak; ``all_gradients`` says whether the gradients of all parameters exist then. ``others`` is the
    number of bytes that the device's other stages need while this one runs; ``later`` is the most that
    they need while another one runs and this one keeps its saved activations.
    """

    static: float
    budget: float
    held: float
    all_gradients: bool
    others: float = 0.0
    later: float = 0.0
    host_budget: float = math.inf

    def fits(self, partial: PartialPolicy) -> bool:
        """Whether a policy is within both budgets."""
        return self.peak(partial) <= self.budget and partial.hosted <= self.host_budget

    def peak(self, partial: PartialPolicy) -> float:
        """Peak bytes of the device under a policy of all blocks."""
        running = self.others + (self.held - 1) * partial.kept + partial.backward_peak
        waiting = self.later + self.held * partial.kept if self.later else 0.0
        return self.static + max(running, waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialPolicy:
    """A policy for the first blocks of a stage; bytes are those of one micro-batch.

    ``on_device`` and ``on_host`` are sets of values, with a bit for each.
    """

    seconds: float  # extra time, compared with keeping everything
    kept: float  # bytes that stay on the device from forward to backward: those of ``on_device``
    backward_peak: float  # the most bytes at any moment of the backward of these blocks
    on_device: int
    on_host: int
    hosted: float  # bytes of host memory that offloaded values take
    policy: Policy  # of the last blocks, which are those in ``span``
    span: tuple[int, int]
    before: PartialPolicy | None = None  # the partial policy that this one extends
