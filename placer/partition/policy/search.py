"""Enumerates policies of one stage: a policy for the first blocks is extended by one block or more at a time.

This is a label-setting search, as for shortest paths with resource constraints. Bytes are counted as in
`placer.partition.stage_cost.score`. Searches rely on two facts: extending a policy never makes a sum smaller,
and an extension adds more the fewer values are already on the device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from placer.cost import CostTable
from placer.machine.catalogue import DeviceKind
from placer.partition.policy.types import KEEP, PartialPolicy, Policy, StageLimits
from placer.partition.stage_cost.pending_gradients import pending_gradients
from placer.regions import RegionBoundaries
from placer.timeline import pinned_nbytes

MAX_BLOCKS = 36
_NO_BLOCKS = PartialPolicy(
    seconds=0.0,
    kept=0.0,
    backward_peak=0.0,
    on_device=0,
    on_host=0,
    hosted=0.0,
    policy=KEEP,
    span=(0, 0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recomputed:
    """The cost of recomputing some blocks together, whatever the policy of the blocks before them."""

    enters: tuple[int, ...]  # the values from earlier blocks that they need
    seconds: float
    backward_peak: float  # bytes, without those that are kept and those of ``enters``
    saving: bool  # whether they save anything; if not, there is no reason to recompute them


@dataclass(frozen=True, slots=True, eq=False)
class PolicyCache:
    """What is known of stages that are equal: what recomputing costs, and policies that were chosen.

    ``recomputed`` has for each block the costs of recomputing it with so many blocks that follow.
    ``least_peaks`` are policies by (choices, host budget), among them the one with the least peak;
    ``chosen`` is the best by (choices, limits).
    """

    recomputed: dict[int, list[_Recomputed]] = field(default_factory=dict)
    least_peaks: dict[tuple[frozenset[Policy], float], list[PartialPolicy]] = field(
        default_factory=dict
    )
    chosen: dict[tuple[frozenset[Policy], StageLimits], PartialPolicy] = field(default_factory=dict)


@dataclass(eq=False)
class PolicySearch:
    """Searches over the policies of one stage.

    ``nodes`` are the stage's nodes in program order, by index; the loss is added if the stage computes it.
    ``before`` are the nodes of earlier stages. The policy of nodes in ``given`` is fixed. ``boundaries`` says
    where regions may begin and end. ``all_gradients`` is as in `StageLimits`. With ``pinned``, offloaded
    values are kept in pinned host memory. A stage is cut into about
    ``max_blocks`` blocks. Searches with the same ``caches`` share what they find where stages are equal.

    Nodes, and the values that they use, are numbered in the order of the stage.
    """

    costs: CostTable
    nodes: Sequence[int]
    before: Collection[int]
    boundaries: RegionBoundaries
    given: Mapping[int, Policy]
    kind: DeviceKind
    all_gradients: bool = field(kw_only=True)
    pinned: bool = field(kw_only=True, default=False)
    max_blocks: int = field(kw_only=True, default=MAX_BLOCKS)
    caches: dict[Hashable, PolicyCache] = field(kw_only=True, default_factory=dict)

    def __post_init__(self) -> None:
        costs = self.costs
        self.nodes = list(self.nodes)
        if self.nodes and self.nodes[-1] == len(costs.names) - 1:
            self.nodes.append(len(costs.names))
        local = {node: t for t, node in enumerate(self.nodes)}
        self.nbytes: list[float] = []
        self.host_nbytes: list[float] = []
        self.single: list[bool] = []
        self.producer: list[int] = []
        self.last_use: list[int] = []
        self.saved_at: list[list[int]] = [[] for _ in self.nodes]
        self.used_at: list[list[int]] = [[] for _ in self.nodes]
        for value in costs.values:
            used = {local[node] for node in (*value.users, *value.savers) if node in local}
            if not used:
                continue
            for node in value.savers:
                if node in local:
                    self.saved_at[local[node]].append(len(self.nbytes))
            for t in used:
                self.used_at[t].append(len(self.nbytes))
            kept = pinned_nbytes(value.nbytes) if self.pinned else value.nbytes
            self.nbytes.append(float(value.nbytes))
            self.host_nbytes.append(float(kept))
            self.single.append(len(value.savers) == 1)
            self.producer.append(local.get(value.producer, -1))
            self.last_use.append(max(used))
        self.backward_bytes = [  # in the backward of each node, without the values saved for it
            costs.nodes[node].backward_transient + pending
            for node, pending in zip(self.nodes, self._pending(), strict=True)
        ]
        self.forward_seconds = self._forward_seconds()
        self.cache = self.caches.setdefault(self._key(), PolicyCache())

    def _key(self) -> Hashable:
        """All that a search depends on: stages with equal keys have the same policies."""
        nodes, ending = [self.costs.nodes[node] for node in self.nodes], self.boundaries.ending
        columns: list[Sequence[Hashable]] = [
            *(self.nbytes, self.host_nbytes, self.single, self.producer),
            *([tuple(found) for found in at] for at in (self.saved_at, self.used_at)),
            *(self.backward_bytes, self.forward_seconds),
            [(n.forward_transient, n.backward_transient, n.backward_incoming) for n in nodes],
            [self.given.get(node) for node in self.nodes],
            [node in self.boundaries.free for node in self.nodes],
            [n in ending and bisect_right(self.nodes, ending[n]) for n in self.nodes],
            [node == len(self.costs.names) for node in self.nodes],
        ]
        return (*map(tuple, columns), self.kind.host_bandwidth, self.max_blocks)

    def _forward_seconds(self) -> list[float]:
        seconds = self.costs.work.seconds(self.kind).forward.device
        return [float(seconds[node]) for node in self.nodes]

    def _pending(self) -> list[float]:
        """Bytes of pending gradients, of activations and of parameters, in each node's backward."""
        costs, nodes = self.costs, self.nodes
        steps = [0.0] * (len(nodes) + 1)
        start, end = len(self.before), len(self.before) + len(nodes)
        ahead = [*self.before, *nodes]
        rest = np.setdiff1d(np.arange(len(costs.nodes)), ahead)
        place = np.empty(len(costs.nodes), dtype=np.int64)  # node -> position
        place[[*ahead, *rest]] = np.arange(len(place))

        def add(first: int, last: int, column: int, until: int, nbytes: float) -> None:
            if first <= start <= last and column < end and until > start and column < until:
                steps[max(column, start) - start] += nbytes
                steps[min(until, end) - start] -= nbytes

        for change in pending_gradients(costs, place.tolist(), add):
            if end <= change.sender:
                add(change.first, change.last, change.begin, change.until, change.nbytes)
        at = {node: t for t, node in enumerate(nodes)}
        for tensor in costs.state:
            uses = [at[node] for node in tensor.readers if node in at] if tensor.trained else []
            if uses:
                steps[0] += tensor.gradient_nbytes
                if not self.all_gradients:
                    steps[min(uses)] -= tensor.gradient_nbytes
        return list(accumulate(steps[:-1]))

    @cached_property
    def blocks(self) -> list[list[int]]:
        """Runs of consecutive nodes (indices), about ``max_blocks`` at most, so that few bytes enter each."""
        given = [self.given.get(node) for node in self.nodes]
        ending = self.boundaries.ending
        starts = [
            t
            for t, node in enumerate(self.nodes)
            if t
            and (
                given[t] != given[t - 1]
                or (given[t] is None and (node in self.boundaries.free or node in ending))
            )
        ]
        if self.nodes[-1] == len(self.costs.names) and len(self.nodes) > 1:
            starts = [*(t for t in starts if t < len(self.nodes) - 1), len(self.nodes) - 1]
        if len(starts) >= self.max_blocks:
            crossing = [0.0] * (len(self.nodes) + 1)
            for value, last in enumerate(self.last_use):
                if last >= 0:
                    crossing[self.producer[value] + 1] += self.nbytes[value]
                    crossing[last + 1] -= self.nbytes[value]
            entering = list(accumulate(crossing))
            windows: dict[int, list[int]] = {}
            for t, share in zip(starts, self._shares(starts), strict=True):
                windows.setdefault(int(share * (self.max_blocks - 1)), []).append(t)
            needed = {t for t in starts if given[t] != given[t - 1]} | {starts[-1]}
            best = (min(w, key=lambda t: (entering[t], t)) for w in windows.values())
            starts = sorted({*needed, *best})
        boundaries = [0, *starts, len(self.nodes)]
        return [list(range(a, b)) for a, b in pairwise(boundaries) if a < b]

    def _shares(self, starts: Sequence[int]) -> list[float]:
        """The fraction of the stage before each start: half by number of nodes, half by saved bytes."""
        saved = (sum(self.nbytes[value] for value in values) for values in self.saved_at)
        sums = list(accumulate(saved, initial=0.0))
        count, total = len(self.nodes), sums[-1] or 1.0
        return [0.5 * t / count + 0.5 * sums[t] / total for t in starts]

    def needed_from(self, boundary: int) -> int:
        """The set of values that nodes after ``boundary`` use, with one bit per value."""
        start = self.blocks[boundary][0] if boundary < len(self.blocks) else len(self.nodes)
        return sum(1 << value for value, last in enumerate(self.last_use) if last >= start)

    def bytes_of(self, values: int) -> float:
        """The bytes of a set of values, which has one bit per value."""
        total = 0.0
        while values:
            value = values.bit_length() - 1
            total += self.nbytes[value]
            values ^= 1 << value
        return total

    def search(
        self,
        choices: Collection[Policy],
        select: Callable[[list[PartialPolicy], int], list[PartialPolicy]],
    ) -> list[PartialPolicy]:
        """Policies of the whole stage, of those that ``select`` lets through at every boundary.

        ``select(found, boundary)`` gets the partial policies that end at a boundary and returns those to
        extend. At the last boundary, it gets policies of the whole stage and returns the result.
        """
        at: list[list[PartialPolicy]] = [[_NO_BLOCKS], *([] for _ in self.blocks)]
        for boundary in range(len(self.blocks)):
            for partial in self._selected(at[boundary], boundary, select):
                for end, made in self.extend(partial, boundary, choices):
                    at[end].append(made)
            at[boundary] = []
        return select(at[-1], len(self.blocks))

    def _selected(
        self,
        partials: list[PartialPolicy],
        boundary: int,
        select: Callable[[list[PartialPolicy], int], list[PartialPolicy]],
    ) -> list[PartialPolicy]:
        """The selected policies; ``select`` is called separately for each constraint on the next block."""
        by_policy: dict[Policy | None, list[PartialPolicy]] = {}
        for partial in partials:
            by_policy.setdefault(self._must_go_on(partial, boundary), []).append(partial)
        return [chosen for group in by_policy.values() for chosen in select(group, boundary)]

    def _must_go_on(self, partial: PartialPolicy, boundary: int) -> Policy | None:
        """The policy that the block after ``boundary`` must have; None if it may have any.

        Nodes that share memory that is written must have the same policy, unless the first of them are
        recomputed; see `placer.regions.keys.whole_groups`.
        """
        first = self.nodes[self.blocks[boundary][0]]
        if first in self.boundaries.free or first not in self.boundaries.ending:
            return None
        start = self.boundaries.ending[first]
        step = partial
        while step.before is not None and self.nodes[self.blocks[step.span[0]][0]] > start:
            step = step.before
        return None if step.policy.recompute else partial.policy

    def extend(
        self, partial: PartialPolicy, boundary: int, choices: Collection[Policy]
    ) -> Iterator[tuple[int, PartialPolicy]]:
        """Yields (end, policy) for every way to extend ``partial`` by blocks from ``boundary`` on."""
        given = self._given_policy(boundary)
        allowed = self._must_go_on(partial, boundary) if given is None else given
        if allowed in (None, KEEP):
            yield boundary + 1, self._keep(partial, boundary)
        first = self.nodes[self.blocks[boundary][0]]
        for choice in choices if given is None else {given} - {KEEP}:
            if not choice.recompute:
                if allowed not in (None, choice):
                    continue
                yield boundary + 1, self._offload(partial, boundary, choice)
                continue
            if given is None and first in self.boundaries.ending:
                continue
            for end in range(boundary + 1, len(self.blocks) + 1):
                if end > boundary + 1 and (given or self._given_policy(end - 1)) is not None:
                    break
                after = self.nodes[self.blocks[end][0]] if end < len(self.blocks) else first
                if first > self.boundaries.ending.get(after, first):
                    continue
                again = self._recompute_together(boundary, end)
                if again.saving:
                    yield end, self._recompute(partial, boundary, end, again, choice)

    def _given_policy(self, block: int) -> Policy | None:
        """The fixed policy of a block, None if there is none. The loss is always kept."""
        node = self.nodes[self.blocks[block][0]]
        return KEEP if node == len(self.costs.names) else self.given.get(node)

    def _keep(self, partial: PartialPolicy, boundary: int) -> PartialPolicy:
        kept, backward_peak, on_device = partial.kept, partial.backward_peak, partial.on_device
        for t in self.blocks[boundary]:
            own = 0.0
            for value in self.saved_at[t]:
                if not on_device >> value & 1:
                    on_device |= 1 << value
                    kept += self.nbytes[value]
                own += self.nbytes[value] * self.single[value]
            backward_peak = max(backward_peak, kept - own + self.backward_bytes[t])
        return PartialPolicy(
            seconds=partial.seconds,
            kept=kept,
            backward_peak=backward_peak,
            on_device=on_device,
            on_host=0,
            hosted=partial.hosted,
            policy=KEEP,
            span=(boundary, boundary + 1),
            before=partial,
        )

    def _offload(self, partial: PartialPolicy, boundary: int, choice: Policy) -> PartialPolicy:
        block = self.blocks[boundary]
        backward_peak, on_host, moved = partial.backward_peak, partial.on_host, 0.0
        hosted = partial.hosted
        here: set[int] = set()
        for t in block:
            for value in self.saved_at[t]:
                if not on_host >> value & 1:  # also if another block keeps it on the device
                    on_host |= 1 << value
                    moved += self.nbytes[value]
                    hosted += self.host_nbytes[value]
                if not partial.on_device >> value & 1:
                    here.add(value)
            own = sum(self.nbytes[v] for v in self.saved_at[t] if self.single[v] and v in here)
            back = sum(self.nbytes[value] for value in here)
            backward_peak = max(backward_peak, partial.kept + back - own + self.backward_bytes[t])
        return PartialPolicy(
            seconds=partial.seconds + 2 * moved / self.kind.host_bandwidth,
            kept=partial.kept,
            backward_peak=backward_peak,
            on_device=partial.on_device,
            on_host=on_host,
            hosted=hosted,
            policy=choice,
            span=(boundary, boundary + 1),
            before=partial,
        )

    def _recompute(
        self, partial: PartialPolicy, boundary: int, end: int, again: _Recomputed, choice: Policy
    ) -> PartialPolicy:
        fresh = [value for value in again.enters if not partial.on_device >> value & 1]
        entering = sum(self.nbytes[value] for value in fresh)
        seconds, kept, on_device = partial.seconds + again.seconds, partial.kept, partial.on_device
        hosted = partial.hosted
        if choice.offload:
            seconds += 2 * sum(self.nbytes[v] for v in again.enters) / self.kind.host_bandwidth
            hosted += sum(self.host_nbytes[value] for value in again.enters)
        else:
            kept += entering
            for value in fresh:
                on_device |= 1 << value
        return PartialPolicy(
            seconds=seconds,
            kept=kept,
            backward_peak=max(partial.backward_peak, partial.kept + entering + again.backward_peak),
            on_device=on_device,
            on_host=0,
            hosted=hosted,
            policy=choice,
            span=(boundary, end),
            before=partial,
        )

    def _recompute_together(self, boundary: int, end: int) -> _Recomputed:
        """The cost of recomputing blocks ``boundary`` … ``end - 1`` as one region."""
        known = self.cache.recomputed
        if boundary not in known:
            known[boundary] = list(self._recompute_from(boundary))
        return known[boundary][end - boundary - 1]

    def _recompute_from(self, boundary: int) -> Iterator[_Recomputed]:
        """The costs of recomputing this block as one region with none of those that follow, one, two, …"""
        first = self.blocks[boundary][0]
        recomputed, backward_peak, forward, seconds, pending = 0.0, 0.0, 0.0, 0.0, 0.0
        saving, forward_seconds = False, 0.0
        enters: dict[int, None] = {}
        seen: set[int] = set()
        for block in self.blocks[boundary:]:
            for t in block:
                enters.update((v, None) for v in self.used_at[t] if self.producer[v] < first)
                made_here = {v for v in self.saved_at[t] if self.producer[v] >= first}
                recomputed += sum(self.nbytes[value] for value in made_here - seen)
                seen |= made_here
                own = sum(self.nbytes[value] for value in self.saved_at[t] if self.single[value])
                backward_peak = max(backward_peak, recomputed - own + self.backward_bytes[t])
                node = self.costs.nodes[self.nodes[t]]
                forward = max(forward, recomputed + node.forward_transient)
                forward_seconds += self.forward_seconds[t]
                if self.saved_at[t]:
                    saving, seconds = True, forward_seconds
                    pending = (
                        self.backward_bytes[t] - node.backward_transient + node.backward_incoming
                    )
            yield _Recomputed(
                enters=tuple(enters),
                seconds=seconds,
                backward_peak=max(backward_peak, forward + pending) if saving else backward_peak,
                saving=saving,
            )
