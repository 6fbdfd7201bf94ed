"""Compares with all policies of a stage."""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import replace

from placer.cost import CostTable, NodeCost, StoredValue, Work
from placer.cost.operations import Operation
from placer.machine.devices import device_kind
from placer.partition.policy import cheapest
from placer.partition.policy.search import PolicyCache, PolicySearch
from placer.partition.policy.types import Policy, StageLimits
from placer.regions import RegionBoundaries

EVERYWHERE = RegionBoundaries(free=frozenset(range(6)), ending={}, unsafe=frozenset())
KIND = device_kind("cuda:0", "a100")
CHOICES = (
    (Policy(recompute=True),),
    (Policy(offload=True),),
    (Policy(recompute=True), Policy(offload=True)),
)


def _costs(draw: random.Random, count: int) -> CostTable:
    """A chain of nodes; some later nodes also read and save their results."""
    values = []
    for node in range(-1, count):
        readers = {node + 1, *(i for i in range(node + 2, count) if draw.random() < 0.15)}
        readers = {i for i in readers if i < count}
        savers = {i for i in (node, *readers) if i >= 0 and draw.random() < 0.6}
        if readers or savers:
            values.append(
                StoredValue(
                    nbytes=draw.randint(1, 40) * 2**20,
                    producer=node,
                    users=tuple(sorted(readers | {max(node, 0)})),
                    savers=tuple(sorted(savers)),
                )
            )
    flops = [draw.randint(1, 100) * 10**9 for _ in range(count)]
    nodes = [
        NodeCost(
            forward_transient=draw.randint(0, 20) * 2**20,
            backward_transient=draw.randint(0, 40) * 2**20,
        )
        for _ in range(count)
    ]
    return CostTable(
        names=tuple(f"n{i}" for i in range(count)),
        nodes=(*nodes, NodeCost()),
        values=tuple(values),
        results=((),) * count,
        gradients=(),
        added=(),
        readers=((),) * count,
        input_readers=(),
        input_nbytes=(),
        state=(),
        saving=frozenset(node for value in values for node in value.savers),
        work=Work(
            [f"n{i}" for i in range(count)],
            [*([Operation("product", "float32", n, 0, 0)] for n in flops), []],
            [[]] * (count + 1),
        ),
    )


def test_the_best_of_all_is_found_as_a_rule() -> None:
    tried = above = best_found = 0
    for seed in range(40):
        draw = random.Random(seed)
        costs = _costs(draw, 6)
        choices, in_flight = CHOICES[seed % 3], draw.choice([1, 3])
        nodes = range(6)
        stage = PolicySearch(costs, nodes, (), EVERYWHERE, {}, KIND, all_gradients=False)
        ways = stage.search(choices, lambda labels, _: labels)
        free = StageLimits(static=0, budget=float("inf"), in_flight=in_flight, all_gradients=False)
        plain = max(free.peak(way) for way in ways if not way.seconds)
        limits = StageLimits(
            static=0,
            budget=plain * draw.uniform(0.5, 0.95),
            in_flight=in_flight,
            all_gradients=False,
        )
        fitting = [way.seconds for way in ways if limits.peak(way) <= limits.budget]
        found = cheapest.choose_stage_policy(stage, choices, limits)
        if not fitting:
            assert found.peak > limits.budget
            continue
        best = min(fitting)
        assert found.peak <= limits.budget and best * (1 - 1e-9) <= found.seconds
        tried += 1
        above += best > 0
        best_found += found.seconds <= best * 1.001
    assert tried >= 15 and above >= 10 and best_found >= 0.9 * tried, (tried, best_found)


def test_within_the_host_s_memory_the_best_of_all_is_found_as_a_rule() -> None:
    """If host memory is short, some blocks are recomputed instead of offloaded."""
    tried = best_found = 0
    for seed in range(60):
        draw = random.Random(seed)
        costs, choices, nodes = _costs(draw, 6), CHOICES[2], range(6)
        stage = PolicySearch(costs, nodes, (), EVERYWHERE, {}, KIND, all_gradients=False)
        ways = stage.search(choices, lambda labels, _: labels)
        free = StageLimits(static=0, budget=float("inf"), in_flight=1, all_gradients=False)
        limits = replace(free, budget=0.6 * max(free.peak(way) for way in ways if not way.seconds))
        fitting = [way for way in ways if limits.fits(way)]
        unlimited = cheapest.choose_stage_policy(stage, choices, limits)
        if not fitting or not unlimited.hosted:
            continue
        least_hosted = cheapest.least_host_bytes(stage, choices, limits)
        assert min(way.hosted for way in fitting) <= least_hosted <= unlimited.hosted
        within = replace(limits, host_budget=(unlimited.hosted + least_hosted) / 2)
        found = cheapest.choose_stage_policy(stage, choices, within)
        best = min(way.seconds for way in fitting if within.fits(way))
        assert found.hosted <= within.host_budget and found.peak <= limits.budget
        assert best * (1 - 1e-9) <= found.seconds
        tried += 1
        best_found += found.seconds <= best * 1.001
    assert tried >= 20 and best_found >= 0.8 * tried, (tried, best_found)


def test_equal_stages_are_searched_once() -> None:
    """Two stages of equal nodes, one after the other, share a cache; a longer stage has its own."""
    one, before = _costs(random.Random(3), 4), 4
    moved = tuple(
        replace(
            value,
            producer=value.producer + before,
            users=tuple(node + before for node in value.users),
            savers=tuple(node + before for node in value.savers),
        )
        for value in one.values
    )
    seconds = [Operation("product", "float32", (i + 1) * 10**9, 0, 0) for i in range(4)] * 2
    costs = replace(
        one,
        names=tuple(f"n{i}" for i in range(8)),
        nodes=(*one.nodes[:4], *one.nodes[:4], *one.nodes[-1:], NodeCost()),
        values=(*one.values, *moved),
        work=Work([f"n{i}" for i in range(9)], [*([each] for each in seconds), [], []], [[]] * 10),
    )
    costs = replace(costs, names=(*costs.names, "last"))
    boundaries = RegionBoundaries(free=frozenset(range(9)), ending={}, unsafe=frozenset())
    caches: dict[Hashable, PolicyCache] = {}

    def stage(first: int, end: int) -> PolicySearch:
        nodes, earlier = range(first, end), range(first)
        return PolicySearch(
            costs, nodes, earlier, boundaries, {}, KIND, all_gradients=True, caches=caches
        )

    first, second, longer = stage(0, 4), stage(4, 8), stage(0, 5)
    assert first.cache is second.cache is not longer.cache
    limits = StageLimits(static=0, budget=0, in_flight=1, all_gradients=True)
    mine, its = (cheapest.choose_stage_policy(each, CHOICES[0], limits) for each in (first, second))
    assert mine.runs and mine.peak == its.peak
    assert its.runs == tuple(
        (tuple(node + before for node in nodes), policy) for nodes, policy in mine.runs
    )
    alone = PolicySearch(costs, range(4, 8), range(4), boundaries, {}, KIND, all_gradients=True)
    assert cheapest.choose_stage_policy(alone, CHOICES[0], limits) == its
