"""No placement is below the bound on peaks, for random graphs and placements (also noncontiguous)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import placer
from placer.planner.build import build_plan
from placer.program import lower
from placer.spec import PlacementSpec

pytestmark = pytest.mark.usefixtures("one_capture")

_WIDTH = 16


class Drawn(nn.Module):
    """Operations on values of one shape; ``steps`` says what each does and what it reads."""

    def __init__(self, steps: list[tuple[str, int, int]], *, tied: bool) -> None:
        super().__init__()
        self.steps = steps
        sizes = {"linear": _WIDTH, "wide": 8 * _WIDTH, "cat": 2 * _WIDTH, "split": 2 * _WIDTH}
        self.layers = nn.ModuleDict()
        for i, (kind, *_) in enumerate(steps):
            if kind == "wide":
                layer: nn.Module = nn.Sequential(
                    nn.Linear(_WIDTH, 8 * _WIDTH), nn.ReLU(), nn.Linear(8 * _WIDTH, _WIDTH)
                )
            elif kind == "split":
                layer = nn.Linear(_WIDTH, 2 * _WIDTH)
            elif kind in sizes:
                layer = nn.Linear(sizes[kind], _WIDTH)
            else:
                continue
            self.layers[str(i)] = layer
        linear = [m for m in self.layers.values() if isinstance(m, nn.Linear)]
        same = [m for m in linear if m.weight.shape == (_WIDTH, _WIDTH)]
        if tied and len(same) > 1:
            same[-1].weight = same[0].weight

    def forward(self, x: Tensor) -> Tensor:
        values = [x, torch.tanh(x)]
        for i, (kind, a, b) in enumerate(self.steps):
            one, other = values[a % len(values)], values[b % len(values)]
            if kind == "cat":
                made = self.layers[str(i)](torch.cat([one, other], 1))
            elif kind == "split":  # readers save parts of one storage
                made, second = self.layers[str(i)](one).chunk(2, 1)
                values.append(second)
            elif kind == "mul":
                made = one * other
            elif kind == "gelu":
                made = nn.functional.gelu(one)
            else:
                made = self.layers[str(i)](one)
            values.append(made)
        return torch.stack(values[1:]).sum(0) if len(values) < 6 else values[-1] + values[-2]


@st.composite
def cases(draw: Any) -> tuple[nn.Module, dict[str, Any], list[int]]:
    kinds = st.sampled_from(["linear", "wide", "cat", "split", "mul", "gelu"])
    places = st.integers(0, 9)
    steps = draw(st.lists(st.tuples(kinds, places, places), min_size=1, max_size=8))
    model = Drawn(steps, tied=draw(st.booleans()))
    layers = [f"layers.{name}" for name in model.layers]
    count = draw(st.integers(2, 4))
    devices: list[dict[str, Any]] = [{"name": f"cpu:{i}"} for i in range(count)]
    if draw(st.booleans()):  # so large that all fit
        for device in devices:
            device["memory"] = draw(st.sampled_from([10**6, 10**7]))
    spec = {
        "devices": devices,
        "objective": "memory",
        "microbatches": draw(st.sampled_from([1, 1, 1, 3])),
        "schedule": draw(st.sampled_from(["GPipe", "1F1B"])),
        "training": draw(st.sampled_from([True, True, False])),
        "optimizer": draw(st.sampled_from(["adam", "sgd"])),
        "checkpoint": draw(st.sampled_from([[], [], [], ["**"], layers[:1]])),
        "offload": draw(st.sampled_from([[], [], [], layers[1:2]])),
        "reserve": draw(st.sampled_from([0, 500])),
    }
    homes = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=12))
    return model, spec, homes


@given(cases())
def test_no_placement_is_below_the_bound(case: tuple[nn.Module, dict[str, Any], list[int]]) -> None:
    """With nodes anywhere and devices repeated in any order, the bound is below all peaks."""
    model, spec_data, homes = case
    spec, x = PlacementSpec(**spec_data), torch.randn(6, _WIDTH)
    program = lower(model, (x,))
    bound = build_plan(program, spec, [x]).optimality.lower_bound
    names = [device.name for device in spec.devices]
    pins = {node: names[homes[i % len(homes)]] for i, node in enumerate(program.order)}
    pinned = build_plan(program, spec, [x], pins=pins).optimality
    assert pinned.lower_bound > 0 or not list(model.parameters())  # nothing to bound
    assert pinned.lower_bound <= pinned.value and pinned.value >= bound * (1 - 1e-9)


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_the_bound_is_an_even_share_or_the_largest_operation(objective: str) -> None:
    layers = [nn.Linear(256, 256) for _ in range(4)]
    x = torch.randn(512, 256)
    for last, near in ((nn.Linear(256, 256), 0.3), (nn.Linear(256, 8192), 0.15)):
        spec = {"devices": ["cpu:0", "cpu:1"], "objective": objective, "optimizer": "sgd"}
        found = placer.make_plan(nn.Sequential(*layers, last), spec, x).optimality
        assert 0 <= found.above < near, (objective, last)


def test_the_bound_on_peaks_counts_the_step_of_the_optimizer() -> None:
    """Parameters, gradients, two states of Adam and square roots of the largest layer."""
    layers = [nn.Linear(64, 64), nn.Linear(64, 2**14, bias=False), nn.Linear(2**14, 64, bias=False)]
    spec = {"devices": ["cuda:0", "cuda:1", "cuda:2"], "objective": "memory"}
    found = placer.make_plan(nn.Sequential(*layers), spec, torch.randn(1, 64)).optimality
    assert found.lower_bound == pytest.approx(5 * 4 * 64 * 2**14, rel=0.01)
    assert found.above < 0.05
