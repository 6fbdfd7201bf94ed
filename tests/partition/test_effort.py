"""The work of planning grows with the operations of a model, and not with the number of equal devices."""

from __future__ import annotations

import itertools
from dataclasses import replace

import placer
from placer.partition import DeviceSlot
from placer.partition.arrange import device_chains
from placer.planner.devices import device_slot


def _slots(*memory: str) -> list[DeviceSlot]:
    devices = [{"name": f"cuda:{i}", "memory": nbytes} for i, nbytes in enumerate(memory)]
    spec = placer.load_spec({"devices": devices})
    return [device_slot(device, spec) for device in spec.devices]


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
