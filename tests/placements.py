"""`assert_valid_plan`: the properties of every plan, however it was found."""

from __future__ import annotations

import itertools
from typing import Any

from captured import captured_once
from torch import Tensor, nn

import placer
from placer import api
from placer.planner.build import build_plan
from placer.spec import PlacementSpec, resolve_layers


def estimated_plan(model: nn.Module, spec: Any, args: Any = (), kwargs: Any = None) -> placer.Plan:
    """A plan with estimated peaks, which no dry run has corrected."""
    spec = api.as_spec(spec)
    program, leaves = api.lower_call(model, args, kwargs, spec, ignore_device_moves=False)
    return build_plan(program, spec, leaves)


def assert_valid_plan(
    model: nn.Module,
    spec: Any,
    args: tuple[Tensor, ...],
    plan: placer.Plan | None = None,
    *,
    processes: bool = False,
) -> placer.Plan:
    """Plan ``model`` (or take ``plan``) and check it against the capture and the spec alone.

    Every node on one stage, edges forward, what belongs together together, pins honoured, `fits`
    as the budgets say, transfers as the graph has them, a bound that is one, boundaries in order.
    """
    with captured_once():
        plan = plan or placer.make_plan(model, spec, args, processes=processes)
        program, _ = api.lower_call(model, args, None, plan, ignore_device_moves=False)
    assert plan.processes == processes
    spec = spec if isinstance(spec, PlacementSpec) else PlacementSpec(**spec)
    stage_of = {node: stage.index for stage in plan.stages for node in stage.nodes}
    assert sorted(stage_of) == sorted(program.order)
    assert len(stage_of) == sum(len(stage.nodes) for stage in plan.stages)
    assert [stage.index for stage in plan.stages] == list(range(len(plan.stages)))
    _check_edges(program, plan, stage_of)
    for group in program.colocated:
        assert len({stage_of[node] for node in group}) == 1, group
    _check_devices(model, spec, program, plan, stage_of)
    _check_reasons(program, plan)
    return plan


def _check_edges(program: Any, plan: placer.Plan, stage_of: dict[str, int]) -> None:
    crossing = set()
    for node in program.graph.nodes:
        readers = [user.name for user in node.users]
        for reader in (r for r in readers if node.name in stage_of and r in stage_of):
            assert stage_of[node.name] <= stage_of[reader], (node.name, reader)
            if stage_of[node.name] < stage_of[reader]:
                crossing.add((node.name, stage_of[node.name], stage_of[reader]))
    said = {(t.value, t.source, t.target) for t in plan.transfers}
    assert crossing <= said
    last = len(plan.stages) - 1  # results go to the loss
    assert all(target == last for _, _, target in said - crossing)


def _check_devices(
    model: nn.Module, spec: PlacementSpec, program: Any, plan: placer.Plan, stage_of: Any
) -> None:
    names = {device.name for device in spec.devices}
    device_of = {node: plan.stages[stage].devices[0] for node, stage in stage_of.items()}
    assert set(device_of.values()) <= names
    paths = [name for name, _ in model.named_modules(remove_duplicate=False)]
    pins, _ = resolve_layers(spec.layers, paths)
    for node, layer in program.layers.items():
        group = next((g for g in program.colocated if node in g), (node,))
        if layer in pins and len({pins.get(program.nodes[n].layer) for n in group}) == 1:
            assert device_of[node] == pins[layer], (node, layer)
    fits = [
        device.budget is None or device.peak + device.reserve <= device.budget
        for device in plan.devices
    ]
    assert plan.fits == all(fits)
    for stage in plan.stages:
        m = stage.memory
        assert all(value >= 0 for value in (m.parameters, m.saved, m.transient, m.peak))
        assert m.peak <= next(d.peak for d in plan.devices if d.device == stage.devices[0])


def _check_reasons(program: Any, plan: placer.Plan) -> None:
    optimality = plan.optimality
    assert 0 <= optimality.lower_bound <= optimality.value
    assert [b.index for b in plan.boundaries] == list(range(len(plan.stages) - 1))
    for boundary, (left, right) in zip(
        plan.boundaries, itertools.pairwise(plan.stages), strict=True
    ):
        assert boundary.last in left.nodes and boundary.first in right.nodes
        if optimality.criterion.startswith("seconds of the slowest"):
            assert max(boundary.load_before, boundary.load_after) <= optimality.value * (1 + 1e-9)
    text = plan.explain()
    assert text.count("stage ") >= 2 * (len(plan.stages) - 1)
