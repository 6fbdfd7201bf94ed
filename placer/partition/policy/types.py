"""Activation-memory policies: what is done with saved activations, and what that costs a stage.

Some words of this package: the nodes of a stage are split into blocks. A policy says for each block
whether its saved activations are kept, recomputed or offloaded. A partial policy does so for the first
blocks only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is done with a block's saved activations: nothing (they are kept), one of these, or both."""

    recompute: bool = False
    offload: bool = False


KEEP = Policy()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimits:
    """Bytes that a stage may use: ``budget`` is the limit, and includes ``static`` bytes of state.

    ``host_budget`` is what a micro-batch may take of the host's memory.
    ``held`` micro-batches are in flight at the peak. ``all_gradients``: those of all parameters are
    there then. ``others`` are the bytes of the device's other stages while this one runs, ``later``
    the most of these while another one runs and this one's saved activations wait.
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

    seconds: float  # more than if all were kept
    kept: float  # bytes that stay on the device from forward to backward: those of ``on_device``
    backward_peak: float  # the most bytes at any moment of the backward of these blocks
    on_device: int
    on_host: int
    hosted: float  # bytes of the host's memory that the offloaded ones take
    policy: Policy  # of the blocks of ``span``, the last ones
    span: tuple[int, int]
    before: PartialPolicy | None = None  # the partial policy that this one extends
