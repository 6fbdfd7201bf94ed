"""The messages that ranks send each other during a step, in one order that all ranks share.

Messages are ordered by the action that makes the value, in the order of `linearize`. Each rank handles
its messages in that order: it starts a receive only after it has sent every earlier message. So no wait
is circular, even if a rank's messages are carried one after the other, and each only when its other end
is ready for it (NCCL with one communicator): the first message that has not arrived depends only on
actions that come before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from placer.schedule.types import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """A value that one stage makes and later stages read, for one micro-batch.

    ``gradient_readers`` are the readers that send back a gradient of it.
    """

    name: str
    maker: int
    readers: tuple[int, ...]
    gradient_readers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A value, or its gradient, that one rank sends to another.

    ``sent_after`` and ``needed_before`` are indices into the order of all actions.
    """

    kind: Literal["value", "gradient"]
    name: str
    microbatch_index: int
    sender: int
    receiver: int
    sent_after: int
    needed_before: int


def find_messages(
    order: Sequence[Action], flows: Callable[[int], Iterable[Flow]], rank_of: Sequence[int]
) -> tuple[Message, ...]:
    """The messages of a step whose actions run in ``order``, sorted by when they are sent.

    ``flows(microbatch_index)`` returns the values of a micro-batch in an order that is the same on all
    ranks; ``rank_of`` has the rank of every stage. A value is sent to a rank once, before the first stage
    there that reads it. Its gradient is sent back once, after the backward (or its first half) of the
    last stage there that computes it. Takes time linear in actions and flows.
    """
    at: dict[tuple[str, int, int], int] = {}
    for index, action in enumerate(order):
        if action.kind != "W":
            kind = "F" if action.kind == "F" else "B"
            at[kind, action.stage_index, action.microbatch_index] = index
    found = []
    for microbatch in dict.fromkeys(action.microbatch_index for action in order):
        for flow in flows(microbatch):
            maker = rank_of[flow.maker]
            for rank, readers in _by_rank(flow.readers, rank_of).items():
                if rank == maker:
                    continue
                found.append(
                    Message(
                        kind="value",
                        name=flow.name,
                        microbatch_index=microbatch,
                        sender=maker,
                        receiver=rank,
                        sent_after=at["F", flow.maker, microbatch],
                        needed_before=min(at["F", r, microbatch] for r in readers),
                    )
                )
                backwards = [
                    at["B", r, microbatch]
                    for r in readers
                    if r in flow.gradient_readers and ("B", r, microbatch) in at
                ]
                if backwards:
                    found.append(
                        Message(
                            kind="gradient",
                            name=flow.name,
                            microbatch_index=microbatch,
                            sender=rank,
                            receiver=maker,
                            sent_after=max(backwards),
                            needed_before=at["B", flow.maker, microbatch],
                        )
                    )
    return tuple(sorted(found, key=lambda message: message.sent_after))


def take_due_receives(
    upcoming: deque[Message], rank: int, *, position: int, following: int
) -> list[Message]:
    """Remove from ``upcoming``, the messages of ``rank``, those that it starts to receive now.

    It is about to do its action at ``position``; ``following`` is the position of its next one.
    Due are all receives that come before the messages that the action sends, and those that are needed
    for the next action; but none after a message that ``rank`` has not sent.
    """
    due = []
    while upcoming and upcoming[0].receiver == rank:
        message = upcoming[0]
        if message.sent_after >= position and message.needed_before > following:
            break
        due.append(upcoming.popleft())
    return due


def _by_rank(stages: Iterable[int], rank_of: Sequence[int]) -> Mapping[int, list[int]]:
    found: dict[int, list[int]] = {}
    for stage in stages:
        found.setdefault(rank_of[stage], []).append(stage)
    return found
