"""What torch's CUDA caching allocator takes from the driver for a timeline: bytes reserved.

The allocator asks the driver for segments, hands out blocks of them, and keeps what comes back for
later. So a process holds more than its tensors do: rounding, and holes that nothing fits into. The rules
are those of torch 2.11's ``c10/cuda/CUDACachingAllocator.cpp``, for one stream and default settings::

    asked for            a block of                     from a segment of
    up to 1 MiB          multiples of 512 B             2 MiB           (the small pool)
    up to 10 MiB         the same                       20 MiB          (the large pool)
    more                 the same                       multiples of 2 MiB

The smallest free block that is large enough is taken. What is left of it is split off where it is at
least 512 B (small pool) or more than 1 MiB (large pool); neighbours that are free become one again. When
the driver has no more, all segments without a live block go back to it, and then it is asked again.

With expandable segments a pool is one range of addresses that grows at its end, by 2 MiB (small) or
20 MiB (large) at a time: a block at the end that is too small grows, instead of a hole being left.

What is not modelled: several streams, ``max_split_size_mb``, ``garbage_collection_threshold``,
rounding to powers of two, and freeing cached pages of an expandable segment piece by piece.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

from placer.timeline.types import Timeline

_BLOCK_NBYTES = 512  # kMinBlockSize
_SMALL_NBYTES = 2**20  # kSmallSize
_SMALL_SEGMENT_NBYTES = 2 * 2**20  # kSmallBuffer
_MIDDLE_NBYTES = 10 * 2**20  # kMinLargeAlloc
_MIDDLE_SEGMENT_NBYTES = 20 * 2**20  # kLargeBuffer
_LARGE_STEP_NBYTES = 2 * 2**20  # kRoundLarge


class OutOfMemory(Exception):
    """The driver has no more. ``asked`` and ``reserved`` are bytes."""

    def __init__(self, asked: int, reserved: int) -> None:
        super().__init__(asked, reserved)
        self.asked = asked
        self.reserved = reserved


@dataclass(eq=False, slots=True)
class _Piece:
    """A part of a segment, live or free; ``before`` and ``after`` are its neighbours there."""

    address: int
    nbytes: int
    segment: int
    small: bool
    free: bool = False
    before: _Piece | None = None
    after: _Piece | None = None


_Key = tuple[int, int]  # bytes and address: the order in which free pieces are looked through


class _Pool:
    """Free pieces by size, then address."""

    def __init__(self) -> None:
        self._keys: list[_Key] = []
        self._pieces: dict[int, _Piece] = {}

    def add(self, piece: _Piece) -> None:
        piece.free = True
        bisect.insort(self._keys, (piece.nbytes, piece.address))
        self._pieces[piece.address] = piece

    def remove(self, piece: _Piece) -> None:
        piece.free = False
        del self._keys[bisect.bisect_left(self._keys, (piece.nbytes, piece.address))]
        del self._pieces[piece.address]

    def take(self, nbytes: int) -> _Piece | None:
        """The smallest piece of at least ``nbytes``."""
        place = bisect.bisect_left(self._keys, (nbytes, -1))
        if place == len(self._keys):
            return None
        piece = self._pieces[self._keys[place][1]]
        self.remove(piece)
        return piece

    def pieces(self) -> list[_Piece]:
        return [self._pieces[address] for _, address in self._keys]


class CachingAllocator:
    """The allocator of one device; ``limit`` is what the driver has, in bytes (None: no limit).

    >>> allocator = CachingAllocator()
    >>> piece = allocator.allocate(3 * 2**20)
    >>> allocator.reserved // 2**20
    20
    """

    def __init__(self, *, expandable: bool = False, limit: int | None = None) -> None:
        self.reserved = 0
        self.most_reserved = 0
        self.flushes = 0  # how often the cache was given back because the driver had no more
        self._expandable = expandable
        self._limit = limit
        self._pools = {True: _Pool(), False: _Pool()}
        self._ends: dict[bool, _Piece] = {}  # of expandable segments: the last piece of each pool
        self._segments = 0

    def allocate(self, nbytes: int) -> _Piece:
        """A piece for ``nbytes``. Raises ``OutOfMemory``."""
        size = max(_BLOCK_NBYTES, -(-nbytes // _BLOCK_NBYTES) * _BLOCK_NBYTES)
        small = size <= _SMALL_NBYTES
        piece = self._pools[small].take(size) or self._new_piece(size, small=small)
        left = piece.nbytes - size
        least = _BLOCK_NBYTES if small or self._expandable else _SMALL_NBYTES + 1
        if left >= least:
            self._split(piece, size)
        return piece

    def free(self, piece: _Piece) -> None:
        """Keep ``piece`` for later, as one with its free neighbours."""
        pool = self._pools[piece.small]
        before, after = piece.before, piece.after
        if before is not None and before.free:
            pool.remove(before)
            piece.address, piece.nbytes = before.address, piece.nbytes + before.nbytes
            piece.before = before.before
            if piece.before is not None:
                piece.before.after = piece
        if after is not None and after.free:
            pool.remove(after)
            piece.nbytes += after.nbytes
            piece.after = after.after
            if piece.after is not None:
                piece.after.before = piece
            if self._ends.get(piece.small) is after:
                self._ends[piece.small] = piece
        pool.add(piece)

    def _split(self, piece: _Piece, size: int) -> None:
        rest = _Piece(
            piece.address + size,
            piece.nbytes - size,
            piece.segment,
            piece.small,
            before=piece,
            after=piece.after,
        )
        if rest.after is not None:
            rest.after.before = rest
        piece.after, piece.nbytes = rest, size
        if self._ends.get(piece.small) is piece:
            self._ends[piece.small] = rest
        self._pools[piece.small].add(rest)

    def _new_piece(self, size: int, *, small: bool) -> _Piece:
        if self._expandable:
            return self._grow(size, small=small)
        if small:
            nbytes = _SMALL_SEGMENT_NBYTES
        elif size < _MIDDLE_NBYTES:
            nbytes = _MIDDLE_SEGMENT_NBYTES
        else:
            nbytes = -(-size // _LARGE_STEP_NBYTES) * _LARGE_STEP_NBYTES
        self._ask_driver(nbytes)
        self._segments += 1
        return _Piece(self._segments * 2**44, nbytes, self._segments, small)

    def _grow(self, size: int, *, small: bool) -> _Piece:
        """A piece at the end of the pool's one segment, which grows by what is missing."""
        step = _SMALL_SEGMENT_NBYTES if small else _MIDDLE_SEGMENT_NBYTES
        end = self._ends.get(small)
        reuse = end is not None and end.free
        have = end.nbytes if end is not None and reuse else 0
        missing = -(-(size - have) // step) * step
        self._ask_driver(missing)
        end = self._ends.get(small)  # a flush may have taken it
        if end is not None and end.free:
            self._pools[small].remove(end)
            end.nbytes += missing
            return end
        address = (1 + small) * 2**50 if end is None else end.address + end.nbytes
        piece = _Piece(address, missing, -1 - small, small, before=end)
        if end is not None:
            end.after = piece
        self._ends[small] = piece
        return piece

    def _ask_driver(self, nbytes: int) -> None:
        if self._limit is not None and self.reserved + nbytes > self._limit:
            self._flush()
            if self.reserved + nbytes > self._limit:
                raise OutOfMemory(nbytes, self.reserved)
        self.reserved += nbytes
        self.most_reserved = max(self.most_reserved, self.reserved)

    def _flush(self) -> None:
        """Give back to the driver what holds no live block: whole segments, or whole pages at an end."""
        self.flushes += 1
        for small, pool in self._pools.items():
            for piece in pool.pieces():
                if not self._expandable:
                    if piece.before is None and piece.after is None:
                        pool.remove(piece)
                        self.reserved -= piece.nbytes
                elif self._ends.get(small) is piece:
                    step = _SMALL_SEGMENT_NBYTES if small else _MIDDLE_SEGMENT_NBYTES
                    nbytes = piece.nbytes // step * step
                    if nbytes:
                        pool.remove(piece)
                        piece.nbytes -= nbytes
                        self.reserved -= nbytes
                        self._put_back_end(piece, small=small)

    def _put_back_end(self, piece: _Piece, *, small: bool) -> None:
        if piece.nbytes:
            self._pools[small].add(piece)
        elif piece.before is not None:
            piece.before.after = None
            self._ends[small] = piece.before
        else:
            del self._ends[small]


def reserved_nbytes(timeline: Timeline, device: str, *, expandable: bool = False) -> int:
    """The most bytes that torch's allocator takes from the driver for what ``device`` is given."""
    events = (
        (event.kind == "allocate", event.block, timeline.blocks[event.block].nbytes)
        for event in timeline.on(device)
    )
    return replay(events, CachingAllocator(expandable=expandable)).most_reserved


def replay(
    events: Iterable[tuple[bool, object, int]], allocator: CachingAllocator | None = None
) -> CachingAllocator:
    """Run ``(is it allocated, its name, its bytes)`` through ``allocator``, which is returned.

    Where a name stands for several blocks at a time, the newest is given back first. Blocks without bytes
    cost nothing. Raises ``OutOfMemory``.
    """
    allocator = allocator or CachingAllocator()
    live: dict[tuple[object, int], list[_Piece]] = {}
    for allocated, name, nbytes in events:
        if not nbytes:
            continue
        if allocated:
            live.setdefault((name, nbytes), []).append(allocator.allocate(nbytes))
        else:
            allocator.free(live[name, nbytes].pop())
    return allocator
