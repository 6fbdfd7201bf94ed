"""Compares `solve` with all placements of small problems, and checks its rules on larger ones."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from placements import assert_valid_plan
from problems import follows_rules, least_load, random_problem, tight_problem
from torch import nn

from benchmarks.scale import layered_problem
from placer.partition import choose, solve, stage_loads
from placer.partition.solver.problem import simple_bound
from placer.partition.units import depth_first_order, unit_graph
from placer.program import lower


def test_answers_against_all_placements() -> None:
    best = solved = 0
    for seed in [*range(25), 550]:  # in 550 the last unit of the order is no sink of all others
        problem = random_problem(seed)
        least = least_load(problem)
        found = solve(problem)
        if found is None:
            continue
        solved += 1
        assert follows_rules(problem, found), seed
        value = stage_loads(problem, found).max()
        assert least * (1 - 1e-9) <= value <= 1.2 * least, seed
        assert simple_bound(problem) <= least * (1 + 1e-9), seed
        best += value <= least * (1 + 1e-9)
    assert solved >= 22
    assert best >= 0.9 * solved


def test_memory_parts_what_is_joined_for_time() -> None:
    problem = tight_problem()
    stage_of = solve(problem)
    assert stage_of is not None and stage_of.tolist() == [0, 0, 0, 1, 1]
    assert solve(tight_problem(budget=3.0)) is None
    named = tuple(
        dataclasses.replace(slot, device=name)
        for slot, name in zip(problem.slots, ("first", "second"), strict=True)
    )
    crossed = dataclasses.replace(problem, slots=named, pins={0: "second", 4: "first"})
    assert solve(crossed) is None


def test_pins_and_budgets_are_kept() -> None:
    problem = layered_problem(301, 3)
    slots = tuple(
        dataclasses.replace(slot, device=f"d{q}", budget=float(slot.nbytes.sum()) * 0.45)
        for q, slot in enumerate(problem.slots)
    )
    problem = dataclasses.replace(problem, slots=slots, pins={3: "d0", 290: "d2"})
    stage_of = solve(problem)
    assert stage_of is not None
    assert follows_rules(problem, stage_of)
    value = stage_loads(problem, stage_of).max()
    assert simple_bound(problem) <= value <= 1.2 * simple_bound(problem)


class _Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.ModuleList(nn.Linear(8, 8) for _ in range(6)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for a, b in zip(self.a, self.b, strict=True):
            x, y = a(x).relu(), b(y).relu()
        return x + y


def test_a_depth_first_order_has_one_tower_after_the_other() -> None:
    program = lower(_Towers(), (torch.ones(2, 8),))
    units = unit_graph(program)
    order = depth_first_order(units)
    assert sorted(order) == sorted(units)
    place = {unit: i for i, unit in enumerate(order)}
    assert all(place[a] < place[b] for a, b in units.edges)
    layers = [program.nodes[program.order[unit]].layer for unit in order]
    assert len(list(itertools.groupby(layer[0] for layer in layers if layer))) == 2


def test_many_units_are_not_solved_but_ordered_depth_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choose, "_MOST_SOLVED", 10)
    monkeypatch.setattr(choose, "solve", None)
    spec = {"devices": [{"name": f"cuda:{i}", "kind": "a100"} for i in range(2)]}
    assert_valid_plan(_Towers(), {**spec, "objective": "bottleneck"}, (torch.ones(2, 8),))
