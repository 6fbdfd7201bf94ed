"""Assigns intervals of one order of the nodes to devices, where a device may have several of them.

The first and the last layers of a U-Net save most of its activations, and the largest skip connections run
between them. With one stage per device, they can share a device only if everything between them is on it too.
This heuristic looks for a placement with a lower largest peak, in two steps:

1. Devices are arranged like the letter V: d0, d1, …, dk-1, …, d1, d0. Device j has the intervals
   [a_j, a_j+1) and [b_j+1, b_j), so that the intervals of devices are nested. Let g_j(a, b) be the least
   possible largest load of devices j … k - 1 on [a, b). Then

       g_k-1(a, b) = load of [a, b)
       g_j(a, b)   = min over a <= a' <= b' <= b of max(pair_j(a, a', b', b), g_j+1(a', b'))

   which dynamic programming computes in O(k C^4) time for C cuts, so only a few dozen cuts are used.
2. Local search: move one interval to one other device, such that a sum of powers of the loads falls the most;
   repeat until no move lowers it. A step evaluates O(k C^2) loads. Every additional stage has a penalty.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial

import numpy as np

from placer.partition.stage_cost.shared import SharedPeaks, Span, Table

MOST_CUTS = 44  # the time of the first step grows with the fourth power of this number

# The load of a device (index) with these stages, as a share of its budget
Load = Callable[[int, tuple[Span, ...]], float]
_DeviceSpans = tuple[int, tuple[Span, ...]]  # a device (index) and its stages

# Used in turn; the higher the power, the more the sum depends on the largest load.
_POWERS = (4.0, 16.0, 64.0)
# Times the largest load at first: no move is worth more, and larger powers would overflow.
_WORST = 1e4
_PENALTY = 0.006  # relative decrease of the loads that is worth one more stage
_SPARE = 0.004  # relative increase of the largest load that is accepted for fewer stages
_MAX_STEPS = 200
_ROUNDING = 1e-9  # relative difference between float sums in different orders


def nested_devices(
    shared: SharedPeaks, cuts: Sequence[int], devices: int, share: Callable[[int, Table], Table]
) -> list[int]:
    """The first step: the device of every interval between ``cuts`` (indices, both ends included).

    ``share(device, peaks)`` turns peaks in bytes into loads of a device (index).
    """
    at = np.asarray(cuts)
    n = len(at)
    single = share(devices - 1, shared.running[np.ix_(at[:-1], at[1:] - 1)])
    best = np.full((n, n), np.inf)
    best[:-1, 1:] = np.where(np.tri(n - 1, dtype=bool).T, single, np.inf)
    np.fill_diagonal(best, 0.0)
    choices: list[dict[Span, Span]] = []
    pair = cache(partial(_pair, shared, at))  # the same for all devices
    for j in range(devices - 2, -1, -1):
        outer, choice = np.full((n, n), np.inf), {(x, x): (x, x) for x in range(n)}
        np.fill_diagonal(outer, 0.0)
        spans = [(0, n - 1)] if j == 0 else itertools.combinations(range(n), 2)
        for x, y in spans:
            value = np.maximum(share(j, pair(x, y)), best[x : y + 1, x : y + 1])
            value[~np.tri(y - x + 1, dtype=bool).T] = np.inf
            least = int(np.argmin(value))
            outer[x, y] = value.flat[least]
            choice[x, y] = x + least // (y - x + 1), x + least % (y - x + 1)
        best = outer
        choices.append(choice)
    device_of, span = [devices - 1] * (n - 1), (0, n - 1)
    for j, choice in enumerate(reversed(choices)):
        inner = choice[span]
        device_of[span[0] : inner[0]] = [j] * (inner[0] - span[0])
        device_of[inner[1] : span[1]] = [j] * (span[1] - inner[1])
        span = inner
    return device_of


def _pair(shared: SharedPeaks, at: np.ndarray, x: int, y: int) -> Table:
    """Entry ``[i, j]`` is the peak of a device with the stages from cut x to x + i and from x + j to y."""
    inside = at[x : y + 1]
    first, last = int(at[x]), int(at[y])
    row, column = np.maximum(inside - 1, first), np.minimum(inside, last - 1)
    early, late = inside > first, inside < last
    running = np.where(early, shared.running[first, row], 0.0)[:, None]
    retained = np.where(early, shared.retained[first, row], 0.0)[:, None]
    again = np.where(late, shared.running[column, last - 1], 0.0)[None, :]
    left = np.where(late, shared.bytes_after_backward[column, last - 1], 0.0)[None, :]
    pending = shared.needed[inside, last][:, None] - shared.needed[np.ix_(inside, inside)]
    found: Table = np.maximum(again + retained, running + left + pending * late[None, :])
    return found


def improved_devices(
    device_of: Sequence[int],
    cuts: Sequence[int],
    free: Sequence[bool],
    devices: int,
    load: Load,
    at_least: Load,
) -> list[int]:
    """The second step: improves ``device_of`` (one device per interval) by moving ``free`` intervals.

    ``at_least`` is a cheap lower bound on ``load``, which rules out most moves.
    """
    known: dict[_DeviceSpans, float] = {}
    floors: dict[_DeviceSpans, float] = {}
    best = list(device_of)
    start = (load(device, spans) for device, spans in enumerate(spans_of(best, cuts, devices)))
    scale = max(start) or 1.0  # powers of bytes would overflow
    for power in _POWERS:

        def term(share: float, spans: tuple[Span, ...], power: float = power) -> float:
            return float(min(share, _WORST) ** power * (1 + _PENALTY * power * len(spans)))

        terms = {pair: term(share, pair[1]) for pair, share in known.items()}

        def exact(pair: _DeviceSpans, terms: dict[_DeviceSpans, float] = terms) -> float:
            if pair not in terms:
                known[pair] = load(*pair) / scale
                terms[pair] = term(known[pair], pair[1])
            return terms[pair]

        def value(
            changed: Mapping[int, tuple[Span, ...]],
            kept: Sequence[float],
            limit: float,
            terms: dict[_DeviceSpans, float] = terms,
        ) -> float:
            """The sum of powers of the loads, or inf as soon as it is known to reach ``limit``.

            ``kept`` are the terms of all devices, of which those of ``changed`` have other stages now.
            """
            now = list(kept)
            unknown: list[_DeviceSpans] = []
            for pair in changed.items():
                found = terms.get(pair)
                if found is None:
                    if pair not in floors:
                        floors[pair] = at_least(*pair) / scale * (1 - _ROUNDING)
                    found = term(floors[pair], pair[1])
                    unknown.append(pair)
                now[pair[0]] = found
            bound = sum(now)
            for pair in unknown:
                if bound >= limit:
                    return math.inf
                bound += exact(pair) - now[pair[0]]
            return bound

        spans = spans_of(best, cuts, devices)
        kept = [exact(pair) for pair in enumerate(spans)]
        least = sum(kept)
        for _ in range(_MAX_STEPS):
            better: tuple[int, int, int] | None = None
            for move in _moves(best, free, devices):
                found = value(_after(move, best, spans, cuts), kept, least)
                if found < least * (1 - 1e-9):
                    better, least = move, found
            if better is None:
                break
            x, y, device = better
            best[x:y] = [device] * (y - x)
            spans = spans_of(best, cuts, devices)
            kept = [exact(pair) for pair in enumerate(spans)]
    return _with_fewer_stages(best, cuts, free, devices, load)


def _after(
    move: tuple[int, int, int],
    device_of: Sequence[int],
    spans: Sequence[tuple[Span, ...]],
    cuts: Sequence[int],
) -> dict[int, tuple[Span, ...]]:
    """The stages of the devices that ``move`` changes, after it; ``spans`` are those of all before it."""
    x, y, device = move
    first, last = cuts[x], cuts[y]
    changed: dict[int, tuple[Span, ...]] = {}
    for owner in set(device_of[x:y]):
        left: list[Span] = []
        for begin, end in spans[owner]:
            if begin < first:
                left.append((begin, min(end, first)))
            if end > last:
                left.append((max(begin, last), end))
        changed[owner] = tuple(left)
    begin, end = first, last
    others: list[Span] = []
    for span in changed.get(device, spans[device]):
        if span[1] == begin:
            begin = span[0]
        elif span[0] == end:
            end = span[1]
        else:
            others.append(span)
    changed[device] = tuple(sorted([*others, (begin, end)]))
    return changed


def _with_fewer_stages(
    device_of: list[int], cuts: Sequence[int], free: Sequence[bool], devices: int, load: Load
) -> list[int]:
    """Merges stages into a neighbour if that raises the largest load only a little."""

    def largest(tried: Sequence[int]) -> float:
        return max(load(d, spans) for d, spans in enumerate(spans_of(tried, cuts, devices)))

    limit = largest(device_of) * (1 + _SPARE)
    while True:
        boundaries = [i for i in range(1, len(device_of)) if device_of[i] != device_of[i - 1]]
        tried = []
        for x, y in itertools.pairwise([0, *boundaries, len(device_of)]):
            for other in {*device_of[x - 1 : x], *device_of[y : y + 1]} if all(free[x:y]) else ():
                merged = device_of[:x] + [other] * (y - x) + device_of[y:]
                tried.append((largest(merged), merged))
        least = min(tried, default=(math.inf, device_of))
        if least[0] > limit:
            return device_of
        device_of = least[1]


def _moves(
    device_of: Sequence[int], free: Sequence[bool], devices: int
) -> Iterator[tuple[int, int, int]]:
    """All moves of a run of free intervals to another device: first interval, end, device."""
    count = len(device_of)
    for x in range(count):
        for y in range(x + 1, count + 1):
            if not free[y - 1]:
                break
            for device in range(devices):
                # Otherwise moving a shorter run gives the same
                if device_of[x] != device != device_of[y - 1]:
                    yield x, y, device


def spans_of(device_of: Sequence[int], cuts: Sequence[int], devices: int) -> list[tuple[Span, ...]]:
    """The stages of every device, as pairs of cuts."""
    found: list[list[Span]] = [[] for _ in range(devices)]
    begin, device = 0, device_of[0]
    for end, other in enumerate(device_of):
        if other != device:
            found[device].append((cuts[begin], cuts[end]))
            begin, device = end, other
    found[device].append((cuts[begin], cuts[len(device_of)]))
    return [tuple(spans) for spans in found]
