"""Models torch's CUDA caching allocator, to find how many bytes it reserves for a timeline.

The allocator gets segments from the driver, hands out blocks of them, and keeps freed blocks for later.
So a process takes more memory than its tensors, because of rounding and of holes that nothing fits into.
The rules are those of torch 2.11's ``c10/cuda/CUDACachingAllocator.cpp``, for one stream and default
settings::

    request              block                          from a segment of
    up to 1 MiB          multiples of 512 B             2 MiB           (the small pool)
    up to 10 MiB         the same                       20 MiB          (the large pool)
    more                 the same                       multiples of 2 MiB

The allocator takes the smallest free block that is large enough; of two equal ones, it takes the one at the
lower address. It splits off the rest if that has at least 512 B (small pool) or more than 1 MiB (large pool).
Free neighbours are merged. The driver gives each new segment a lower address than all before (as seen on
an H100). When the driver has no more memory, all segments without a live block are returned to it, and
the request is repeated.

With expandable segments each pool is one range of addresses. Its pages (2 MiB small, 20 MiB large) are
mapped when needed, at the lowest address that has room. When the driver has no more memory, every page
without a live block is returned to it, so the remaining holes are smaller than a page.

Not modelled: several streams, ``max_split_size_mb``, ``garbage_collection_threshold``, and rounding to
powers of two.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from placer.timeline.types import Timeline

_BLOCK_NBYTES = 512  # kMinBlockSize
_SMALL_NBYTES = 2**20  # kSmallSize
_SMALL_SEGMENT_NBYTES = 2 * 2**20  # kSmallBuffer
_MIDDLE_NBYTES = 10 * 2**20  # kMinLargeAlloc
_MIDDLE_SEGMENT_NBYTES = 20 * 2**20  # kLargeBuffer
_LARGE_STEP_NBYTES = 2 * 2**20  # kRoundLarge
# Size of a segment's range of addresses: whole pages, ample for a device.
_ADDRESSES = _MIDDLE_SEGMENT_NBYTES * 2**24


class OutOfMemory(Exception):
    """The driver has no more memory: ``asked`` bytes were requested, ``reserved`` bytes are reserved."""

    def __init__(self, asked: int, reserved: int) -> None:
        super().__init__(asked, reserved)
        self.asked = asked
        self.reserved = reserved


@dataclass(eq=False, slots=True)
class _Piece:
    """A part of a segment, live or free; ``before`` and ``after`` are its neighbours in the segment."""

    address: int
    nbytes: int
    small: bool
    free: bool = False
    mapped: bool = True  # False: addresses of an expandable segment without memory
    before: _Piece | None = None
    after: _Piece | None = None


class _Pool:
    """The free pieces of one pool: mapped ones ordered by size, unmapped ones by address."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.segment: _Piece | None = None  # the first piece of the expandable segment
        self._free: list[tuple[int, int]] = []  # bytes and address
        self._unmapped: list[int] = []  # addresses
        self._pieces: dict[int, _Piece] = {}

    def add(self, piece: _Piece) -> None:
        piece.free = True
        if piece.mapped:
            bisect.insort(self._free, (piece.nbytes, piece.address))
        else:
            bisect.insort(self._unmapped, piece.address)
        self._pieces[piece.address] = piece

    def remove(self, piece: _Piece) -> None:
        piece.free = False
        if piece.mapped:
            del self._free[bisect.bisect_left(self._free, (piece.nbytes, piece.address))]
        else:
            del self._unmapped[bisect.bisect_left(self._unmapped, piece.address)]
        del self._pieces[piece.address]

    def take(self, nbytes: int) -> _Piece | None:
        """Remove and return the smallest free piece of at least ``nbytes``; None if there is none.

        Prefers a piece with less unmapped room behind it, as torch does for expandable segments.
        """
        position = bisect.bisect_left(self._free, (nbytes,))
        if position == len(self._free):
            return None
        found = self._pieces[self._free[position][1]]
        for _, address in self._free[position + 1 :]:
            other = self._pieces[address]
            if _room(other) >= _room(found):
                break
            found = other
        self.remove(found)
        return found

    def free_pieces(self) -> list[_Piece]:
        return [self._pieces[address] for _, address in self._free]

    def unmapped_pieces(self) -> list[_Piece]:
        return [self._pieces[address] for address in self._unmapped]

    def join(self, piece: _Piece) -> None:
        """Merge ``piece``, which is not in the pool's lists, with free neighbours of the same kind.

        Mapped pieces are merged with mapped ones, unmapped pieces with unmapped ones.
        """
        before, after = piece.before, piece.after
        if before is not None and before.free and before.mapped == piece.mapped:
            self.remove(before)
            piece.address, piece.nbytes = before.address, piece.nbytes + before.nbytes
            _link(before.before, piece)
            if self.segment is before:
                self.segment = piece
        if after is not None and after.free and after.mapped == piece.mapped:
            self.remove(after)
            piece.nbytes += after.nbytes
            _link(piece, after.after)

    def split(self, piece: _Piece, nbytes: int, *, rest_mapped: bool = True) -> None:
        """Shorten ``piece`` to its first ``nbytes``; the rest becomes a free piece."""
        rest = _Piece(piece.address + nbytes, piece.nbytes - nbytes, self.small, mapped=rest_mapped)
        _link(rest, piece.after)
        _link(piece, rest)
        piece.nbytes = nbytes
        self.add(rest)


def _room(piece: _Piece) -> int:
    """The bytes of ``piece`` and of the unmapped addresses behind it."""
    after = piece.after
    return piece.nbytes + (after.nbytes if after is not None and not after.mapped else 0)


def _link(before: _Piece | None, after: _Piece | None) -> None:
    if before is not None:
        before.after = after
    if after is not None:
        after.before = before


class CachingAllocator:
    """The allocator of one device; the driver has ``limit`` bytes (None: no limit).

    The limit is checked as by ``torch.cuda.set_per_process_memory_fraction``: with the size of a whole
    segment, even if an expandable segment would grow by less.

    >>> allocator = CachingAllocator()
    >>> piece = allocator.allocate(3 * 2**20)
    >>> allocator.reserved // 2**20
    20
    """

    def __init__(self, *, expandable: bool = False, limit: int | None = None) -> None:
        self.reserved = 0
        self.most_reserved = 0
        self.flushes = 0  # how often the cache was returned because the driver had no more memory
        self._expandable = expandable
        self._limit = limit
        self._pools = {small: _Pool(small=small) for small in (True, False)}
        self._segments = 0

    def allocate(self, nbytes: int) -> _Piece:
        """A piece of at least ``nbytes``. Raises ``OutOfMemory`` if the driver has no more memory."""
        size = max(_BLOCK_NBYTES, -(-nbytes // _BLOCK_NBYTES) * _BLOCK_NBYTES)
        pool = self._pools[size <= _SMALL_NBYTES]
        piece = pool.take(size) or self._new_piece(size, pool)
        least = _BLOCK_NBYTES if pool.small or self._expandable else _SMALL_NBYTES + 1
        if piece.nbytes - size >= least:
            pool.split(piece, size)
        return piece

    def free(self, piece: _Piece) -> None:
        """Free ``piece`` and merge it with its free neighbours."""
        pool = self._pools[piece.small]
        pool.join(piece)
        pool.add(piece)

    def _new_piece(self, size: int, pool: _Pool) -> _Piece:
        """A piece with new memory from the driver."""
        if pool.small:
            nbytes = _SMALL_SEGMENT_NBYTES
        elif size < _MIDDLE_NBYTES:
            nbytes = _MIDDLE_SEGMENT_NBYTES
        else:
            nbytes = -(-size // _LARGE_STEP_NBYTES) * _LARGE_STEP_NBYTES
        if self._limit is not None and self.reserved + nbytes > self._limit:
            self._flush()
            if self.reserved + nbytes > self._limit:
                raise OutOfMemory(nbytes, self.reserved)
        if self._expandable:
            return self._grow(size, pool)
        self._segments += 1
        self._reserve(nbytes)
        return _Piece(-self._segments * _ADDRESSES, nbytes, pool.small)

    def _reserve(self, nbytes: int) -> None:
        self.reserved += nbytes
        self.most_reserved = max(self.most_reserved, self.reserved)

    def _grow(self, size: int, pool: _Pool) -> _Piece:
        """Map pages at the lowest addresses of the pool's segment where ``size`` bytes are free."""
        if pool.segment is None:
            pool.segment = _Piece(
                (1 + pool.small) * _ADDRESSES, _ADDRESSES, pool.small, mapped=False
            )
            pool.add(pool.segment)
        piece = next(found for gap in pool.unmapped_pieces() if (found := _start(gap, size)))
        if not piece.mapped:
            piece = self._map(piece, size, pool)
        while piece.nbytes < size:
            assert piece.after is not None  # _start has seen that there is room
            piece = self._map(piece.after, size - piece.nbytes, pool)
        pool.remove(piece)
        return piece

    def _map(self, gap: _Piece, nbytes: int, pool: _Pool) -> _Piece:
        """Map enough of the first pages of ``gap`` for ``nbytes``, and merge them with free neighbours."""
        page = _page(pool)
        wanted = min(gap.nbytes, -(-nbytes // page) * page)
        pool.remove(gap)
        gap.mapped = True
        if wanted < gap.nbytes:
            pool.split(gap, wanted, rest_mapped=False)
        self._reserve(wanted)
        self.free(gap)
        return gap

    def _flush(self) -> None:
        """Return segments (or pages) without live blocks to the driver."""
        self.flushes += 1
        for pool in self._pools.values():
            for piece in pool.free_pieces():
                if self._expandable:
                    self._unmap(piece, pool)
                elif piece.before is None and piece.after is None:
                    pool.remove(piece)
                    self.reserved -= piece.nbytes

    def _unmap(self, piece: _Piece, pool: _Pool) -> None:
        """Return the whole pages in the free ``piece`` to the driver."""
        page = _page(pool)
        start = -(-piece.address // page) * page
        end = (piece.address + piece.nbytes) // page * page
        if start >= end:
            return
        pool.remove(piece)
        if end < piece.address + piece.nbytes:
            pool.split(piece, end - piece.address)
        if start > piece.address:
            head = piece
            pool.split(head, start - head.address)
            pool.add(head)
            assert head.after is not None
            piece = head.after
            pool.remove(piece)
        self.reserved -= piece.nbytes
        piece.mapped = False
        pool.join(piece)
        pool.add(piece)


def _page(pool: _Pool) -> int:
    return _SMALL_SEGMENT_NBYTES if pool.small else _MIDDLE_SEGMENT_NBYTES


def _start(gap: _Piece, size: int) -> _Piece | None:
    """Where ``size`` free bytes begin: ``gap`` or a free piece before it; None if there are fewer."""
    first = gap.before if gap.before is not None and gap.before.free else gap
    have = 0
    piece: _Piece | None = first
    while piece is not None and piece.free and have < size:
        have += piece.nbytes
        piece = piece.after
    return first if have >= size else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The memory that a device's events took: ``reserved`` is the most bytes taken from the driver.

    ``starved`` counts elastic workspaces that there was no room for, ``flushes`` how often the cache was
    returned to the driver. ``failed`` is the index of the event at which memory ran out, or None.
    """

    reserved: int
    starved: int = 0
    flushes: int = 0
    failed: int | None = None


def device_usage(
    timeline: Timeline, device: str, *, expandable: bool = False, limit: int | None = None
) -> Usage:
    """The memory that torch's allocator reserves for the blocks of ``device`` in ``timeline``.

    Empty blocks take no memory. Stops at the event at which memory runs out.
    """
    allocator = CachingAllocator(expandable=expandable, limit=limit)
    live: dict[int, _Piece] = {}
    starved, failed = 0, None
    number = -1
    for kind, index, _ in timeline.events:
        block = timeline.blocks[index]
        if block.device != device:
            continue
        number += 1
        if kind == "free":
            if (piece := live.pop(index, None)) is not None:
                allocator.free(piece)
        elif kind == "allocate" and block.nbytes:
            try:
                live[index] = allocator.allocate(block.nbytes)
            except OutOfMemory:
                if not block.elastic:
                    failed = number
                    break
                starved += 1
    return Usage(
        reserved=allocator.most_reserved, starved=starved, flushes=allocator.flushes, failed=failed
    )
