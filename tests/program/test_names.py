"""Node names: the same graph is named the same however it was recorded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import placer
from placer.program import lower


class WorksOutOnce(nn.Module):
    """Reads sizes that nothing needs, in the first of its layers only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not _CACHE:
                _CACHE.append(int(x.size(0) * 2))
            x = layer(x.reshape(x.size(0), -1)) * 2
        return x


_CACHE: list[int] = []


def test_a_graph_recorded_again_has_the_same_names() -> None:
    model, x = WorksOutOnce(), torch.zeros(2, 4)
    first, second = lower(model, (x,)), lower(model, (x,))
    assert first.fingerprint == second.fingerprint
    assert first.order == second.order
    assert first.nodes == second.nodes


def test_a_graph_has_what_forward_does_and_nothing_else() -> None:
    program = lower(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.zeros(2, 4),))
    assert [node.op for node in program.graph.nodes] == [
        "placeholder",
        "call_module",
        "call_module",
        "output",
    ]


def test_a_plan_made_from_the_first_recording_serves_the_second() -> None:
    _CACHE.clear()
    model, x = WorksOutOnce(), torch.zeros(2, 4)
    plan = placer.make_plan(model, {"devices": ["cpu:0", "cpu:1"]}, (x,))
    assert placer.simulate(model, plan, (x,)).step_ok
    placed = placer.compile(model, plan, (x,), run_on="cpu")
    torch.testing.assert_close(placed(x), model(x))


class MultipliesInSomeOrder(nn.Module):
    """Multiplies sizes in the order of ``axes``, as einops does in that of a set of strings."""

    axes: tuple[int, ...] = (1, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        sizes, known, around = x.shape, 1, 2
        for axis in self.axes:
            known *= sizes[axis]
            around = sizes[axis] + around
        return x.reshape(-1, known) * known + around * x.size(0)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("axes", [(1, 3, 2), (3, 2, 1), (2, 1, 3)])
def test_the_order_in_which_sizes_are_multiplied_does_not_matter(axes: tuple[int, ...]) -> None:
    # Sets of strings have another order in every process; ranks compare their fingerprints.
    model, x = MultipliesInSomeOrder(), torch.randn(2, 3, 4, 5)
    first = lower(model, (x,))
    other = type("MultipliesInSomeOrder", (MultipliesInSomeOrder,), {"axes": axes})()
    second = lower(other, (x,))
    assert second.fingerprint == first.fingerprint
    assert second.order == first.order
    placed = placer.compile(other, {"devices": ["cpu:0"]}, (x,), run_on="cpu")
    larger = torch.randn(6, 3, 4, 5)
    torch.testing.assert_close(placed(larger), model(larger), rtol=0, atol=0)
