"""Chains in which a device comes again: its first stage early in the program, another one late.

A U-Net's top levels hold most of the activations and share the largest skip; stages of which every
device has one can put both levels on a device only with all that is between. Two steps look for
less, along one order of the nodes:

1. The devices follow each other as in the letter V, d0, d1, …, dk-1, …, d1, d0. Device j holds
   [a_j, a_j+1) and [b_j+1, b_j), the intervals are nested, and with g_j(a, b) the least largest
   load of the devices j … k - 1 covering [a, b),

       g_k-1(a, b) = load of [a, b)
       g_j(a, b)   = min over a <= a' <= b' <= b of max(pair_j(a, a', b', b), g_j+1(a', b'))

   by dynamic programming, O(k C^4) for C cuts, thinned to some tens.
2. From there, the stretch of the order and the device are looked for that lower the sum of powers of
   the loads the most, until none does: O(k C^2) loads per step. Every further stage has its price.

Heuristic; what is found is compared with the chain, and taken if it is better.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from placer.partition.stage_cost.live_through import Span
from placer.partition.stage_cost.shared import SharedPeaks, Table

MOST_CUTS = 44  # the time of the nested program goes with the fourth power

Load = Callable[[int, tuple[Span, ...]], float]  # of a device with these stages, as a share

_POWERS = (4.0, 16.0, 64.0)  # from the sum of all loads towards the largest
_PRICE = 0.006  # of a stage: how much lower the loads must be for one more
_SPARE = 0.004  # how much higher the largest load may be for fewer stages
_MOST_STEPS = 200
_ROUNDING = 1e-9  # sums of floats in another order


def nested_devices(
    shared: SharedPeaks, cuts: Sequence[int], scales: Sequence[tuple[float, float]]
) -> list[int]:
    """The device of every stretch between ``cuts`` (indices, the first and last of all included).

    ``scales`` are per device what turns a peak into a load: ``peak * first + second``.
    """
    at = np.asarray(cuts)
    n, devices = len(at), len(scales)
    single = shared.running[np.ix_(at[:-1], at[1:] - 1)] * scales[-1][0] + scales[-1][1]
    best = np.full((n, n), np.inf)
    best[:-1, 1:] = np.where(np.tri(n - 1, dtype=bool).T, single, np.inf)
    np.fill_diagonal(best, 0.0)
    choices: list[dict[Span, Span]] = []
    for j in range(devices - 2, -1, -1):
        outer, choice = np.full((n, n), np.inf), {(x, x): (x, x) for x in range(n)}
        np.fill_diagonal(outer, 0.0)
        spans = [(0, n - 1)] if j == 0 else itertools.combinations(range(n), 2)
        for x, y in spans:
            pair = _pair(shared, at, x, y) * scales[j][0] + scales[j][1]
            value = np.maximum(pair, best[x : y + 1, x : y + 1])
            value[~np.tri(y - x + 1, dtype=bool).T] = np.inf
            place = int(np.argmin(value))
            outer[x, y] = value.flat[place]
            choice[x, y] = x + place // (y - x + 1), x + place % (y - x + 1)
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
    """``[i, j]``: the peak of a device with the stages from cut x to x + i, and from x + j to y."""
    inside = at[x : y + 1]
    first, last = int(at[x]), int(at[y])
    row, column = np.maximum(inside - 1, first), np.minimum(inside, last - 1)
    early, late = inside > first, inside < last
    running = np.where(early, shared.running[first, row], 0.0)[:, None]
    held = np.where(early, shared.held[first, row], 0.0)[:, None]
    again = np.where(late, shared.running[column, last - 1], 0.0)[None, :]
    left = np.where(late, shared.left[column, last - 1], 0.0)[None, :]
    waits = shared.needed[inside, last][:, None] - shared.needed[np.ix_(inside, inside)]
    found: Table = np.maximum(again + held, running + left + waits * late[None, :])
    return found


def improved_devices(
    device_of: Sequence[int],
    cuts: Sequence[int],
    free: Sequence[bool],
    devices: int,
    load: Load,
    at_least: Load,
) -> list[int]:
    """``device_of`` after moving stretches of it (only ``free`` places) from device to device.

    ``at_least`` bounds ``load`` from below: a move that is no better by that is not looked at.
    """
    known: dict[tuple[int, tuple[Span, ...]], float] = {}
    floors: dict[tuple[int, tuple[Span, ...]], float] = {}
    best = list(device_of)
    start = (load(device, spans) for device, spans in enumerate(spans_of(best, cuts, devices)))
    unit = max(start) or 1.0  # powers of bytes would overflow
    for power in _POWERS:

        def term(share: float, spans: tuple[Span, ...], power: float = power) -> float:
            return float(share**power * (1 + _PRICE * power * len(spans)))

        def value(tried: Sequence[int], limit: float) -> float:
            """The sum over the devices; ``inf`` where it is sure not to be below ``limit``."""
            pairs = list(enumerate(spans_of(tried, cuts, devices)))
            unknown = [pair for pair in pairs if pair not in known]
            for pair in unknown:
                if pair not in floors:
                    floors[pair] = at_least(*pair) / unit * (1 - _ROUNDING)
            bound = sum(term(known.get(pair, floors.get(pair, 0.0)), pair[1]) for pair in pairs)
            for pair in unknown:
                if bound >= limit:
                    return math.inf
                known[pair] = load(*pair) / unit
                bound += term(known[pair], pair[1]) - term(floors[pair], pair[1])
            return sum(term(known[pair], pair[1]) for pair in pairs)

        least = value(best, math.inf)
        for _ in range(_MOST_STEPS):
            better: list[int] | None = None
            for tried in _moves(best, free, devices):
                found = value(tried, least)
                if found < least * (1 - 1e-9):
                    better, least = tried, found
            if better is None:
                break
            best = better
    return _with_fewer_stages(best, cuts, free, devices, load)


def _with_fewer_stages(
    device_of: list[int], cuts: Sequence[int], free: Sequence[bool], devices: int, load: Load
) -> list[int]:
    """``device_of`` with stages given to a neighbour's device where that costs next to nothing."""

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


def _moves(device_of: list[int], free: Sequence[bool], devices: int) -> list[list[int]]:
    """Every stretch of free places given to one device."""
    found = []
    count = len(device_of)
    for x in range(count):
        for y in range(x + 1, count + 1):
            if not free[y - 1]:
                break
            for device in range(devices):
                if device_of[x] != device != device_of[y - 1]:  # else a shorter one does the same
                    found.append(device_of[:x] + [device] * (y - x) + device_of[y:])
    return found


def spans_of(device_of: Sequence[int], cuts: Sequence[int], devices: int) -> list[tuple[Span, ...]]:
    """Per device its stages."""
    found: list[list[Span]] = [[] for _ in range(devices)]
    begin, device = 0, device_of[0]
    for end, other in enumerate(device_of):
        if other != device:
            found[device].append((cuts[begin], cuts[end]))
            begin, device = end, other
    found[device].append((cuts[begin], cuts[len(device_of)]))
    return [tuple(spans) for spans in found]
