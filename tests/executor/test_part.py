"""The part of a model that a rank holds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import placer
from placer.emit import emit_stages
from placer.executor.distributed.job.ownership import build_part, find_ownership
from placer.program import lower
from placer.program.objects.copying import is_tree


class RegisteredTwice(nn.Module):
    """Its first block is called as ``first`` and stands in ``blocks``, too, as in MONAI's DynUNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.blocks = nn.ModuleList([self.first])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.first(x))
        return result


@pytest.mark.parametrize("tree", [False, True])
def test_a_module_under_two_paths_keeps_what_is_called_by_one_of_them(tree: bool) -> None:
    model, x = RegisteredTwice(), torch.randn(2, 4)
    spec = placer.PlacementSpec(
        devices=["cpu:0", "cpu:1"], layers={"first": "cpu:0", "head": "cpu:1"}
    )
    program = lower(model, (x,))
    staged = emit_stages(program, placer.make_plan(model, spec, x))
    ownership = find_ownership(model, staged, (0, 1))
    parts = [
        build_part(model, staged, ownership, i, torch.device("cpu"), tree=tree) for i in (0, 1)
    ]
    assert [name for name, _ in parts[0].first.named_children()] == ["0", "1", "2"]
    assert parts[0].blocks[0] is parts[0].first
    without_weights = [] if tree else ["first", "blocks"]
    assert [name for name, _ in parts[1].named_children()] == [*without_weights, "head"]
    assert [name for name, _ in model.named_children()] == ["first", "blocks", "head"]
    names = [[name for name, _ in part.named_parameters()] for part in parts]
    assert names[0] == [f"first.{i}.{leaf}" for i in (0, 2) for leaf in ("weight", "bias")]
    assert names[1] == ["head.weight", "head.bias"]


def test_a_model_is_a_tree_if_only_its_tables_refer_to_its_modules() -> None:
    model = RegisteredTwice()
    assert is_tree(model)
    model.head.other = [model.first]  # type: ignore[assignment]
    assert not is_tree(model)
    model = RegisteredTwice()
    model.move = model.forward  # type: ignore[assignment]
    assert not is_tree(model)
    model = RegisteredTwice()
    model.head.register_forward_hook(lambda *_: None)
    assert not is_tree(model)
