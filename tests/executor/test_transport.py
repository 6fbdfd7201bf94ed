"""The transport between ranks, over a channel that is stricter than any real one."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_structure

from placer.executor.distributed.messages.crossings import Crossings, CrossingValue, TensorSpec
from placer.executor.distributed.messages.transport import MessageTransport
from placer.executor.places.place import Place
from placer.schedule import SCHEDULES, Action, find_messages, linearize, make_schedule

STAGES = 4


class StrictChannels:
    """A rank's messages go one by one, as over NCCL with one communicator: when both ends came to one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # For each rank what it has started and what is not through: the two ends, and the tensor.
        self._queues: dict[int, deque[tuple[tuple[int, int], Tensor]]] = defaultdict(deque)

    def of(self, rank: int) -> Any:
        channels = self

        class Channel:
            def send(self, tensor: Tensor, peer: int) -> Any:
                return channels._add(rank, (rank, peer), tensor)

            def receive(self, tensor: Tensor, peer: int) -> Any:
                return channels._add(rank, (peer, rank), tensor)

        return Channel()

    def _add(self, rank: int, ends: tuple[int, int], tensor: Tensor) -> Any:
        with self._changed:
            self._queues[rank].append((ends, tensor))
            self._deliver()
            self._changed.notify_all()

        def wait() -> None:
            with self._changed:
                through = lambda: all(t is not tensor for _, t in self._queues[rank])  # noqa: E731
                assert self._changed.wait_for(through, timeout=20), "waits for ever"

        return wait

    def _deliver(self) -> None:
        moved = True
        while moved:
            moved = False
            for sender, receiver in [q[0][0] for q in self._queues.values() if q]:
                heads = [q[0] for q in (self._queues[sender], self._queues[receiver]) if q]
                if [ends for ends, _ in heads] == 2 * [(sender, receiver)]:
                    heads[1][1].copy_(heads[0][1])
                    self._queues[sender].popleft()
                    self._queues[receiver].popleft()
                    moved = True


class Numbers:
    """Stands in for the run of a micro-batch: values and gradients are numbers that tell what they are."""

    def __init__(self, microbatch: int) -> None:
        self.microbatch = microbatch
        self.outputs: dict[str, Any] = {}
        self.values: dict[str, float] = {}
        self.gradients: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.taken: list[str] = []

    def put(self, name: str, value: Any, place: Place) -> None:
        self.values[name] = value[0].item()

    def take_gradient(self, key: tuple[str, int]) -> Tensor | None:
        self.taken.append(key[0])
        return torch.full((2,), 100.0 + self.microbatch) if key[0] != "lacks" else None

    def add_gradient(self, key: tuple[str, int], gradient: Tensor, place: Place) -> None:
        self.gradients[key].append(float(gradient[0]))


def crossings(*, may_lack: bool) -> Crossings:
    """A chain of values, one that skips two stages, and one whose gradient lacks."""
    spec = TensorSpec((2,), torch.float32, True)
    named = {f"chain {s}": (s, (s + 1,)) for s in range(STAGES - 1)}
    named |= {"skip": (0, (2, 3)), "lacks": (1, (3,))}
    values = {
        name: CrossingValue(
            name=name,
            maker=maker,
            readers=readers,
            spec=tree_structure(torch.empty(0)),
            leaves=(spec,),
            gradient_readers=(frozenset(readers),),
        )
        for name, (maker, readers) in sorted(named.items(), key=lambda item: item[1][0])
    }
    staged: Any = None
    return Crossings(staged=staged, values=values, result=(spec,) * (1 + may_lack))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_bring_each_other_what_they_need(schedule: str, ranks: int) -> None:
    count = 4
    known = crossings(may_lack=True)
    table = make_schedule(schedule, STAGES, count, num_ranks=ranks)
    order, rank_of = linearize(table), table.rank_of
    messages = find_messages(order, lambda _: known.flows, rank_of)
    channels = StrictChannels()
    runs = [{m: Numbers(m) for m in range(count)} for _ in range(ranks)]
    errors: list[BaseException] = []

    def run_rank(rank: int) -> None:
        transport = MessageTransport(
            messages,
            dict.fromkeys(range(count), known),
            order,
            rank_of,
            rank=rank,
            place=Place("here", torch.device("cpu")),
            channel=channels.of(rank),
        )
        try:
            for action in order:
                if action.stage_index % ranks == rank:
                    run: Any = runs[rank][action.microbatch_index]
                    transport.receive(action, run)
                    _do(action, run, known)
                    transport.check(action, run)
                    transport.send(action, run)
            transport.finish()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for rank in range(ranks):
        for microbatch, run in runs[rank].items():
            for name, value in known.values.items():
                maker = value.maker % ranks
                readers = {reader % ranks for reader in value.readers} - {maker}
                if rank in readers:
                    assert run.values[name] == microbatch
                if rank == maker:
                    expected = [] if name == "lacks" else [100.0 + microbatch] * len(readers)
                    assert run.gradients[name, 0] == expected, name


def _do(action: Action, run: Numbers, known: Crossings) -> None:
    run.outputs = {}
    if action.kind == "F":
        made = torch.full((2,), float(run.microbatch), requires_grad=True)
        run.outputs = {n: made for n, v in known.values.items() if v.maker == action.stage_index}
