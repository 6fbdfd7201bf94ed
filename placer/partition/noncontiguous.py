"""Searches for placements in which a device has several stages that are not neighbours."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from placer.cost import CostTable
from placer.partition.assignment import MOST_CUTS, improved_devices, nested_devices
from placer.partition.candidate import (
    Bytes,
    Candidate,
    StageCosts,
    optimizer_on,
    peak_share,
    rank_candidate,
    reference_bytes,
    steady_step,
)
from placer.partition.stage_cost.optimizer import OptimizerMemory
from placer.partition.stage_cost.shared import SharedPeaks, Span
from placer.partition.stage_cost.tables import IntervalTables
from placer.partition.types import DeviceSlot, PlanningOptions

GAIN = 0.01  # how much better, relatively, a placement with more stages than devices must be


def may_be_noncontiguous(options: PlanningOptions, slots: Sequence[DeviceSlot]) -> bool:
    """Whether a device may have several stages: only in training, in one process, with one micro-batch."""
    several = len({slot.name for slot in slots}) > 1
    return several and options.training and options.microbatches == 1 and not options.processes


def device_peaks(
    tables: IntervalTables,
    costs: CostTable,
    nodes: Sequence[int],
    spans: Mapping[str, Sequence[Span]],
    optimizer: OptimizerMemory | None,
) -> dict[str, int]:
    """The peak bytes of each device; ``spans`` has its stages as pairs of cut indices.

    Without ``optimizer``, they are the peaks of a replica other than the first.
    """
    shared = SharedPeaks(tables, costs, nodes, optimizer)
    return {device: int(shared.peak(own)) for device, own in spans.items()}


class NoncontiguousChains:
    """Rates placements along the order of ``best`` on its devices, with several stages per device."""

    def __init__(
        self,
        best: Candidate,
        costs: CostTable,
        pinned: Sequence[str | None],
        options: PlanningOptions,
    ) -> None:
        self._best, self._options = best, options
        self.slots = list({slot.name: slot for slot in best.slots}.values())
        self._reference = reference_bytes(self.slots)
        optimizer = optimizer_on(options, (slot.name for slot in self.slots))
        self.shared = SharedPeaks(best.tables, costs, best.nodes, optimizer)
        self._costs = StageCosts(best.tables, self.slots, pinned, options)

    def share(self, device: int, peak: Bytes) -> Bytes:
        """``peak`` bytes of a device (index) as a share of its budget."""
        return peak_share(peak, self.slots[device], self._reference)

    def load(self, device: int, spans: Sequence[Span]) -> float:
        """The peak of a device (index) with the stages ``spans``, as a share of its budget."""
        return self.share(device, self.shared.peak(spans)) if spans else 0.0

    def load_at_least(self, device: int, spans: Sequence[Span]) -> float:
        """A lower bound on `load` that is faster to compute."""
        return self.share(device, self.shared.at_least(spans)) if spans else 0.0

    def least_load(self, cuts: Sequence[int]) -> float:
        """The largest load of an interval between ``cuts`` that has the device that suits it best alone."""
        alike = {(slot.budget, slot.withheld): i for i, slot in enumerate(self.slots)}
        return max(
            min(self.load(device, [span]) for device in alike.values())
            for span in itertools.pairwise(cuts)
        )

    def candidate(self, chain: Sequence[DeviceSlot], cuts: Sequence[int]) -> Candidate:
        """The placement with the devices ``chain`` for the stages between ``cuts`` (indices).

        Its rank is by the seconds of devices, not of stages.
        """
        spans: list[list[Span]] = [[] for _ in self.slots]
        seconds = [0.0] * len(self.slots)
        for slot, (x, y) in zip(chain, itertools.pairwise(cuts), strict=True):
            device = self.slots.index(slot)
            spans[device].append((x, y))
            seconds[device] += float(self._costs.seconds[device][x, y - 1])
        loads = [self.load(device, own) for device, own in enumerate(spans)]
        limited = [x for x, slot in zip(loads, self.slots, strict=True) if slot.budget is not None]
        fullest, peak = max(limited, default=0.0), max(loads)
        step = steady_step(self._options, self.slots, max(seconds), sum(seconds))
        return Candidate(
            rank=rank_candidate(
                self._options, fullest=fullest, peak=peak, seconds=seconds, step=step
            ),
            tables=self._best.tables,
            nodes=self._best.nodes,
            slots=tuple(chain),
            cuts=tuple(cuts),
            fullest=fullest,
            peak=peak,
        )


def find_noncontiguous(
    best: Candidate, costs: CostTable, pinned: Sequence[str | None], options: PlanningOptions
) -> Candidate | None:
    """A placement along the order of ``best`` with repeated devices, if it is better by `GAIN`.

    None is searched for where ``best`` has as many boundaries as such a search would try.
    """
    if len(best.cuts) > MOST_CUTS:
        return None
    names = {slot.name for slot in best.slots}
    if len(names) < len(best.slots) or not may_be_noncontiguous(options, best.slots):
        return None
    chains = NoncontiguousChains(best, costs, pinned, options)
    cuts = _coarse(best.tables, best.cuts)
    boundaries = [best.tables.cuts[cut] for cut in cuts]
    free = [not any(pinned[a:b]) for a, b in itertools.pairwise(boundaries)]
    if not any(free) or not _may_be_better(chains.least_load(cuts), best):
        return None
    device_of = np.searchsorted(best.cuts[1:-1], cuts[:-1], side="right").tolist()
    if all(free):
        device_of = nested_devices(chains.shared, cuts, len(chains.slots), chains.share)
    device_of = improved_devices(
        device_of, cuts, free, len(chains.slots), chains.load, chains.load_at_least
    )
    chain: list[DeviceSlot] = []
    ends = [0]
    for cut, device in zip(cuts[1:], device_of, strict=True):
        if chain and chain[-1] is chains.slots[device]:
            ends[-1] = cut
        else:
            chain.append(chains.slots[device])
            ends.append(cut)
    found = chains.candidate(chain, ends)
    return found if is_better(found, best) else None


def is_better(found: Candidate, best: Candidate) -> bool:
    """Whether ``found`` is better by `GAIN`: in overflow if ``best`` does not fit, otherwise in peak."""
    if best.rank[0] > 0:
        return found.rank[0] < best.rank[0] * (1 - GAIN)
    return found.rank[0] == 0 and found.peak < best.peak * (1 - GAIN)


def _may_be_better(least: float, best: Candidate) -> bool:
    """Whether a placement whose largest load is at least ``least`` can be `is_better` than ``best``."""
    return least < (best.rank[0] or best.peak) * (1 - GAIN)


def _coarse(tables: IntervalTables, kept: Sequence[int]) -> list[int]:
    """At most `MOST_CUTS` cut indices, evenly spaced by position and saved bytes; includes ``kept``."""
    count = len(tables.cuts)
    if count <= MOST_CUTS:
        return list(range(count))
    saved = np.concatenate([[0.0], tables.saved[0]])
    share = np.arange(count) / (count - 1) + saved / max(saved[-1], 1.0)
    wanted = np.linspace(0, share[-1], MOST_CUTS - len(kept))
    return sorted({*kept, *np.minimum(np.searchsorted(share, wanted), count - 1).tolist()})
