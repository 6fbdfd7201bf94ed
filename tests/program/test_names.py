"""Node names: the same graph is named the same however it was recorded."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import placer
from placer.program import capture_model


class WorksOutOnce(nn.Module):
    """Reads sizes that nothing needs, in its first forward of the process only."""

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
    first, second = capture_model(model, (x,)), capture_model(model, (x,))
    assert _CACHE
    assert first.fingerprint == second.fingerprint
    assert first.order == second.order
    assert first.layer_of == second.layer_of


def test_a_plan_made_from_the_first_recording_serves_the_second() -> None:
    _CACHE.clear()
    model, x = WorksOutOnce(), torch.zeros(2, 4)
    plan = placer.make_plan(model, {"devices": ["cpu:0", "cpu:1"]}, (x,))
    assert placer.simulate(model, plan, (x,)).step_ok
    placed = placer.compile(model, plan, (x,), run_on="cpu")
    torch.testing.assert_close(placed(x), model(x))
