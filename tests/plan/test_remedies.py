"""A budget that nothing meets: what is missing, what needs it, what was tried."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from unet3d import unet3d

import placer

MODEL = unet3d(width=4, depth=3)
X = torch.randn(4, 1, 16, 16, 16)


def _spec(memory: int, **fields: Any) -> dict[str, Any]:
    device = {"name": "cuda:0", "memory": memory}
    return {"devices": [device], "reserve": 0, "optimizer": "sgd", **fields}


def _peak() -> int:
    return placer.make_plan(MODEL, {"devices": ["cuda:0"], "optimizer": "sgd"}, X).devices[0].peak


def test_what_would_fit_was_planned() -> None:
    spec = _spec(int(0.6 * _peak()))
    with pytest.raises(placer.BudgetError) as caught:
        placer.compile(MODEL, spec, X)
    error = caught.value
    assert error.device == "cuda:0" and error.missing_bytes > 0
    assert error.largest_node in placer.make_plan(MODEL, spec, X).stages[0].nodes
    assert 0 < error.largest_node_bytes < _peak()
    fitting = {tried.change for tried in error.tried if tried.fits}
    assert any("microbatches" in change for change in fitting)
    assert any('"checkpoint": "auto"' in change for change in fitting)
    assert any("add 1 device" in change for change in fitting)
    for tried in error.tried:
        assert tried.fits == (tried.peak <= spec["devices"][0]["memory"])
    assert "tried, and it would fit" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert again.tried == error.tried and str(again) == str(error)


def test_each_remedy_does_what_it_says() -> None:
    memory = int(0.6 * _peak())
    assert placer.make_plan(MODEL, _spec(memory, checkpoint="auto"), X).fits
    assert placer.make_plan(MODEL, _spec(memory, microbatches=2, schedule="1F1B"), X).fits


def test_where_nothing_helps_the_nearest_is_named() -> None:
    with pytest.raises(placer.BudgetError) as caught:
        placer.auto_spec(MODEL, X, devices=_spec(20_000)["devices"], reserve=0, optimizer="sgd")
    assert caught.value.tried and not any(tried.fits for tried in caught.value.tried)
    assert "nearest is to" in str(caught.value)
