"""Plans whose file was changed: refused when they are read, or by `placer.compile`, in words."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import placer
from placer.errors import PlacerError, PlanError
from placer.plan.check import check_plan
from placer.plan.store import plan_from_json, plan_to_json
from placer.program import capture_model


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
HUGE = 10**30


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return plan_to_json(placer.make_plan(Net(), SPEC, X))


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value of ``value``; of long lists the first and the last."""
    if path:
        yield path
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = sorted({0, len(value) - 1}) if value else []
    for key in keys:
        yield from _places(value[key], (*path, key))


def _at(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


def _mutations(data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ways to spoil the file: what was done, and the file then."""
    for path in _places(data):
        where = "/" + "/".join(map(str, path))
        value = _at(data, path)
        wrong: list[Any] = [None, HUGE, "nothing like it", []]
        if isinstance(value, bool):
            wrong = [None, 1]
        elif isinstance(value, int | float):
            wrong = [None, HUGE, -1, value + 1, str(value)]
        elif isinstance(value, list) and len(value) > 1:
            wrong += [value + value[:1], value[:-1], value[::-1]]
        for other in wrong:
            if other == value:
                continue
            spoilt = copy.deepcopy(data)
            _at(spoilt, path[:-1])[path[-1]] = other
            yield f"{where} = {str(other)[:40]}", spoilt
        spoilt = copy.deepcopy(data)
        del _at(spoilt, path[:-1])[path[-1]]
        yield f"{where} is left out", spoilt


def test_a_spoilt_plan_is_refused_or_places_the_model(
    data: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    program = capture_model(model, (X,))
    monkeypatch.setattr("placer.api.capture_model", lambda *args, **kwargs: program)
    count = refused = 0
    for what, spoilt in _mutations(data):
        count += 1
        try:
            plan = plan_from_json(json.loads(json.dumps(spoilt)), source="plan.json")
        except PlanError as error:
            refused += 1
            assert "plan.json" in str(error), what
            assert "  -> " in str(error), what
            continue
        try:
            placer.compile(model, plan, X, run_on="cpu")
        except PlacerError as error:
            assert error.remedy, (what, str(error))
        except Exception as error:
            pytest.fail(f"{what}: {type(error).__name__}: {error}")
    assert count >= 200
    assert refused > 0.7 * count


def test_stages_in_an_order_that_would_compute_something_else_are_refused(
    data: dict[str, Any],
) -> None:
    program = capture_model(Net(), (X,))
    plan = plan_from_json(data)
    check_plan(plan, program)
    nodes = [list(stage.nodes) for stage in plan.stages]
    ordered = [name for names in nodes for name in names]
    draws = [name for name in ordered if name in program.rng_nodes]
    assert len(draws) == 2 and program.colocated
    for first, second in [draws, program.colocated[0][:2]]:
        spoilt = copy.deepcopy(data)
        for stage in spoilt["stages"]:
            swap = {first: second, second: first}
            stage["nodes"] = [swap.get(name, name) for name in stage["nodes"]]
            stage["regions"] = []
        spoilt["transfers"], spoilt["boundaries"] = [], []
        with pytest.raises(PlanError, match=r"comes before|one stage"):
            check_plan(plan_from_json(spoilt), program)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("stages", 0, "nodes", 0), "conv", r"/stages/0/nodes/0: 'conv' is not among /node_layers"),
        (("stages", 0, "devices", 0), "cuda:9", r"/stages/0/devices/0: 'cuda:9' has no peak"),
        (("devices", 1, "device"), "cuda:0", r"/devices/1/device: 'cuda:0' has a peak in"),
        (("devices", 0, "device"), "cda:0", r"/devices/0/device: 'cda:0' is not a device; did you"),
        (("transfers", 0, "value"), "head", r"/transfers/0/from: 0 where 1 belongs"),
        (("transfers", 0, "value"), "none", r"/transfers/0/value: 'none' is a node of no stage"),
        (("boundaries", 0, "first"), "a", r"/boundaries/0/first: 'a' is no node of stage 1"),
        (("boundaries", 0, "index"), 4, r"/boundaries/0/index: 4: .* one fewer than the 2 stages"),
        (("schedule",), "1G1B", r"/schedule: '1G1B' where 'GPipe', '1F1B'"),
        (("microbatches",), HUGE, r"/microbatches: 1000000.* where less than or equal to 65536"),
        (("optimizer",), "adan", r"/optimizer: 'adan' where one of 'sgd'"),
        (("stages", 0, "layers", 0), "none", r"/stages/0/layers/0: 'none' is the layer of no node"),
    ],
)
def test_every_reference_is_checked_when_a_plan_is_read(
    data: dict[str, Any], path: tuple[Any, ...], value: Any, said: str, tmp_path: Path
) -> None:
    spoilt = copy.deepcopy(data)
    _at(spoilt, path[:-1])[path[-1]] = value
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(spoilt), encoding="utf-8")
    with pytest.raises(PlanError, match=said) as caught:
        placer.load_plan(file)
    assert "plan again, or restore the file" in str(caught.value)
