"""The work of planning grows with the operations of a model, and not with the number of equal devices."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import placer
from placer.cost import CostTable, estimate_costs
from placer.partition import DeviceSlot, candidate
from placer.partition.arrange import device_chains
from placer.planner.devices import device_slot
from placer.program import lower
from placer.program.fake_mode import FakeMode


class Scan(nn.Module):
    """Every step reads a row of three tensors, as the scan of a state-space model does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 4), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        decay, drive = torch.exp(-self.inner(x) * self.scale), self.inner(x) * 2
        h, found = torch.zeros_like(drive[:, 0]), []
        for t in range(x.size(1)):
            h = decay[:, t] * h + drive[:, t]
            found.append((h * x[:, t]).sum(-1))
        return torch.stack(found, 1)


def _costs(length: int) -> CostTable:
    x = torch.randn(2, length, 4)
    return estimate_costs(lower(Scan(), (x,)), [x], kernels="cuda")


def _slots(*memory: str) -> list[DeviceSlot]:
    devices = [{"name": f"cuda:{i}", "memory": nbytes} for i, nbytes in enumerate(memory)]
    spec = placer.load_spec({"devices": devices})
    return [device_slot(device, spec) for device in spec.devices]


def test_torch_is_not_asked_about_every_row_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[int] = Counter()
    ask = FakeMode._ask_torch

    def counted(mode: Any, func: Any, *others: Any) -> Any:
        asked[length] += 1
        return ask(mode, func, *others)

    monkeypatch.setattr(FakeMode, "_ask_torch", counted)
    for length in (37, 74):  # with shapes of their own
        _costs(length)
    assert asked[74] <= asked[37] + 2


def test_orders_of_equal_devices_are_not_tried() -> None:
    equal = _slots(*["16GiB"] * 8)
    corrected = [replace(slot, correction=i) for i, slot in enumerate(equal)]
    assert [*device_chains(corrected, [])] == [tuple(corrected)]
    assert len([*device_chains(_slots(*["16GiB"] * 7, "8GiB"), [])]) == 8
    mixed = _slots("16GiB", "8GiB", "16GiB", "8GiB", "24GiB")
    kinds = [tuple(slot.budget for slot in chain) for chain in device_chains(mixed, [])]
    first = dict.fromkeys(
        tuple(slot.budget for slot in chain) for chain in itertools.permutations(mixed)
    )
    assert kinds == list(first)


def test_tables_of_equal_stages_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: Counter[int] = Counter()
    peak = candidate.peak_bytes

    def counted(*args: Any, **kwargs: Any) -> Any:
        computed[stages] += 1
        return peak(*args, **kwargs)

    monkeypatch.setattr(candidate, "peak_bytes", counted)
    model, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(16)]), torch.randn(4, 4)
    for stages in (3, 6):
        spec = {"devices": [f"cpu:{i}" for i in range(stages)], "objective": "memory"}
        placer.make_plan(model, spec, (x,))
    assert computed[6] <= computed[3] + 3
