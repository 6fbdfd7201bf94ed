"""No placement is below the bound on peaks, for random graphs and placements (also noncontiguous)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from captured import captured_once
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from unet3d import unet3d

import placer
from placer.partition import choose
from placer.partition.bound import least_peak
from placer.planner.build import build_plan
from placer.program import Program, capture_model
from placer.spec import PlacementSpec

_WIDTH = 16


@pytest.fixture(autouse=True)
def _one_capture() -> Iterator[None]:
    with captured_once():
        yield


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


def _bound(program: Program, spec: PlacementSpec, x: Tensor) -> float:
    """The planner's bound if no layer is pinned, before it is capped at the answer."""
    found = []

    def watched(*args: Any) -> float:
        found.append(least_peak(*args))
        return found[-1]

    with mock.patch.object(choose, "least_peak", watched):
        build_plan(program, spec, [x])
    return found[-1] if found else 0.0


@settings(max_examples=10, derandomize=True)
@given(cases())
def test_no_placement_is_below_the_bound(case: tuple[nn.Module, dict[str, Any], list[int]]) -> None:
    """With nodes anywhere and devices repeated in any order, the bound is below all peaks."""
    model, spec_data, homes = case
    spec, x = PlacementSpec(**spec_data), torch.randn(6, _WIDTH)
    program = capture_model(model, (x,))
    bound = _bound(program, spec, x)
    names = [device.name for device in spec.devices]
    pins = {node: names[homes[i % len(homes)]] for i, node in enumerate(program.order)}
    for chosen in ({}, pins):
        plan = build_plan(program, spec, [x], pins=chosen)
        assert plan.optimality is not None
        assert plan.optimality.value >= bound * (1 - 1e-9)


@pytest.mark.parametrize("count", [2, 8])
def test_the_bound_is_near_where_few_operations_are_large(count: int) -> None:
    """The top level of a U-Net: one convolution for eight devices, its whole last part for two."""
    with torch.device("meta"):
        model, x = unet3d(width=8, depth=3), torch.empty(1, 1, 32, 32, 32)
    spec = {"devices": [f"cpu:{i}" for i in range(count)], "objective": "memory"}
    optimality = placer.make_plan(model, spec, (x,)).optimality
    assert optimality is not None
    assert 0.9 * optimality.value < optimality.lower_bound
    assert count < 8 or optimality.above <= 1e-9
