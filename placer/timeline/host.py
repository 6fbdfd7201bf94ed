"""Finds the host memory that offloaded activations take over a timeline.

Tensors from a CUDA device are kept in pinned memory, from torch's ``CachingHostAllocator``. It rounds
every block up to a power of two, keeps freed blocks for later ones of the same size, and neither splits
nor merges blocks (``ATen/core/CachingHostAllocator.h``: ``allocate``, ``maybe_cache_block``). Torch 2.11
and 2.12 always round; from 2.13 on ``pinned_max_round_threshold_mb`` can turn that off for large blocks,
which it does not by default.

Not modelled: a block that is freed while its copy is still running is not reused until the copy ends.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from placer.timeline.types import Timeline

PINNED = "pinned"  # the kind of a block in pinned memory


@dataclass(frozen=True, slots=True)
class HostUsage:
    """The peak of offloaded bytes on the host, and the bytes that are ``reserved`` for them there."""

    peak: int = 0
    reserved: int = 0

    def __add__(self, other: HostUsage) -> HostUsage:
        return HostUsage(self.peak + other.peak, self.reserved + other.reserved)


def host_usage(timeline: Timeline, place: str) -> HostUsage:
    """The memory of the blocks that were copied to ``place``, which is the host."""
    # Number of blocks by size; size 0 has the bytes of unpinned ones.
    live: Counter[int] = Counter()
    most: Counter[int] = Counter()
    now = peak = 0
    for kind, index, _ in timeline.on(place):
        block = timeline.blocks[index]
        if kind == "read" or block.kind not in (PINNED, "received") or not block.nbytes:
            continue
        sign = 1 if kind == "allocate" else -1
        now += sign * block.nbytes
        peak = max(peak, now)
        if block.kind == PINNED:
            size, amount = pinned_nbytes(block.nbytes), 1
        else:
            size, amount = 0, block.nbytes
        live[size] += sign * amount
        most[size] = max(most[size], live[size])
    return HostUsage(peak, sum((size or 1) * amount for size, amount in most.items()))


def pinned_nbytes(nbytes: int) -> int:
    """The bytes of pinned memory that torch allocates for a block of ``nbytes``.

    >>> pinned_nbytes(0), pinned_nbytes(1), pinned_nbytes(4096), pinned_nbytes(4097)
    (0, 1, 4096, 8192)
    """
    return 1 << (nbytes - 1).bit_length() if nbytes else 0
