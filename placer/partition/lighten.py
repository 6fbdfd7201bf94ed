"""Which nodes of one stage to recompute or to offload, so that it fits at the least extra time.

The stage's nodes are cut into atoms. A label at the border after an atom says, of one way to treat
all atoms before it: the extra seconds, the bytes that stay on the device from forward to backward,
and the largest sum of bytes at any moment of their backward. Atoms are added one by one (kept, or
offloaded) or in runs (recomputed together), and a label is dropped when another at the same border
is as good in all three. With the whole history in the label, the bytes are those of `score`.

O(atoms^2 x labels) extensions, at most `_MOST_LABELS` labels per border. It is a heuristic by that
limit, by the choice of atoms, and because labels of unlike pasts are compared by their sums alone;
`least_extra_seconds` bounds from below what any treatment can cost. (Dynamic programs for chains:
Griewank and Walther, "Revolve", ACM TOMS 2000; Beaumont et al., "Efficient Combination of
Rematerialization and Offloading for Training DNNs", NeurIPS 2021.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from placer.cost import CostTable, DeviceKind
from placer.regions import RegionKey

_MOST_ATOMS = 36
_MOST_LABELS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """What may be done with an atom: nothing (kept), recompute, offload, or both."""

    recompute: bool = False
    offload: bool = False


KEEP = Treatment()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimits:
    """Bytes that one stage may use: ``static`` are there anyhow, ``budget`` is the limit with them.

    ``held`` micro-batches are in flight at the peak; ``grown``: all gradients of the parameters are
    there then.
    """

    static: float
    budget: float
    held: float
    grown: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Lightened:
    """A treatment of a stage: runs of nodes with what is done to each, extra seconds, peak bytes."""

    runs: tuple[tuple[tuple[int, ...], Treatment], ...]
    seconds: float
    peak: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Label:
    seconds: float
    kept: float
    worst: float
    counted: int  # bit per value: on the device, in kept
    hosted: int  # bit per value: on the host
    treatment: Treatment
    span: tuple[int, int]  # atoms
    before: _Label | None = None


def lighten_stage(
    costs: CostTable,
    nodes: Sequence[int],
    cuttable: Collection[int],
    fixed: Mapping[int, Treatment],
    kind: DeviceKind,
    choices: Collection[Treatment],
    limits: StageLimits,
    *,
    half: bool,
) -> Lightened:
    """The cheapest treatment of ``nodes`` (in program order) within ``limits``.

    ``choices`` besides keeping; what to do with the nodes in ``fixed`` is settled. A region may
    begin or end before the nodes in ``cuttable``. Where nothing fits, the answer is that with the
    least peak.
    """
    stage = _Stage(costs, nodes, cuttable, fixed, kind, half=half, grown=limits.grown)
    count = len(stage.atoms)
    start = _Label(
        seconds=0.0, kept=0.0, worst=0.0, counted=0, hosted=0, treatment=KEEP, span=(0, 0)
    )
    at: list[list[_Label]] = [[start], *([] for _ in range(count))]
    for border in range(count):
        at[border] = _best(at[border], limits)
        for label in at[border]:
            for end, made in stage.extend(label, border, choices):
                at[end].append(made)
    final = _best(at[count], limits)
    fitting = [label for label in final if _peak(label, limits) <= limits.budget]
    if fitting:
        chosen = min(fitting, key=lambda label: (label.seconds, _peak(label, limits)))
    else:
        chosen = min(final, key=lambda label: (_peak(label, limits), label.seconds))
    runs = []
    step: _Label | None = chosen
    while step is not None:
        first, last = step.span
        inside = [node for atom in stage.atoms[first:last] for node in atom]
        if step.treatment != KEEP:
            runs.append((tuple(stage.nodes[t] for t in inside), step.treatment))
        step = step.before
    return Lightened(runs=tuple(reversed(runs)), seconds=chosen.seconds, peak=_peak(chosen, limits))


def least_extra_seconds(
    costs: CostTable,
    nodes: Sequence[int],
    kind: DeviceKind,
    choices: Collection[Treatment],
    limits: StageLimits,
    *,
    half: bool,
) -> float:
    """Seconds that every treatment of the stage within ``limits`` costs at the least.

    At each moment of backward the values that are too much must be away: each was offloaded, or the
    node that made it runs again. The cheapest bytes first (the fractional knapsack) bound that from
    below, moment by moment.
    """
    stage = _Stage(costs, nodes, set(), {}, kind, half=half, grown=limits.grown)
    recompute = any(choice.recompute for choice in choices)
    offload = any(choice.offload for choice in choices)
    room = limits.budget - limits.static
    least = 0.0
    held = 0.0
    live: dict[int, float] = {}
    for t in range(len(stage.nodes)):
        for value in stage.saved_at[t]:
            live.setdefault(value, stage.nbytes[value])
        held = sum(live.values())
        own = sum(stage.nbytes[v] for v in stage.saved_at[t] if stage.single[v])
        excess = held * limits.held - own + stage.fixed[t] - room
        if excess <= 0:
            continue
        # Values of micro-batches that wait go with the same decision, so each counts for all.
        offers: dict[tuple[str, int], list[float]] = {}
        for value, nbytes in live.items():
            producer = stage.producer[value]
            again = stage.forward_seconds[producer] if recompute and producer >= 0 else None
            away = 2 * nbytes / kind.host_bandwidth if offload else None
            if again is not None and (away is None or again <= away):
                entry = offers.setdefault(("node", producer), [again, 0.0])
                entry[1] += nbytes * limits.held
            elif away is not None:
                offers["value", value] = [away, nbytes * limits.held]
            elif recompute:  # it was received: only the boundary could be elsewhere
                continue
        least = max(least, _fractional(offers.values(), excess))
    return least


def _fractional(offers: Collection[list[float]], excess: float) -> float:
    seconds = 0.0
    for price, nbytes in sorted(offers, key=lambda offer: offer[0] / max(offer[1], 1.0)):
        if excess <= 0:
            break
        share = min(1.0, excess / nbytes) if nbytes else 0.0
        seconds += share * price
        excess -= share * nbytes
    return seconds


def _peak(label: _Label, limits: StageLimits) -> float:
    return limits.static + (limits.held - 1) * label.kept + label.worst


def _best(labels: list[_Label], limits: StageLimits) -> list[_Label]:
    """Labels that no other is as good as in every respect; of too many, an even choice by seconds."""
    kept: list[_Label] = []
    for label in sorted(labels, key=lambda x: (x.seconds, x.kept, x.worst)):
        if not any(o.kept <= label.kept and o.worst <= label.worst for o in kept):
            kept.append(label)
    fitting = [label for label in kept if _peak(label, limits) <= limits.budget]
    kept = fitting or sorted(kept, key=lambda x: _peak(x, limits))[:_MOST_LABELS]
    if len(kept) <= _MOST_LABELS:
        return kept
    step = (len(kept) - 1) / (_MOST_LABELS - 1)
    return [kept[round(i * step)] for i in range(_MOST_LABELS)]


@dataclass(slots=True)
class _Run:
    """What does not depend on the past of recomputing a run of atoms together."""

    enters: list[int]
    seconds: float
    worst: float  # bytes on top of what is kept and of what enters
    saving: bool


@dataclass(eq=False)
class _Stage:
    """The stage's nodes by local index, the loss after the last if it is here."""

    costs: CostTable
    nodes: Sequence[int]
    cuttable: Collection[int]
    settled: Mapping[int, Treatment]
    kind: DeviceKind
    half: bool = field(kw_only=True)
    grown: bool = field(kw_only=True)

    def __post_init__(self) -> None:
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
            for node, other in zip(self.nodes, self._waiting(local), strict=True)
        ]
        self.forward_seconds = self._forward_seconds()
        self._runs: dict[tuple[int, int], _Run] = {}

    def _forward_seconds(self) -> list[float]:
        """Per node, the longer of computing and of reading and writing memory."""
        peak = self.kind.half_flops if self.half else self.kind.fp32_flops
        costs = [self.costs.nodes[node] for node in self.nodes]
        return [
            max(c.forward_flops / peak, c.forward_traffic / self.kind.memory_bandwidth)
            for c in costs
        ]

    def _waiting(self, local: dict[int, int]) -> list[float]:
        """Per node the gradients that wait in its backward, of activations and of parameters."""
        costs, nodes = self.costs, self.nodes
        first, last = nodes[0], nodes[-1]
        steps = [0.0] * (len(nodes) + 1)
        for gradient in costs.gradients:
            if not (gradient.target < gradient.source and gradient.home >= first):
                continue
            nbytes = gradient.nbytes - (gradient.surplus if gradient.sender > last else 0)
            inside = [t for t, node in enumerate(nodes) if gradient.target < node < gradient.source]
            if inside:
                steps[inside[0]] += nbytes
                steps[inside[-1] + 1] -= nbytes
        for added in costs.added:
            if added.node in local and first <= added.home < added.node:
                steps[local[added.node]] += added.nbytes
                steps[local[added.node] + 1] -= added.nbytes
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
        starts = [
            t
            for t, node in enumerate(self.nodes)
            if t
            and (settled[t] != settled[t - 1] or (settled[t] is None and node in self.cuttable))
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

    def extend(
        self, label: _Label, border: int, choices: Collection[Treatment]
    ) -> Iterator[tuple[int, _Label]]:
        """All labels that follow ``label`` by treating the atoms from ``border`` on, and where they end."""
        settled = self._settled(border)
        if settled in (None, KEEP):
            yield border + 1, self._keep(label, border)
        for choice in choices if settled is None else {settled} - {KEEP}:
            if not choice.recompute:
                yield border + 1, self._offload(label, border, choice)
                continue
            for end in range(border + 1, len(self.atoms) + 1):
                if end > border + 1 and (settled or self._settled(end - 1)) is not None:
                    break
                run = self._run(border, end)
                if run.saving:
                    yield end, self._recompute(label, border, end, run, choice)

    def _settled(self, atom: int) -> Treatment | None:
        node = self.nodes[self.atoms[atom][0]]
        return KEEP if node == len(self.costs.names) else self.settled.get(node)  # the loss stays

    def _keep(self, label: _Label, border: int) -> _Label:
        kept, worst, counted = label.kept, label.worst, label.counted
        for t in self.atoms[border]:
            own = 0.0
            for value in self.saved_at[t]:
                if not counted >> value & 1:
                    counted |= 1 << value
                    kept += self.nbytes[value]
                own += self.nbytes[value] * self.single[value]
            worst = max(worst, kept - own + self.fixed[t])
        return _Label(
            seconds=label.seconds, kept=kept, worst=worst, counted=counted, hosted=0,
            treatment=KEEP, span=(border, border + 1), before=label,
        )  # fmt: skip

    def _offload(self, label: _Label, border: int, choice: Treatment) -> _Label:
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
        return _Label(
            seconds=label.seconds + 2 * moved / self.kind.host_bandwidth, kept=label.kept,
            worst=worst, counted=label.counted, hosted=hosted, treatment=choice,
            span=(border, border + 1), before=label,
        )  # fmt: skip

    def _recompute(
        self, label: _Label, border: int, end: int, run: _Run, choice: Treatment
    ) -> _Label:
        fresh = [value for value in run.enters if not label.counted >> value & 1]
        entering = sum(self.nbytes[value] for value in fresh)
        seconds, kept, counted = label.seconds + run.seconds, label.kept, label.counted
        if choice.offload:
            seconds += 2 * entering / self.kind.host_bandwidth
        else:
            kept += entering
            for value in fresh:
                counted |= 1 << value
        return _Label(
            seconds=seconds, kept=kept, worst=max(label.worst, label.kept + entering + run.worst),
            counted=counted, hosted=0, treatment=choice, span=(border, end), before=label,
        )  # fmt: skip

    def _run(self, border: int, end: int) -> _Run:
        """Recomputing atoms ``border`` … ``end - 1`` together."""
        found = self._runs.get((border, end))
        if found is not None:
            return found
        inside = range(self.atoms[border][0], self.atoms[end - 1][-1] + 1)
        first = inside[0]
        enters = dict.fromkeys(
            v for t in inside for v in self.used_at[t] if self.producer[v] < first
        )
        held, worst, again, forward = 0.0, 0.0, 0.0, 0.0
        seen: set[int] = set()
        saving = [t for t in inside if self.saved_at[t]]
        for t in inside:
            cost = self.costs.nodes[self.nodes[t]]
            own = 0.0
            for value in self.saved_at[t]:
                if self.producer[value] >= first:
                    if value not in seen:
                        seen.add(value)
                        held += self.nbytes[value]
                    own += self.nbytes[value] * self.single[value]
                else:
                    own += self.nbytes[value] * self.single[value]
            worst = max(worst, held - own + self.fixed[t])
            forward = max(forward, held + cost.forward_transient)
        if saving:
            last = self.costs.nodes[self.nodes[saving[-1]]]
            waiting = self.fixed[saving[-1]] - last.backward_transient + last.backward_incoming
            again = forward + waiting
        made = _Run(
            enters=list(enters),
            seconds=sum(self.forward_seconds[t] for t in inside[: len(inside)] if saving and t <= saving[-1]),
            worst=max(worst, again),
            saving=bool(saving),
        )  # fmt: skip
        self._runs[border, end] = made
        return made


def keys_of(
    layer_of: Sequence[str], runs: Sequence[tuple[tuple[int, ...], Treatment]]
) -> dict[int, RegionKey]:
    """Node -> key for the runs of a lightened stage; the labels name the layers that a run spans."""
    keys: dict[int, RegionKey] = {}
    before = ""
    for nodes, treatment in runs:
        inside = [layer_of[node] for node in nodes if layer_of[node]] or ["the model's own code"]
        label = inside[0] if inside[0] == inside[-1] else f"{inside[0]} … {inside[-1]}"
        if label == before:
            label += " (next part)"
        before = label
        key = RegionKey(label=label, recompute=treatment.recompute, offload=treatment.offload)
        keys.update(dict.fromkeys(nodes, key))
    return keys
