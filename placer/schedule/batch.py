"""Splits the rows of a batch among replicas and micro-batches."""

from __future__ import annotations


def split_batch(total: int, replicas: int, microbatches: int) -> tuple[tuple[int, ...], ...]:
    """The number of rows of each micro-batch, for each replica; leaves out replicas without rows.

    >>> split_batch(10, 2, 2), split_batch(1, 2, 4)
    (((3, 2), (3, 2)), ((1,),))
    """
    return tuple(_chunk_sizes(size, microbatches) for size in _chunk_sizes(total, replicas))


def all_have_rows(total: int, replicas: int, microbatches: int) -> bool:
    """Does every one of so many replicas have a row for each of its micro-batches?

    >>> all_have_rows(10, 2, 2), all_have_rows(10, 2, 4), all_have_rows(1, 2, 1)
    (True, False, False)
    """
    most = -(-total // replicas)
    least = total - (replicas - 1) * most
    return least > 0 and all(
        -(-size // -(-size // microbatches)) == microbatches for size in (most, least)
    )


def _chunk_sizes(total: int, chunks: int) -> tuple[int, ...]:
    """The chunk sizes of ``torch.chunk``: at most ``chunks`` of them, none zero unless ``total`` is zero.

    >>> _chunk_sizes(30, 8), _chunk_sizes(10, 8), _chunk_sizes(10, 3)
    ((4, 4, 4, 4, 4, 4, 4, 2), (2, 2, 2, 2, 2), (4, 4, 2))
    """
    if total == 0:
        return (0,)
    size = -(-total // chunks)
    return tuple(min(size, total - start) for start in range(0, total, size))
