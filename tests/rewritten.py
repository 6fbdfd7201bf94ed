"""A pass that changes graphs, for tests: it replaces every ``nn.ReLU`` by two nodes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

import placer
from placer.program import Program, register_rewrite, with_graph
from placer.spec.rewrite import Rewrite

RELU = (Rewrite(name="relu in two nodes", settings={"above": 0}),)
TWO = {
    "devices": ["cuda:0", "cuda:1"],
    "layers": {"first": "cuda:0", "last": "cuda:1"},
    "microbatches": 2,
}


@register_rewrite("relu in two nodes")
def relu_in_two_nodes(program: Program, settings: Mapping[str, object]) -> Program:
    """Multiply by the mask of what is larger than ``above``."""
    graph, layer_of = fx.Graph(), dict(program.layers)
    copies: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        module = program.model.get_submodule(node.target) if node.op == "call_module" else None
        if not isinstance(module, nn.ReLU):
            copies[node] = graph.node_copy(node, copies.__getitem__)
            continue
        x = copies[node.args[0]]
        mask = graph.call_function(torch.gt, (x, settings["above"]))
        copies[node] = graph.call_function(torch.mul, (x, mask))
        layer_of |= dict.fromkeys((mask.name, copies[node].name), layer_of.pop(node.name))
    return with_graph(program, graph, layer_of)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.last = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)).mean(2)


def batch(rows: int = 4, size: int = 8) -> Tensor:
    return torch.randn(rows, 3, size, size, dtype=torch.float64)


def loss_of(result: Tensor) -> Tensor:
    return result.square().mean()


def assert_equal_step(placed: placer.PlacedModule, plain: Net, x: Tensor, slices: int) -> None:
    """Compare the loss and gradients of one step; a norm sees one slice of the batch at a time."""
    plain.zero_grad()
    losses = [loss_of(plain(part)) / slices for part in x.chunk(slices)]
    torch.stack(losses).sum().backward()
    placed.zero_grad()
    loss = placed.step(x, loss_fn=loss_of)
    torch.testing.assert_close(loss, torch.stack(losses).sum().detach())
    expected = dict(plain.named_parameters())
    for name, parameter in placed.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-10, atol=1e-12)


def train_on_ranks(plan: placer.Plan) -> None:
    """In a job: steps with batches of other sizes than the planned one."""
    torch.manual_seed(0)
    plain, sizes = Net().double(), ((8, 8), (12, 8), (8, 12))
    batches = [batch(*size) for size in sizes]
    placed = placer.compile(copy.deepcopy(plain), plan, batches[0])
    for x in batches:
        assert_equal_step(placed, plain, x, plan.replicas * plan.microbatches)


def make_rewritten_plan(**fields: Any) -> placer.Plan:
    """A plan of `Net` on two devices."""
    torch.manual_seed(0)
    return placer.make_plan(Net().double(), {**TWO, **fields}, batch(8), rewrites=RELU)
