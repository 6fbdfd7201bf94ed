"""How training state is divided between the ranks that have the same weights: one answer for all who ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ShardState = Literal["none", "optimizer", "gradients"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """Over how many ranks each kind of state is divided; 1 if each of them has all of it.

    ``optimizer`` is the state of the optimizer (``exp_avg``, ``momentum_buffer``, …) of a parameter, and
    ``gradients`` is its ``.grad``.
    """

    optimizer: int = 1
    gradients: int = 1


def layout_of(
    shard_state: ShardState, *, replicas: int, shards: int, shard_over: int | None = None
) -> StateLayout:
    """The layout where state is divided between ``shard_over`` replicas (None: all) and their shards."""
    ranks = (shard_over or replicas) * shards
    return StateLayout(
        optimizer=ranks if shard_state != "none" else 1,
        gradients=ranks if shard_state == "gradients" else 1,
    )


def sharing_replicas(replica: int, shard_over: int) -> range:
    """The replicas between which the state of ``replica`` is divided."""
    first = replica // shard_over * shard_over
    return range(first, first + shard_over)


def piece_of(numel: int, rank: int, ranks: int) -> slice:
    """The elements, of ``numel`` in row-major order, whose state ``rank`` has; the last ranks may have fewer.

    >>> [piece_of(7, rank, 4) for rank in range(4)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 6, None), slice(6, 7, None)]
    """
    length = piece_length(numel, ranks)
    return slice(min(rank * length, numel), min((rank + 1) * length, numel))


def piece_length(numel: int, ranks: int) -> int:
    """The number of elements of the largest piece."""
    return -(-numel // ranks)
