"""The law over models, specs and batch sizes drawn at random."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captured import captured_once
from hypothesis import assume, given, note
from hypothesis import strategies as st
from oracle import assert_close, assert_same, mean_square
from programs import Program, inputs, programs
from torch.utils._pytree import tree_leaves

import placer

NAMES = ("x", "scale")


@st.composite
def specs(draw: st.DrawFn, model: Program, names: tuple[str, ...]) -> dict[str, Any]:
    """1 to 4 devices, replicas, micro-batches, a schedule, and pins for some layers.

    ``names`` are those of the inputs. A model that counts its calls is one of slices, not of the batch.
    """
    devices = [f"cpu:{i}" for i in range(draw(st.integers(1, 4)))]
    paths = [name for name, _ in model.named_modules() if name]
    pins = st.dictionaries(st.sampled_from(paths), st.sampled_from(devices), max_size=3)
    said = {"inputs": {name: {"batch_dim": 0} for name in names}} if _counts(model) else {}
    return {
        **said,
        "devices": devices,
        "layers": dict(sorted(draw(pins).items(), key=lambda pin: len(pin[0]))),  # parents first
        "replicas": draw(st.sampled_from((1, 1, 2))),
        "microbatches": draw(st.sampled_from((1, 2, 3))),
        "schedule": draw(st.sampled_from(("GPipe", "1F1B"))),
    }


def require_eager(model: Program, batch: tuple[torch.Tensor, ...]) -> None:
    """Skip what eager cannot do: a value needed for backward that the program writes over."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        mean_square(model(*batch)).backward()
    except RuntimeError as error:
        assert "inplace operation" in str(error), error
        assume(False)
    finally:
        model.zero_grad()
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])


@given(st.data())
def test_placed_equals_plain(data: st.DataObject) -> None:
    model = data.draw(programs())
    batch = inputs(data.draw(st.integers(1, 7), "rows"), scaled=data.draw(st.booleans(), "scaled"))
    spec = data.draw(specs(model, NAMES[: len(batch)]))
    note(str(model.steps))
    require_eager(model, batch)
    assert_same(model, spec, batch, steps=1)


@given(st.data())
def test_other_batch_sizes_in_eval_mode(data: st.DataObject) -> None:
    model = data.draw(programs()).eval()
    rows, others = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 7))
    scaled = data.draw(st.booleans())
    names = NAMES[: 1 + scaled]
    spec = {**data.draw(specs(model, names)), "training": False}
    placed = placer.compile(model, spec, inputs(rows, scaled=scaled))
    other = inputs(others, scaled=scaled)
    with torch.no_grad():
        calls = model.calls.clone()
        expected = tree_leaves(model(*other))
        model.calls.copy_(calls)
        found = tree_leaves(placed(*other))
    # Numbers and a counter of calls are those of a cut: what is cut is compared in train mode.
    cut = spec["replicas"] * spec["microbatches"] > 1
    assume(not (cut and _counts(model)))
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        if isinstance(b, torch.Tensor):
            assert_close(a, b, f"output {index}", floor=lambda: 1e-13)
        else:
            assert cut or a == b


def _counts(model: Program) -> bool:
    return any(step.kind == "counter" for step in model.steps)


_SCALARS = 64  # bytes: numbers that autograd makes on the way, on models of a few thousand bytes


@given(st.data())
@captured_once()
def test_plan_keeps_its_budget_or_says_no(data: st.DataObject) -> None:
    model = data.draw(programs())
    batch = inputs(data.draw(st.integers(1, 7), "rows"), scaled=False)
    require_eager(model, batch)
    alone = placer.simulate(model, {"devices": ["cpu:0"], "objective": "memory"}, batch)
    share = data.draw(st.floats(0.2, 1.2))
    budget = max(1024, int(max(device.peak for device in alone.devices) * share))  # a spec's least
    devices = [
        {"name": f"cpu:{i}", "memory": f"{budget} B"} for i in range(data.draw(st.integers(1, 4)))
    ]
    spec = {"devices": devices, "reserve": 0, "objective": "memory"}
    plan = placer.make_plan(model, spec, batch)
    assert sorted(n for stage in plan.stages for n in stage.nodes) == sorted(plan.node_layers)
    assert plan.fits == all(device.peak <= budget for device in plan.devices)
    if not plan.fits:
        with pytest.raises(placer.BudgetError, match="more than its"):
            placer.compile(model, plan, batch)
        return
    report = placer.simulate(model, plan, batch)
    for device in report.devices:
        assert device.peak <= budget + _SCALARS, f"{device.device}: {device.peak} of {budget} bytes"
    placed = placer.compile(model, plan, batch, run_on="cpu")
    torch.manual_seed(0)
    found = placed(*batch)
    torch.manual_seed(0)
    assert_close(mean_square(found), mean_square(model(*batch)), "loss")
