"""What shards exchange inside a stage: pieces of values, and sums. The runtimes have classes for it.

A process runs one shard or several, ``local``; the first of them is its *lead*. A value that is not cut
exists once per process, on the device of its lead. Every gradient of such a value, and of a weight, is the
part that comes from the process's own shards: the gradient of the whole model is the sum over processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Protocol, TypeAlias

from torch import Tensor
from torch._subclasses import FakeTensor

Pieces: TypeAlias = dict[tuple[int, int], Tensor]
"""``(from, to)`` -> a piece of a value that one shard sends to another."""


class Exchange(Protocol):
    """Moves pieces between the shards of a stage, for the local ones of this process."""

    @property
    def shards(self) -> int:
        """The number of shards."""

    @property
    def local(self) -> Sequence[int]:
        """The shards of this process."""

    @property
    def leads(self) -> Sequence[int]:
        """The first shard of every process."""

    def swap(
        self, given: Pieces, wanted: Mapping[tuple[int, int], Sequence[int]], like: Tensor
    ) -> Pieces:
        """Send ``given`` pieces and receive ``wanted`` ones, of these shapes and the dtype of ``like``.

        Every piece has the same keys on both sides. Received pieces are on the devices of their shards, and
        nobody else refers to them.
        """

    def sum(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The sum over all shards, for each local shard; ``parts`` are those of the local shards."""

    def sum_processes(self, value: Tensor) -> Tensor:
        """The sum over processes of a tensor that each of them has once."""

    def of_batch_norms(self, counts: list[int]) -> tuple[Exchange, list[int]]:
        """The exchange over all that a batch norm has statistics of, and how many values its shards have.

        These are the shards here, which have ``counts``, or also those of other replicas.
        """

    def move(self, value: Tensor, shard: int) -> Tensor:
        """``value`` on the device of a local shard, as a tensor of its own."""

    def at(self, shard: int) -> AbstractContextManager[object]:
        """A block in which operations run on the device of a local shard."""


class Alone:
    """One shard without the others, to count its bytes on fake tensors: pieces are made from their shapes.

    ``note_sent`` is called with the bytes that the shard would send.
    """

    def __init__(
        self, shards: int, shard: int, note_sent: Callable[[int], object] = lambda nbytes: None
    ) -> None:
        self.shards, self.local, self.leads = shards, (shard,), tuple(range(shards))
        self._note_sent = note_sent

    def swap(
        self, given: Pieces, wanted: Mapping[tuple[int, int], Sequence[int]], like: Tensor
    ) -> Pieces:
        self._note_sent(sum(piece.nbytes for piece in given.values()))
        return {key: like.new_empty(shape) for key, shape in wanted.items()}

    def sum(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [self.sum_processes(part) for part in parts]

    def sum_processes(self, value: Tensor) -> Tensor:
        # In a ring, each sends its share once to sum the parts, and once to spread the sums.
        self._note_sent(2 * value.nbytes * (self.shards - 1) // self.shards)
        return value.clone()

    def of_batch_norms(self, counts: list[int]) -> tuple[Exchange, list[int]]:
        return self, counts

    def move(self, value: Tensor, shard: int) -> Tensor:
        return value.clone()

    def at(self, shard: int) -> AbstractContextManager[object]:
        return nullcontext()


# Per thread: backward does not read it, and a recomputation sets it where it runs.
_current: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


@contextmanager
def exchanging(exchange: Exchange | None) -> Iterator[None]:
    """In this block, operations in space use ``exchange``."""
    if exchange is None:
        yield
        return
    token = _current.set(exchange)
    try:
        yield
    finally:
        _current.reset(token)


def innermost_exchange() -> Exchange:
    """The exchange of the innermost `exchanging` block, which there must be."""
    exchange = _current.get()
    assert exchange is not None, "no exchange is set"
    return exchange


def current_exchange(shards: int, likely: int, tensor: Tensor | None) -> Exchange:
    """The exchange of the innermost `exchanging` block.

    Outside of one there is a single shard, or fake tensors only: then it is that of ``likely`` alone.
    """
    if shards == 1:
        return Alone(1, 0)
    if (exchange := _current.get()) is not None:
        return exchange
    assert tensor is None or isinstance(tensor, FakeTensor) or tensor.is_meta, "no exchange is set"
    return Alone(shards, likely)
