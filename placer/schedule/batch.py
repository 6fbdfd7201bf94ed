"""Splits the rows of a batch among replicas and micro-batches."""

from __future__ import annotations


def split_batch(total: int, replicas: int, microbatches: int) -> tuple[tuple[int, ...], ...]:
    """The number of rows of each micro-batch, for each replica; leaves out replicas without rows.

    >>> split_batch(10, 2, 2), split_batch(1, 2, 4)
    (((3, 2), (3, 2)), ((1,),))
    """
    return tuple(_chunk_sizes(size, microbatches) for size in _chunk_sizes(total, replicas))


def split_evenly(total: int, replicas: int, microbatches: int) -> bool:
    """Has every replica that gets rows one for each of its micro-batches?

    Takes no time that grows with the replicas, of which all but the last have as many rows.

    >>> split_evenly(10, 2, 2), split_evenly(10, 2, 4), split_evenly(3, 2, 2)
    (True, False, False)
    """
    most = -(-total // replicas)
    last = total - (num_chunks(total, replicas) - 1) * most
    return all(num_chunks(size, microbatches) == microbatches for size in (most, last))


def num_chunks(total: int, chunks: int) -> int:
    """How many chunks ``torch.chunk`` makes of so many rows.

    >>> num_chunks(30, 8), num_chunks(10, 8)
    (8, 5)
    """
    return -(-total // -(-total // chunks))


def _chunk_sizes(total: int, chunks: int) -> tuple[int, ...]:
    """The chunk sizes of ``torch.chunk``: at most ``chunks`` of them, none zero unless ``total`` is zero.

    >>> _chunk_sizes(30, 8), _chunk_sizes(10, 8), _chunk_sizes(10, 3)
    ((4, 4, 4, 4, 4, 4, 4, 2), (2, 2, 2, 2, 2), (4, 4, 2))
    """
    if total == 0:
        return (0,)
    size = -(-total // chunks)
    return tuple(min(size, total - start) for start in range(0, total, size))
