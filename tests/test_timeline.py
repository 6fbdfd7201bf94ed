"""The timeline's sweep, and the model of torch's caching allocator that runs over it."""

from __future__ import annotations

import itertools
import random
from typing import Any

import networkx as nx
import pytest

from placer.timeline import (
    Block,
    CachingAllocator,
    Operation,
    OutOfMemory,
    Recorder,
    StepPosition,
    Timeline,
    device_usage,
    run,
)

KIB, MIB = 2**10, 2**20


def block(nbytes: int, device: str = "cuda:0", node: str = "") -> Block:
    where = StepPosition(phase="forward", node=node)
    return Block(
        device=device, nbytes=nbytes, kind="saved", name=node, layer="", shape=(), where=where
    )


def record(*sizes: int) -> Timeline:
    """n > 0 allocates n bytes; n < 0 frees the last block of that size."""
    recorder, live = Recorder(), {}
    for size in sizes:
        if size > 0:
            live[size] = recorder.allocate(block(size))
        else:
            recorder.free(live[-size])
    return recorder.timeline()


def test_a_peak_is_the_first_moment_that_holds_the_most() -> None:
    recorder = Recorder()
    first = recorder.allocate(block(4, node="a"))
    recorder.allocate(block(7, device="cuda:1", node="b"))
    second = recorder.allocate(block(6, node="c"))
    recorder.free(first)
    recorder.allocate(block(4, node="d"))
    recorder.free(second)
    timeline = recorder.timeline()
    peaks = timeline.peaks()
    assert {device: moment.nbytes for device, moment in peaks.items()} == {
        "cuda:0": 10,
        "cuda:1": 7,
    }
    assert peaks["cuda:0"].where.node == "c"
    assert [b.name for b in timeline.live("cuda:0", peaks["cuda:0"])] == ["c", "a"]
    assert [event.kind for event in timeline.on("cuda:0")].count("allocate") == 3


@pytest.mark.parametrize(
    ("sizes", "default", "expandable"),
    [
        ((1,), 2, 2),  # a small segment
        ((MIB,), 2, 2),  # still small
        ((MIB + 1,), 20, 20),  # a middle one
        ((10 * MIB,), 10, 20),  # large: multiples of 2 MiB; an expandable pool grows by 20
        ((11 * MIB,), 12, 20),
        ((3 * MIB, 3 * MIB), 20, 20),  # two blocks of one segment
        ((64 * MIB, -64 * MIB, 40 * MIB), 64, 80),  # what came back is used, the rest split off
        # A hole that the next block does not fit into; an expandable segment grows at its end.
        ((64 * MIB, -64 * MIB, 66 * MIB), 130, 80),
        ((64 * MIB, 8 * MIB, -64 * MIB, 72 * MIB), 156, 160),
        ((512, 513), 2, 2),
    ],
)
def test_segments(sizes: tuple[int, ...], default: int, expandable: int) -> None:
    timeline = record(*sizes)
    assert device_usage(timeline, "cuda:0").reserved == default * MIB
    assert device_usage(timeline, "cuda:0", expandable=True).reserved == expandable * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_the_cache_is_given_back_before_it_is_out_of_memory(*, expandable: bool) -> None:
    allocator = CachingAllocator(expandable=expandable, limit=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert allocator.reserved == 80 * MIB
    assert allocator.flushes == 1
    with pytest.raises(OutOfMemory) as raised:
        allocator.allocate(40 * MIB)
    assert raised.value.reserved == 80 * MIB
    assert raised.value.asked == 40 * MIB


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_what_is_reserved_covers_what_is_live_without_overlap(
    seed: int, *, expandable: bool
) -> None:
    rng = random.Random(seed)
    allocator = CachingAllocator(expandable=expandable, limit=2**40)
    live = []
    for _ in range(400):
        if live and rng.random() < 0.45:
            allocator.free(live.pop(rng.randrange(len(live))))
        else:
            live.append(allocator.allocate(rng.choice([300, 5000, 2 * MIB, 7 * MIB, 31 * MIB])))
        spans = sorted((p.address, p.address + p.nbytes) for p in live)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert allocator.reserved >= sum(p.nbytes for p in live)
    for piece in live:
        allocator.free(piece)
    allocator._flush()
    assert allocator.reserved == 0


@pytest.mark.parametrize("seed", range(5))
def test_operations_run_as_early_as_what_they_wait_for_allows(seed: int) -> None:
    """An operation starts at the end of a longest chain of operations, each waiting for the one before."""
    rng, operations = random.Random(seed), []
    for number in range(60):
        earlier = rng.sample(operations, min(len(operations), rng.randint(0, 2)))
        devices = rng.sample("abcd", rng.randint(1, 2))
        operations.append(
            Operation(
                kind="compute",
                name=str(number),
                on=tuple(devices),
                seconds=rng.randint(0, 9),
                after=tuple(earlier),
            )
        )
    waits = nx.DiGraph()
    waits.add_nodes_from([*range(60), "end"])
    for at, operation in enumerate(operations):
        for before, other in enumerate(operations[:at]):
            if other in operation.after or set(other.on) & set(operation.on):
                waits.add_edge(before, at, seconds=other.seconds)
    start = dict.fromkeys(waits, 0)
    for before in nx.topological_sort(waits):
        for at in waits[before]:
            start[at] = max(start[at], start[before] + waits[before][at]["seconds"])
    spans = run(operations)
    assert [span.start for span in spans] == [start[at] for at in range(60)]
    assert all(s.end - s.start == o.seconds for s, o in zip(spans, operations, strict=True))


def test_a_launch_goes_ahead_of_its_operation_and_a_copy_goes_beside_it() -> None:
    def launched(seconds: int, **fields: Any) -> Operation:
        return Operation(kind="compute", name="", on=("gpu",), seconds=seconds, process="host",
                         launch_seconds=3, **fields)  # fmt: skip

    long, short = launched(10), launched(1)
    copy = Operation(kind="transfer", name="", on=("link",), seconds=20, beside=short)
    spans = run([long, short, copy, launched(1)])
    assert [(span.start, span.end) for span in spans] == [(0, 10), (10, 11), (10, 30), (11, 12)]
    first, second = run([short, launched(1)])  # the device waits for the host
    assert (first.start, first.end, second.start, second.end) == (0, 3, 3, 6)
