"""Labels: what it takes to treat the first atoms of a stage in one way, and how to go on from there.

The stage's nodes are cut into atoms. A label at the border after an atom says, of one way to treat
all atoms before it: the extra seconds, the bytes that stay on the device from forward to backward,
and the largest sum of bytes at any moment of their backward. With the whole history in the label,
the bytes are those of `placer.partition.stage_cost.score`. All three only grow from border to border,
the more so the less is counted already: the searches over labels rest on that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from placer.catalogue import DeviceKind
from placer.cost import CostTable
from placer.partition.stage_cost.pending_gradients import pending_gradients
from placer.regions import RegionBorders

_MOST_ATOMS = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What may be done with an atom: nothing (kept), recompute, offload, or both."""

    recompute: bool = False
    offload: bool = False


KEEP = Policy()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimits:
    """Bytes that one stage may use: ``static`` are there anyhow, ``budget`` is the limit with them.

    ``held`` micro-batches are in flight at the peak; ``grown``: all gradients of the parameters are
    there then. ``others`` are what the device's other stages hold while this one runs, ``later`` the
    most that they hold while one of them runs and what this one keeps waits.
    """

    static: float
    budget: float
    held: float
    grown: bool
    others: float = 0.0
    later: float = 0.0

    def peak(self, label: Label) -> float:
        """Bytes of the device at its peak, when the stage's atoms are treated as ``label`` says."""
        running = self.others + (self.held - 1) * label.kept + label.worst
        waiting = self.later + self.held * label.kept if self.later else 0.0
        return self.static + max(running, waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """One way to treat the atoms before a border; bytes are those of one micro-batch."""

    seconds: float  # more than without any policy
    kept: float  # bytes that stay on the device from forward to backward
    worst: float  # the most bytes at any moment of the backward of these atoms
    counted: int  # bit per value: on the device, in kept
    hosted: int  # bit per value: on the host
    policy: Policy  # of the atoms of ``span``, the last ones
    span: tuple[int, int]
    before: Label | None = None  # the label that this one goes on from


_NO_ATOMS = Label(seconds=0.0, kept=0.0, worst=0.0, counted=0, hosted=0, policy=KEEP, span=(0, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recomputed:
    """What does not depend on the past of recomputing some atoms together."""

    enters: tuple[int, ...]  # values that come from before them
    seconds: float
    worst: float  # bytes on top of what is kept and of what enters
    saving: bool  # do they save anything: else there is nothing to run them again for


@dataclass(eq=False)
class LabelledStage:
    """The stage's nodes by local index, the loss after the last if it is here; makes its labels.

    ``nodes`` are in program order, ``before`` those of the stages before it. What to do with those
    in ``settled`` is settled; ``borders`` says where regions may begin and end. ``grown`` is that of
    the `StageLimits` it is held to.
    """

    costs: CostTable
    nodes: Sequence[int]
    before: Collection[int]
    borders: RegionBorders
    settled: Mapping[int, Policy]
    kind: DeviceKind
    grown: bool = field(kw_only=True)

    def __post_init__(self) -> None:
        # Per choices the labels of the least peaks, once `cheapest` has searched for them.
        self.most_saving: dict[frozenset[Policy], list[Label]] = {}
        costs = self.costs
        self.nodes = list(self.nodes)
        if self.nodes and self.nodes[-1] == len(costs.names) - 1:
            self.nodes.append(len(costs.names))
        local = {node: t for t, node in enumerate(self.nodes)}
        self.nbytes = [float(v.nbytes) for v in costs.values]
        self.single = [len(v.savers) == 1 for v in costs.values]
        self.producer = [local.get(v.producer, -1) for v in costs.values]
        self.saved_at: list[list[int]] = [[] for _ in self.nodes]
        self.used_at: list[list[int]] = [[] for _ in self.nodes]
        self.last_use = [-1] * len(costs.values)
        for index, value in enumerate(costs.values):
            for node in value.savers:
                if node in local:
                    self.saved_at[local[node]].append(index)
            for node in {*value.users, *value.savers}:
                if node in local:
                    self.used_at[local[node]].append(index)
                    self.last_use[index] = max(self.last_use[index], local[node])
        self.fixed = [
            costs.nodes[node].backward_transient + other
            for node, other in zip(self.nodes, self._waiting(), strict=True)
        ]
        self.forward_seconds = self._forward_seconds()
        self._recomputed: dict[tuple[int, int], _Recomputed] = {}

    def _forward_seconds(self) -> list[float]:
        seconds = self.costs.work.seconds(self.kind).forward.device
        return [float(seconds[node]) for node in self.nodes]

    def _waiting(self) -> list[float]:
        """Per node the gradients that wait in its backward, of activations and of parameters."""
        costs, nodes = self.costs, self.nodes
        steps = [0.0] * (len(nodes) + 1)
        place = np.full(len(costs.nodes), -1)
        place[list(self.before)] = range(len(self.before))
        start = len(self.before)
        place[nodes] = range(start, start + len(nodes))
        end = start + len(nodes)
        rest = np.flatnonzero(place < 0)
        place[rest] = range(end, end + len(rest))

        def add(first: int, last: int, column: int, until: int, nbytes: float) -> None:
            if first <= start <= last and column < end and until > start and column < until:
                steps[max(column, start) - start] += nbytes
                steps[min(until, end) - start] -= nbytes

        for change in pending_gradients(costs, place, add):
            if end <= change.sender:
                add(change.first, change.last, change.begin, change.until, change.nbytes)
        uses: dict[str, int] = {}
        for t, node in enumerate(nodes):
            for name in costs.parameters_of[node] if node < len(costs.names) else ():
                uses.setdefault(costs.alias_of[name], t)
        for name, t in uses.items():
            if name in costs.trained:
                steps[0] += costs.state_nbytes[name]
                if not self.grown:
                    steps[t] -= costs.state_nbytes[name]
        sums, total = [], 0.0
        for step in steps[:-1]:
            total += step
            sums.append(total)
        return sums

    @cached_property
    def atoms(self) -> list[list[int]]:
        """Runs of local indices; their borders are the cheapest, in bytes that enter, of each window."""
        settled = [self.settled.get(node) for node in self.nodes]
        ending = self.borders.ending
        starts = [
            t
            for t, node in enumerate(self.nodes)
            if t
            and (
                settled[t] != settled[t - 1]
                or (settled[t] is None and (node in self.borders.free or node in ending))
            )
        ]
        if self.nodes[-1] == len(self.costs.names) and len(self.nodes) > 1:
            starts = [*(t for t in starts if t < len(self.nodes) - 1), len(self.nodes) - 1]
        if len(starts) >= _MOST_ATOMS:
            crossing = [0.0] * (len(self.nodes) + 1)
            for value, last in enumerate(self.last_use):
                if last >= 0:
                    crossing[self.producer[value] + 1] += self.nbytes[value]
                    crossing[last + 1] -= self.nbytes[value]
            total, at = 0.0, []
            for change in crossing:
                total += change
                at.append(total)
            windows: dict[int, list[int]] = {}
            for t, share in zip(starts, self._shares(starts), strict=True):
                windows.setdefault(int(share * (_MOST_ATOMS - 1)), []).append(t)
            needed = {t for t in starts if settled[t] != settled[t - 1]} | {starts[-1]}
            best = (min(w, key=lambda t: (at[t], t)) for w in windows.values())
            starts = sorted({*needed, *best})
        borders = [0, *starts, len(self.nodes)]
        return [list(range(a, b)) for a, b in pairwise(borders) if a < b]

    def _shares(self, starts: Sequence[int]) -> list[float]:
        """Per start, what comes before it: half by nodes, half by the bytes that they save."""
        sums = [0.0]
        for saved in self.saved_at:
            sums.append(sums[-1] + sum(self.nbytes[value] for value in saved))
        count, total = len(self.nodes), sums[-1] or 1.0
        return [0.5 * t / count + 0.5 * sums[t] / total for t in starts]

    def needed_from(self, border: int) -> int:
        """A bit for each value that a node after ``border`` uses."""
        start = self.atoms[border][0] if border < len(self.atoms) else len(self.nodes)
        return sum(1 << value for value, last in enumerate(self.last_use) if last >= start)

    def bytes_of(self, values: int) -> float:
        """The sum over a set of values, which has a bit for each."""
        total = 0.0
        while values:
            value = values.bit_length() - 1
            total += self.nbytes[value]
            values ^= 1 << value
        return total

    def search(
        self,
        choices: Collection[Policy],
        select: Callable[[list[Label], int], list[Label]],
    ) -> list[Label]:
        """Labels of the whole stage, going on at every border from those that ``select`` picks.

        ``select(labels, border)`` gets all that come to the border, the end of the stage included.
        """
        at: list[list[Label]] = [[_NO_ATOMS], *([] for _ in self.atoms)]
        for border in range(len(self.atoms)):
            for label in select(at[border], border):
                for end, made in self.extend(label, border, choices):
                    at[end].append(made)
            at[border] = []
        return select(at[-1], len(self.atoms))

    def extend(
        self, label: Label, border: int, choices: Collection[Policy]
    ) -> Iterator[tuple[int, Label]]:
        """All labels that follow ``label`` by treating the atoms from ``border`` on, and where they end."""
        settled = self._settled(border)
        if settled in (None, KEEP):
            yield border + 1, self._keep(label, border)
        first = self.nodes[self.atoms[border][0]]
        for choice in choices if settled is None else {settled} - {KEEP}:
            if not choice.recompute:
                yield border + 1, self._offload(label, border, choice)
                continue
            if settled is None and first in self.borders.ending:
                continue
            for end in range(border + 1, len(self.atoms) + 1):
                if end > border + 1 and (settled or self._settled(end - 1)) is not None:
                    break
                after = self.nodes[self.atoms[end][0]] if end < len(self.atoms) else first
                if first > self.borders.ending.get(after, first):
                    continue
                again = self._recompute_together(border, end)
                if again.saving:
                    yield end, self._recompute(label, border, end, again, choice)

    def _settled(self, atom: int) -> Policy | None:
        node = self.nodes[self.atoms[atom][0]]
        return KEEP if node == len(self.costs.names) else self.settled.get(node)  # the loss stays

    def _keep(self, label: Label, border: int) -> Label:
        kept, worst, counted = label.kept, label.worst, label.counted
        for t in self.atoms[border]:
            own = 0.0
            for value in self.saved_at[t]:
                if not counted >> value & 1:
                    counted |= 1 << value
                    kept += self.nbytes[value]
                own += self.nbytes[value] * self.single[value]
            worst = max(worst, kept - own + self.fixed[t])
        return Label(
            seconds=label.seconds,
            kept=kept,
            worst=worst,
            counted=counted,
            hosted=0,
            policy=KEEP,
            span=(border, border + 1),
            before=label,
        )

    def _offload(self, label: Label, border: int, choice: Policy) -> Label:
        atom = self.atoms[border]
        worst, hosted, moved = label.worst, label.hosted, 0.0
        here: set[int] = set()
        for t in atom:
            for value in self.saved_at[t]:
                if not (hosted | label.counted) >> value & 1:
                    hosted |= 1 << value
                    moved += self.nbytes[value]
                if not label.counted >> value & 1:
                    here.add(value)
            own = sum(self.nbytes[v] for v in self.saved_at[t] if self.single[v] and v in here)
            back = sum(self.nbytes[value] for value in here)
            worst = max(worst, label.kept + back - own + self.fixed[t])
        return Label(
            seconds=label.seconds + 2 * moved / self.kind.host_bandwidth,
            kept=label.kept,
            worst=worst,
            counted=label.counted,
            hosted=hosted,
            policy=choice,
            span=(border, border + 1),
            before=label,
        )

    def _recompute(
        self, label: Label, border: int, end: int, again: _Recomputed, choice: Policy
    ) -> Label:
        fresh = [value for value in again.enters if not label.counted >> value & 1]
        entering = sum(self.nbytes[value] for value in fresh)
        seconds, kept, counted = label.seconds + again.seconds, label.kept, label.counted
        if choice.offload:
            seconds += 2 * entering / self.kind.host_bandwidth
        else:
            kept += entering
            for value in fresh:
                counted |= 1 << value
        return Label(
            seconds=seconds,
            kept=kept,
            worst=max(label.worst, label.kept + entering + again.worst),
            counted=counted,
            hosted=0,
            policy=choice,
            span=(border, end),
            before=label,
        )

    def _recompute_together(self, border: int, end: int) -> _Recomputed:
        """Recomputing atoms ``border`` … ``end - 1`` as one region."""
        if (border, end) not in self._recomputed:
            inside = range(self.atoms[border][0], self.atoms[end - 1][-1] + 1)
            self._recomputed[border, end] = self._recompute_nodes(inside)
        return self._recomputed[border, end]

    def _recompute_nodes(self, inside: range) -> _Recomputed:
        """Recomputing neighbouring nodes (local indices) as one region."""
        first = inside[0]
        enters = (v for t in inside for v in self.used_at[t] if self.producer[v] < first)
        held, worst, forward = 0.0, 0.0, 0.0
        seen: set[int] = set()
        for t in inside:
            made_here = {v for v in self.saved_at[t] if self.producer[v] >= first}
            held += sum(self.nbytes[value] for value in made_here - seen)
            seen |= made_here
            own = sum(self.nbytes[value] for value in self.saved_at[t] if self.single[value])
            worst = max(worst, held - own + self.fixed[t])
            forward = max(forward, held + self.costs.nodes[self.nodes[t]].forward_transient)
        seconds = 0.0
        saving = [t for t in inside if self.saved_at[t]]
        if saving:
            last = self.costs.nodes[self.nodes[saving[-1]]]
            waiting = self.fixed[saving[-1]] - last.backward_transient + last.backward_incoming
            worst = max(worst, forward + waiting)
            seconds = sum(self.forward_seconds[first : saving[-1] + 1])
        return _Recomputed(
            enters=tuple(dict.fromkeys(enters)),
            seconds=seconds,
            worst=worst,
            saving=bool(saving),
        )
