"""Which nodes a region has."""

from __future__ import annotations

import models
import pytest
import torch
from torch import Tensor, nn

import placer
from placer.program import Program, lower
from placer.regions import region_keys


def _labels(program: Program, *layers: str) -> dict[str, str]:
    """Node -> the label of its region, for regions of ``layers`` and all below them."""
    below = {p for p, _ in program.model.named_modules() if any(_in(p, layer) for layer in layers)}
    keys = region_keys(program, below, ())
    return {n: key.label for n, key in zip(program.order, keys, strict=True) if key is not None}


def _in(path: str, layer: str) -> bool:
    return path == layer or path.startswith(layer + ".")


def test_the_outermost_layer_is_the_region() -> None:
    program = lower(models.TiedTransformer(), (torch.randint(0, 17, (2, 6)),), {})
    assert set(_labels(program, "blocks").values()) == {"blocks"}
    assert set(_labels(program, "blocks.0", "blocks.1").values()) == {"blocks.0", "blocks.1"}


def test_a_write_may_follow_the_region_that_made_the_memory_but_not_begin_one() -> None:
    """bn's result is written to by relu: run again, bn makes it anew, and relu would read what it wrote."""
    program = lower(models.InPlace(), (torch.randn(2, 2, 5, 5),), {})
    assert "bn" in _labels(program, "bn")
    assert "relu" not in _labels(program, "relu")
    assert "bn" in _labels(program, "bn", "relu")


def test_what_is_offloaded_has_all_nodes_that_share_written_memory() -> None:
    program = lower(models.InPlace(), (torch.randn(2, 2, 5, 5),), {})
    keys = region_keys(program, (), ("bn",))
    assert keys[program.order.index("bn")] is None


class ReadsAndCounts(nn.Module):
    """One layer reads a buffer that another one writes later."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.ones(()))
        self.reads = Reads()
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.reads(self.out(x), self.calls)
        self.calls.add_(1)
        return self.out(y)


class Reads(nn.Module):
    def forward(self, x: Tensor, calls: Tensor) -> Tensor:
        return torch.tanh(x * calls)


def test_no_region_reads_state_that_is_written_after_it() -> None:
    """Run again, it would read what was written."""
    program = lower(ReadsAndCounts(), (torch.randn(2, 4),), {})
    assert "mul" not in _labels(program, "reads")


class WritesToItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.hidden = nn.Linear(4, 4)
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(self.act(x)))


def test_a_write_to_the_models_input_is_in_no_region() -> None:
    """Run again, it would read what it wrote."""
    program = lower(WritesToItsInput(), (torch.randn(2, 4),), {})
    assert set(_labels(program, "act", "hidden", "out")) == {"out"}


def test_the_plan_lists_layers_and_regions_and_keeps_them_in_its_file(tmp_path: object) -> None:
    from placer.plan.store import plan_from_json, plan_to_json

    model, x = models.ConvNet(), torch.randn(2, 1, 8, 8)
    spec = {"devices": ["cpu:0", "cpu:1"], "checkpoint": ["conv*"], "offload": ["fc1"]}
    plan = placer.make_plan(model, spec, (x,))
    assert plan.checkpoint == ("conv1", "conv2") and plan.offload == ("fc1",)
    assert any(stage.regions for stage in plan.stages)
    assert plan_from_json(plan_to_json(plan)) == plan


def test_a_pattern_that_matches_nothing_is_a_spec_error() -> None:
    with pytest.raises(placer.SpecError, match="did you mean 'conv1'"):
        placer.make_plan(
            models.ConvNet(),
            {"devices": ["cpu"], "checkpoint": ["konv1"]},
            (torch.randn(2, 1, 8, 8),),
        )
