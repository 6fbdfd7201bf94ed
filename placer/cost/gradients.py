"""Derive, from when storages are alive in a recorded step, pending gradients and bytes of each backward.

A gradient is pending from the backward of the node that makes it until that of the node that uses it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from placer.cost.lifetimes import Change, Lifetime, Lifetimes
from placer.cost.types import PendingGradient


def pending_gradients(lifetimes: Lifetimes) -> tuple[PendingGradient, ...]:
    """The gradients that the backward of one node makes and the backward of another consumes; sorted."""
    return tuple(
        sorted(
            _pending(stored, stored.freed_by)
            for stored in _gradients(lifetimes)
            if stored.freed_by is not None and 0 <= stored.freed_by < stored.made_by
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardNeeds:
    """Bytes of each node's backward; see `backward_needs`.

    ``alone`` is the most bytes alive at a time, ``incoming`` the gradients among them that the node receives.
    ``fetched`` is the same as ``alone``, with saved tensors on the host until they are read.
    """

    alone: tuple[int, ...]
    fetched: tuple[int, ...]
    incoming: tuple[int, ...]


def backward_needs(lifetimes: Lifetimes) -> BackwardNeeds:
    """Peak bytes of each node's backward, not counting storages that another node's backward also needs.

    These are the tensors that only this node saved, the gradients that it receives, and everything that it
    makes, including gradients of its parameters. If several nodes read the result of an earlier node, the
    sum of their gradients is made in the backward of one of them, and counts there even if it would be made
    on another device.
    """
    private = _private(lifetimes)
    received: dict[int, list[Lifetime]] = defaultdict(list)
    for stored in _gradients(lifetimes):
        if stored.freed_by is not None and stored.made_by != stored.freed_by:
            received[stored.freed_by].append(stored)
    alone, fetched, incoming = [], [], []
    for node, changes in enumerate(lifetimes.backward):
        nbytes = sum(stored.nbytes for stored in received[node])
        alone.append(_most_live(node, changes, private.get(node, 0) + nbytes))
        fetched.append(_most_live(node, changes, nbytes, fetch=True))
        incoming.append(nbytes)
    return BackwardNeeds(alone=tuple(alone), fetched=tuple(fetched), incoming=tuple(incoming))


def _gradients(lifetimes: Lifetimes) -> list[Lifetime]:
    return [s for s in lifetimes.storages if s.backward and not s.uses.parameter_gradient]


def _private(lifetimes: Lifetimes) -> dict[int, int]:
    """Node -> bytes that were saved only for its backward."""
    sums: dict[int, int] = {}
    for stored in lifetimes.storages:
        if not stored.backward and len(stored.uses.savers) == 1:
            (saver,) = stored.uses.savers
            sums[saver] = sums.get(saver, 0) + stored.nbytes
    return sums


def _most_live(node: int, changes: Sequence[Change], nbytes: int, *, fetch: bool = False) -> int:
    """The most bytes alive at a time in the backward of ``node``, which begins with ``nbytes``."""
    live = most = nbytes
    fetched: set[int] = set()
    for stored, change in changes:
        if stored.backward:
            live += change
        elif stored.uses.savers == {node}:
            if fetch and change == 0 and id(stored) not in fetched:
                fetched.add(id(stored))
                live += stored.nbytes
            elif not fetch or id(stored) in fetched:
                live += change
        most = max(most, live)
    return most


def _pending(stored: Lifetime, target: int) -> PendingGradient:
    parts = _parts_for(stored, target)
    needed = sum(nbytes for *_, nbytes in parts)
    sender = min((sender for sender, *_ in parts), default=stored.made_by)
    return PendingGradient(
        nbytes=stored.nbytes,
        source=stored.made_by,
        target=target,
        home=_home(stored, target),
        sender=sender,
        surplus=max(0, stored.nbytes - needed) if parts else 0,
        earlier=tuple(
            sorted((to, nbytes) for _, to, nbytes in stored.uses.sent if target < to < sender)
        ),
        of_weight=stored.uses.of_weight,
    )


def _parts_for(stored: Lifetime, target: int) -> list[tuple[int, int, int]]:
    """The parts (from, to, bytes) of a gradient that were sent to ``target`` or an earlier node."""
    sums = (
        []
        if stored.uses.sum_for is None
        else [(stored.made_by, stored.uses.sum_for, stored.nbytes)]
    )
    return [part for part in (*stored.uses.sent, *sums) if part[1] <= target]


def _home(stored: Lifetime, target: int) -> int:
    """The node whose result the gradient belongs to; ``target`` is the last node that adds to it."""
    return max((to for _, to, _ in _parts_for(stored, target)), default=target)
