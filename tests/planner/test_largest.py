"""The largest piece of a model: the plan, the error that no plan fits and ``placer check`` say one number."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import placer
from placer.cost import CostEstimates
from placer.planner.cut_limits import measure_limits
from placer.program import lower
from placer.search.remedies import find_largest_node
from placer.simulation.judge import JudgingPlanner


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_largest_piece_needs_what_a_plan_says_of_its_stage(device: str, optimizer: str) -> None:
    model = nn.Sequential(
        nn.Linear(8, 8), nn.Linear(8, 256), nn.Linear(256, 256), nn.Linear(256, 8)
    )
    x = torch.empty(64, 8)
    home = {"0": 0, "1": 0, "2": 1, "3": 2}
    spec = placer.load_spec(
        {
            "devices": [f"{device}:{i}" for i in range(3)],
            "layers": {layer: f"{device}:{i}" for layer, i in home.items()},
            "optimizer": optimizer,
        }
    )
    program = lower(model, (x,))
    make = JudgingPlanner(program, [x])
    largest = find_largest_node(spec, make)
    assert (largest.node, largest.with_loss) == ("_2", False)
    assert largest.nbytes == make(spec).stages[1].memory.peak
    if device == "cuda":
        limits = measure_limits(program, [x], spec, CostEstimates(program))
        assert limits.largest.peak == largest.nbytes


def test_the_last_piece_has_the_loss() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 512))
    x = torch.empty(4096, 8)
    spec = placer.load_spec(
        {"devices": ["cuda:0", "cuda:1"], "layers": {"0": "cuda:0", "1": "cuda:1"}}
    )
    program = lower(model, (x,))
    make = JudgingPlanner(program, [x])
    largest = find_largest_node(spec, make)
    assert largest.nbytes == make(spec).stages[1].memory.peak
    assert "(1) with the loss, needs" in largest.describe()
