"""Assigns the parts of an order to devices, if a device may have several stages.

The first and the last layers of a U-Net save most of the activations, and the largest skip connections
connect them. With one stage per device, both can be on one device only if everything between them is,
too. This heuristic looks for a lower largest peak along one order of the nodes:

1. Devices are arranged as in the letter V: d0, d1, …, dk-1, …, d1, d0. Device j has the intervals
   [a_j, a_j+1) and [b_j+1, b_j), one inside the other from device to device. With g_j(a, b) the least
   possible largest load of devices j … k - 1 on [a, b),

       g_k-1(a, b) = load of [a, b)
       g_j(a, b)   = min over a <= a' <= b' <= b of max(pair_j(a, a', b', b), g_j+1(a', b'))

   by dynamic programming, in O(k C^4) for C cuts, so only some tens of cuts are used.
2. Local search: move the stretch of the order to the device that lowers a sum of powers of the loads the
   most, until no move lowers it. A step examines O(k C^2) loads. Each additional stage has a penalty.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from placer.partition.stage_cost.live_through import Span
from placer.partition.stage_cost.shared import SharedPeaks, Table

MOST_CUTS = 44  # the time of the first step grows with its fourth power

# Load of a device (index) with these stages, as a share
Load = Callable[[int, tuple[Span, ...]], float]
_DeviceSpans = tuple[int, tuple[Span, ...]]  # a device (index) and its stages

# Used in turn; the higher the power, the more the sum depends on the largest load.
_POWERS = (4.0, 16.0, 64.0)
_PENALTY = 0.006  # share by which loads must fall for one more stage
_SPARE = 0.004  # share by which the largest load may rise for fewer stages
_MAX_STEPS = 200
_ROUNDING = 1e-9  # relative difference between sums of floats in different orders


def nested_devices(
    shared: SharedPeaks,
    cuts: Sequence[int],
    devices: int,
    share: Callable[[int, Table], Table],
) -> list[int]:
    """The first step: the device of every stretch between ``cuts`` (indices, the ends included).

    ``share`` gives the loads of a device (index) with peaks in bytes.
    """
    at = np.asarray(cuts)
    n = len(at)
    single = share(devices - 1, shared.running[np.ix_(at[:-1], at[1:] - 1)])
    best = np.full((n, n), np.inf)
    best[:-1, 1:] = np.where(np.tri(n - 1, dtype=bool).T, single, np.inf)
    np.fill_diagonal(best, 0.0)
    choices: list[dict[Span, Span]] = []
    for j in range(devices - 2, -1, -1):
        outer, choice = np.full((n, n), np.inf), {(x, x): (x, x) for x in range(n)}
        np.fill_diagonal(outer, 0.0)
        spans = [(0, n - 1)] if j == 0 else itertools.combinations(range(n), 2)
        for x, y in spans:
            pair = share(j, _pair(shared, at, x, y))
            value = np.maximum(pair, best[x : y + 1, x : y + 1])
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
    """``[i, j]``: the peak of a device with one stage from cut x to x + i and one from x + j to y."""
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
    """The second step: ``device_of`` (per stretch) after moves; only ``free`` stretches are moved.

    ``at_least`` is a lower bound on ``load`` that rules out most moves.
    """
    known: dict[_DeviceSpans, float] = {}
    floors: dict[_DeviceSpans, float] = {}
    best = list(device_of)
    start = (load(device, spans) for device, spans in enumerate(spans_of(best, cuts, devices)))
    unit = max(start) or 1.0  # powers of bytes would overflow
    for power in _POWERS:

        def term(share: float, spans: tuple[Span, ...], power: float = power) -> float:
            return float(share**power * (1 + _PENALTY * power * len(spans)))

        terms = {pair: term(share, pair[1]) for pair, share in known.items()}

        def value(
            tried: Sequence[int], limit: float, terms: dict[_DeviceSpans, float] = terms
        ) -> float:
            """The sum of powers over the devices; ``inf`` if a bound says that it is not below ``limit``."""
            bound = 0.0
            unknown: list[tuple[_DeviceSpans, float]] = []
            for pair in enumerate(spans_of(tried, cuts, devices)):
                found = terms.get(pair)
                if found is None:
                    if pair not in floors:
                        floors[pair] = at_least(*pair) / unit * (1 - _ROUNDING)
                    found = term(floors[pair], pair[1])
                    unknown.append((pair, found))
                bound += found
            for pair, found in unknown:
                if bound >= limit:
                    return math.inf
                known[pair] = load(*pair) / unit
                terms[pair] = term(known[pair], pair[1])
                bound += terms[pair] - found
            return bound

        least = value(best, math.inf)
        for _ in range(_MAX_STEPS):
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
    """``device_of`` with stages merged into a neighbour if that raises the largest load only a little."""

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
    """All assignments in which one run of free stretches is moved to another device."""
    found = []
    count = len(device_of)
    for x in range(count):
        for y in range(x + 1, count + 1):
            if not free[y - 1]:
                break
            for device in range(devices):
                if (
                    device_of[x] != device != device_of[y - 1]
                ):  # otherwise a shorter run does the same
                    found.append(device_of[:x] + [device] * (y - x) + device_of[y:])
    return found


def spans_of(device_of: Sequence[int], cuts: Sequence[int], devices: int) -> list[tuple[Span, ...]]:
    """The stages of every device."""
    found: list[list[Span]] = [[] for _ in range(devices)]
    begin, device = 0, device_of[0]
    for end, other in enumerate(device_of):
        if other != device:
            found[device].append((cuts[begin], cuts[end]))
            begin, device = end, other
    found[device].append((cuts[begin], cuts[len(device_of)]))
    return [tuple(spans) for spans in found]
