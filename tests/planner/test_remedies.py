"""A budget that no plan meets: the error says what is missing, what needs it, and what was tried."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
import torch
from models import ConvNet, Pairs
from torch import nn
from unet3d import unet3d

import placer
from placer.planner.devices import links_of, with_lead_devices
from placer.program import lower
from placer.quantities import parse_bytes
from placer.search.remedies import memory_needed, try_remedies
from placer.simulation.judge import JudgingPlanner

pytestmark = pytest.mark.usefixtures("one_capture")

MODEL = unet3d(width=4, depth=2)
X = torch.randn(4, 1, 8, 8, 8)


def _spec(memory: int, **fields: Any) -> dict[str, Any]:
    device = {"name": "cpu:0", "memory": memory}
    return {"devices": [device], "reserve": 0, "optimizer": "sgd", **fields}


def _peak() -> int:
    return placer.make_plan(MODEL, {"devices": ["cpu:0"], "optimizer": "sgd"}, X).devices[0].peak


def test_what_would_fit_was_planned() -> None:
    spec = _spec(int(0.6 * _peak()))
    with pytest.raises(placer.BudgetError) as caught:
        placer.compile(MODEL, spec, X)
    error = caught.value
    assert error.device == "cpu:0" and error.missing_bytes > 0
    assert error.largest_node in placer.make_plan(MODEL, spec, X).stages[0].nodes
    assert 0 < error.largest_node_bytes < _peak()
    fitting = {tried.change for tried in error.tried if tried.fits}
    assert any("microbatches" in change for change in fitting)
    assert any('"checkpoint": "auto"' in change for change in fitting)
    assert any("add 1 device" in change for change in fitting)
    for tried in error.tried:
        assert tried.fits == (tried.peak <= spec["devices"][0]["memory"])
        assert tried.headroom is not None and tried.fits == (tried.headroom >= 0)
    assert "tried, and it would fit" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert again.tried == error.tried and str(again) == str(error)


@pytest.mark.matrix(0)
def test_where_nothing_helps_the_nearest_is_named() -> None:
    with pytest.raises(placer.BudgetError) as caught:
        placer.auto_spec(MODEL, X, devices=_spec(20_000)["devices"], reserve=0, optimizer="sgd")
    assert caught.value.tried and not any(tried.fits for tried in caught.value.tried)
    assert "the nearest, " in str(caught.value)


def _two_devices(memory: str, **fields: object) -> dict[str, object]:
    devices = [{"name": f"cpu:{i}", "memory": memory} for i in range(2)]
    return {"devices": devices, **fields}


def test_no_batch_is_split_whose_rows_depend_on_each_other() -> None:
    x = torch.randn(256, 64)
    with pytest.raises(placer.BudgetError) as refused:
        placer.compile(Pairs(), _two_devices("100KiB"), x, run_on="cpu")
    said = [tried.change for tried in refused.value.tried]
    assert said and not any("microbatches" in each or "replicas" in each for each in said)


def test_no_change_is_tried_where_the_reserve_leaves_no_room() -> None:
    x = torch.randn(4, 1, 8, 8)
    said = "the context and the reserve alone take up cpu:0: 1.00 GiB of its 60.00 KiB"
    with pytest.raises(placer.BudgetError, match=said) as refused:
        placer.compile(ConvNet(), _two_devices("60KiB", reserve="1GiB"), x, run_on="cpu")
    assert refused.value.tried == ()
    assert refused.value.problem.endswith("and the context and the reserve leave no room for it")
    with pytest.raises(placer.BudgetError) as refused:
        placer.compile(ConvNet(), _two_devices("60KiB", reserve="58KiB"), x, run_on="cpu")
    assert refused.value.tried


def test_what_is_not_enough_lacks_what_its_own_plan_lacks() -> None:
    """On a GPU, kernels and the allocator need more than estimates say."""
    spec = {"devices": [{"name": "cuda:0", "memory": "580MiB"}], "layers": {"0": "cuda:0"}}
    model, x = nn.Sequential(nn.Conv2d(3, 64, 3)), torch.empty(64, 3, 128, 128)
    with pytest.raises(placer.BudgetError) as refused:
        placer.compile(model, spec, x, run_on="cpu")
    tried = {each.change.partition(":")[0]: each for each in refused.value.tried}
    assert tried["leave out 'layers'"].headroom == -refused.value.missing_bytes


@pytest.mark.matrix(1)
@pytest.mark.parametrize("reserve", ["1GiB", "0", "3KiB"])
def test_the_memory_that_is_said_to_be_needed_suffices(reserve: str) -> None:
    x = torch.randn(4, 1, 8, 8)
    spec = placer.load_spec(_two_devices("2KiB", reserve=reserve))
    needed = memory_needed(spec, JudgingPlanner(lower(ConvNet(), (x,)), [x]))
    match = re.match(r"devices of (\S+ \S+) ", needed)
    assert match
    assert placer.make_plan(ConvNet(), _two_devices(match[1], reserve=reserve), x).fits


def test_no_less_memory_is_asked_for_than_there_is() -> None:
    """Without layers the model fits as it is, which is a remedy of its own."""
    x = torch.randn(4, 1, 8, 8)
    spec = placer.load_spec(_two_devices("60KiB", layers={"**": "cpu:0"}))
    make = JudgingPlanner(lower(ConvNet(), (x,)), [x])
    assert not make(spec).fits and make(spec.with_layers({})).fits
    assert "leave out 'layers'" not in memory_needed(spec, make)


def test_as_much_is_asked_for_as_the_fullest_device_needs() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2)), torch.randn(4, 64)
    spec = placer.load_spec(_two_devices("1KiB", reserve=0, objective="memory"))
    make = JudgingPlanner(lower(model, (x,)), [x])
    needed = [device.needed for device in make(spec).devices]
    assert min(needed) < 0.5 * max(needed)
    said = re.match(r"devices of (\S+ \S+) ", memory_needed(spec, make))
    assert said and max(needed) <= parse_bytes(said[1]) < 1.05 * max(needed)


def test_a_stage_in_space_is_planned_for_its_smallest_device_and_the_slowest_link() -> None:
    devices = [{"name": f"cpu:{i}", "memory": f"{n}GiB"} for i, n in enumerate((4, 2, 3, 5))]
    spec = placer.load_spec({"devices": devices, "space": 2, "layers": {"head": "cpu:3"}})
    leads = with_lead_devices(spec)
    assert [(d.name, d.memory) for d in leads.devices] == [
        ("cpu:0", 2 * 2**30),
        ("cpu:2", 3 * 2**30),
    ]
    assert leads.layers == {"head": "cpu:2"}
    kinds = [{"name": f"cuda:{i}", "kind": kind} for i, kind in enumerate(("h100", "t4", "a100"))]
    links = [links_of(placer.load_spec({"devices": each})) for each in (kinds, kinds[1:2])]
    assert links[0] == links[1] != links_of(placer.load_spec({"devices": kinds[:1]}))


def test_replicas_may_divide_the_optimizers_state() -> None:
    """With a process each, where a device has room for half of Adam's state, but not for all of it."""
    model, x = nn.Linear(1024, 1024), torch.randn(4, 1024)
    nbytes = sum(p.nbytes for p in model.parameters())
    spec = placer.PlacementSpec(**_spec(int(4.2 * nbytes), optimizer="adam", replicas=2))
    program = lower(model, (x,))
    make = JudgingPlanner(program, [x], processes=True)
    plan = make(spec)
    assert not plan.fits
    (tried,) = [t for t in try_remedies(spec, plan, make) if "shard_state" in t.change]
    assert tried.fits and make(spec.model_copy(update={"shard_state": "optimizer"})).fits
