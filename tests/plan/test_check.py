"""Plans whose stages are not valid for the model: they are refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import placer
from placer.emit import emit_stages
from placer.errors import PlanError
from placer.plan.check import check_plan
from placer.program import lower


class Net(nn.Module):
    """Has what plans refer to: a skip, an operation in place, dropout, a view."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.drop, self.act = nn.Dropout(0.1), nn.ReLU(inplace=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.drop(self.a(x)))
        z = self.drop(self.b(y)).view(-1, 4)
        return self.head(z + y)


X = torch.randn(4, 4)
SPEC = {
    "devices": ["cuda:0", "cuda:1"],
    "layers": {"a": "cuda:0", "head": "cuda:1"},
    "checkpoint": ["a"],
    "microbatches": 2,
    "replicas": 2,
}


def test_stages_in_an_order_that_would_compute_something_else_are_refused() -> None:
    program = lower(Net(), (X,))
    plan = placer.make_plan(Net(), SPEC, X)
    check_plan(plan, program)
    ordered = [name for stage in plan.stages for name in stage.nodes]
    draws = [name for name in ordered if program.nodes[name].draws]
    assert len(draws) == 2 and program.colocated
    for first, second in [draws, program.colocated[0][:2]]:
        swap = {first: second, second: first}
        stages = tuple(
            dataclasses.replace(stage, nodes=tuple(swap.get(name, name) for name in stage.nodes))
            for stage in plan.stages
        )
        with pytest.raises(PlanError, match=r"comes before|one stage"):
            check_plan(dataclasses.replace(plan, stages=stages), program)


def test_stages_whose_nodes_are_not_all_there_once_and_in_order_are_refused() -> None:
    program = lower(Net(), (X,))
    plan = placer.make_plan(Net(), SPEC, X)
    first, *others = plan.stages
    backwards = dataclasses.replace(first, nodes=first.nodes[::-1])
    for check in (check_plan, lambda plan, program: emit_stages(program, plan)):
        with pytest.raises(PlanError, match="comes before"):
            check(dataclasses.replace(plan, stages=(backwards, *others)), program)
    for nodes, said in [(first.nodes[1:], "on no stage"), (first.nodes * 2, "more than one stage")]:
        stages = (dataclasses.replace(first, nodes=nodes), *others)
        with pytest.raises(PlanError, match=said):
            check_plan(dataclasses.replace(plan, stages=stages), program)
