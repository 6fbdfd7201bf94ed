"""Derive, from when storages are alive in a recorded step, pending gradients and bytes of each backward.

A gradient is pending from the backward of the node that makes it until that of the node that uses it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from placer.cost.lifetimes import Change, Lifetime, Lifetimes
from placer.cost.types import AddedGradient, PendingGradient


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
    added: tuple[AddedGradient, ...]


def backward_needs(lifetimes: Lifetimes) -> BackwardNeeds:
    """Peak bytes of each node's backward, not counting storages that another node's backward also needs.

    These are the tensors that only this node saved, the gradients that it receives, and everything that it
    makes, including gradients of its parameters. If several nodes read the result of an earlier node, the
    sums of their gradients are counted separately, as ``added``, because they are made on that node's device.
    """
    private = _private(lifetimes)
    incoming: dict[int, list[Lifetime]] = defaultdict(list)
    sums: dict[int, list[Lifetime]] = defaultdict(list)
    home_of: dict[int, int] = {}
    for stored in _gradients(lifetimes):
        if stored.freed_by is not None and stored.made_by != stored.freed_by:
            incoming[stored.freed_by].append(stored)
        for node, home in _adding(stored):
            sums[node].append(stored)
            home_of[node] = max(home, home_of.get(node, 0))
    alone, came, fetched, added = [], [], [], []
    for node, changes in enumerate(lifetimes.backward):
        elsewhere = {id(stored) for stored in sums[node]}
        most = _most_live(node, changes, incoming[node], private.get(node, 0), elsewhere)
        alone.append(most)
        fetched.append(_most_live(node, changes, incoming[node], 0, elsewhere, fetch=True))
        came.append(sum(s.nbytes for s in incoming[node] if id(s) not in elsewhere))
        if elsewhere:
            made = {id(stored) for stored in sums[node] if stored.made_by == node}
            before = _most_live(node, changes, incoming[node], private.get(node, 0), made)
            whole = _most_live(node, changes, incoming[node], private.get(node, 0), set())
            added.append(
                AddedGradient(
                    node=node, home=home_of[node], nbytes=whole - most, before_sum=before - most
                )
            )
    return BackwardNeeds(
        alone=tuple(alone), fetched=tuple(fetched), incoming=tuple(came), added=tuple(added)
    )


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


def _most_live(
    node: int,
    changes: Sequence[Change],
    incoming: Sequence[Lifetime],
    private: int,
    elsewhere: set[int],
    *,
    fetch: bool = False,
) -> int:
    live = most = private + sum(s.nbytes for s in incoming if id(s) not in elsewhere)
    fetched: set[int] = set()
    for stored, change in changes:
        if stored.backward:
            live += change * (id(stored) not in elsewhere)
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


def _adding(stored: Lifetime) -> list[tuple[int, int]]:
    """Pairs (node, home): in the backward of ``node``, the gradient of ``home``'s result is accumulated."""
    target = stored.freed_by
    if target is None or target < 0:
        return []
    home = _home(stored, target)
    found = []
    if stored.made_by > target and not stored.uses.sent:
        found.append((stored.made_by, home))  # the sum itself: no backward sent it on
    if home < target < stored.made_by:
        found.append((target, home))
    return found
