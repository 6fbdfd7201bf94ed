"""How many rows each replica and each micro-batch gets."""

from __future__ import annotations


def chunk_sizes(total: int, chunks: int) -> tuple[int, ...]:
    """The sizes ``torch.chunk`` gives; at most ``chunks`` of them, none zero unless ``total`` is.

    >>> chunk_sizes(30, 8), chunk_sizes(10, 8), chunk_sizes(10, 3)
    ((4, 4, 4, 4, 4, 4, 4, 2), (2, 2, 2, 2, 2), (4, 4, 2))
    """
    if total == 0:
        return (0,)
    size = -(-total // chunks)
    return tuple(min(size, total - start) for start in range(0, total, size))


def batch_cuts(total: int, replicas: int, microbatches: int) -> tuple[tuple[int, ...], ...]:
    """Micro-batch sizes of every replica that gets rows.

    >>> batch_cuts(10, 2, 2), batch_cuts(1, 2, 4)
    (((3, 2), (3, 2)), ((1,),))
    """
    return tuple(chunk_sizes(size, microbatches) for size in chunk_sizes(total, replicas))
