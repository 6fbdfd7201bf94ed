"""Messages between ranks: each value goes once, straight to its reader, and no wait is circular."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence

import pytest

from placer.schedule import (
    SCHEDULES,
    Action,
    Flow,
    Message,
    find_messages,
    linearize,
    make_schedule,
    schedule_on,
    take_due_receives,
)


def random_flows(rng: random.Random, stages: int) -> list[Flow]:
    """A chain, and values that skip stages; some have no gradient, or from some readers only."""
    flows = [
        Flow(name=f"chain {s}", maker=s, readers=(s + 1,), gradient_readers=frozenset((s + 1,)))
        for s in range(stages - 1)
    ]
    for number in range(rng.randrange(2 * stages)):
        if stages < 2:
            break
        maker = rng.randrange(stages - 1)
        readers = sorted(rng.sample(range(maker + 1, stages), rng.randint(1, stages - 1 - maker)))
        gradients = frozenset(reader for reader in readers if rng.random() < 0.7)
        flows.append(
            Flow(
                name=f"skip {number}",
                maker=maker,
                readers=tuple(readers),
                gradient_readers=gradients,
            )
        )
    return sorted(flows, key=lambda flow: flow.maker)


def run_ranks(order: Sequence[Action], messages: Sequence[Message], rank_of: Sequence[int]) -> None:
    """Run every rank on its own, as far as it gets, where a rank's messages go one by one.

    That is how NCCL does it with one communicator, and harder than gloo: a message is through when both
    its ends have come to it, and nothing that a rank starts overtakes what it started before. A rank does
    an action when it has received what it needs, and never waits for a send.
    """
    ranks = max(rank_of) + 1
    position = {action: index for index, action in enumerate(order)}
    todo = [deque(a for a in order if rank_of[a.stage_index] == rank) for rank in range(ranks)]
    # For each rank the messages that it has not yet started to send or to receive, and those not through.
    upcoming = [deque(m for m in messages if r in (m.sender, m.receiver)) for r in range(ranks)]
    started: list[deque[Message]] = [deque() for _ in range(ranks)]
    done: set[Message] = set()

    def deliver() -> None:
        ready = deque(range(ranks))
        while ready:
            rank = ready.popleft()
            while started[rank]:
                message = started[rank][0]
                other = message.sender + message.receiver - rank
                if not started[other] or started[other][0] is not message:
                    break
                started[rank].popleft()
                started[other].popleft()
                done.add(message)
                ready.append(other)

    while any(todo):
        progress = False
        for rank in range(ranks):
            while todo[rank]:
                action = todo[rank][0]
                following = position[todo[rank][1] if len(todo[rank]) > 1 else action]
                started[rank] += take_due_receives(
                    upcoming[rank], rank, position=position[action], following=following
                )
                deliver()
                needed = [
                    m
                    for m in messages
                    if m.receiver == rank and m.needed_before == position[action]
                ]
                if any(message not in done for message in needed):
                    break
                todo[rank].popleft()
                sent = [
                    m for m in messages if m.sender == rank and m.sent_after == position[action]
                ]
                for message in sent:  # it is the rank's next one
                    assert upcoming[rank].popleft() is message
                    started[rank].append(message)
                progress = True
        deliver()
        assert progress, f"ranks wait for each other: {[str(q[0]) for q in todo if q]}"
    assert done == set(messages)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages", range(1, 9))
def test_no_wait_is_circular(name: str, stages: int) -> None:
    """All schedules, 1 to 8 stages, 1 to 16 micro-batches, on as many ranks or fewer, with skips.

    Stages are dealt out to the ranks in turn, and once at random.
    """
    for count in range(1, 17):
        rng = random.Random(f"{name} {stages} {count}")
        for rank_of in (*in_turn(stages), at_random(rng, stages)):
            flows = random_flows(rng, stages)
            order = linearize(schedule_on(name, rank_of, count))
            messages = find_messages(order, lambda _, f=flows: f, rank_of)  # type: ignore[misc]
            assert [m.sent_after for m in messages] == sorted(m.sent_after for m in messages)
            assert all(m.sent_after < m.needed_before for m in messages)
            run_ranks(order, messages, rank_of)


def in_turn(stages: int) -> list[tuple[int, ...]]:
    """Per number of ranks that ``stages`` can be dealt out to evenly, the rank of each."""
    counts = [ranks for ranks in range(1, stages + 1) if stages % ranks == 0]
    return [tuple(stage % ranks for stage in range(stages)) for ranks in counts]


def at_random(rng: random.Random, stages: int) -> tuple[int, ...]:
    """A rank for each stage, numbered in the order in which they come."""
    found = [rng.randrange(stages) for _ in range(stages)]
    number = {rank: index for index, rank in enumerate(dict.fromkeys(found))}
    return tuple(number[rank] for rank in found)


def test_what_waits_in_a_circle_is_found() -> None:
    """The check itself: two ranks that each need the other's later message first."""
    order = linearize(make_schedule("GPipe", 2, 1))
    first, last = (
        Message(
            kind="value",
            name=name,
            microbatch_index=0,
            sender=sender,
            receiver=1 - sender,
            sent_after=after,
            needed_before=before,
        )
        for name, sender, after, before in (("a", 0, 3, 1), ("b", 1, 1, 0))
    )
    with pytest.raises(AssertionError, match="wait for each other"):
        run_ranks(order, [last, first], (0, 1))


def test_a_value_that_skips_stages_is_sent_once_to_each_rank_and_comes_back_once() -> None:
    """Stage 0's value goes to rank 1, which reads it in stages 1 and 3, and to rank 0 itself."""
    flow = Flow(name="v", maker=0, readers=(1, 2, 3), gradient_readers=frozenset((1, 3)))
    order = linearize(make_schedule("GPipe", 4, 2, num_ranks=2))
    messages = find_messages(order, lambda _: [flow], (0, 1, 0, 1))
    assert Counter((m.kind, m.sender, m.receiver) for m in messages) == {
        ("value", 0, 1): 2,
        ("gradient", 1, 0): 2,
    }
    at = {str(action): position for position, action in enumerate(order)}
    back = next(m for m in messages if m.kind == "gradient" and m.microbatch_index == 1)
    assert back.sent_after == at["1B1"] and back.needed_before == at["0B1"]


def test_messages_of_a_split_backward_come_after_its_first_half() -> None:
    flow = Flow(name="v", maker=0, readers=(1,), gradient_readers=frozenset((1,)))
    order = linearize(make_schedule("InterleavedZeroBubble", 2, 1))
    (_, back) = find_messages(order, lambda _: [flow], (0, 1))
    at = {str(action): position for position, action in enumerate(order)}
    assert back.sent_after == at["1I0"] < at["1W0"]
