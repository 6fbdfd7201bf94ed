"""The largest input that trains: what is found fits, and the next one does not."""

from __future__ import annotations

import pytest
import torch
from captured import captured_once
from hypothesis import given
from hypothesis import strategies as st
from unet3d import unet3d

import placer


@captured_once()
def test_the_largest_cube_of_a_unet() -> None:
    with torch.device("meta"):
        model = unet3d(width=4, depth=1)
    sizes = range(32, 129, 32)
    devices = [{"name": f"cuda:{i}", "memory": "620MiB", "kind": "t4"} for i in range(2)]

    def cube(size: int) -> torch.Tensor:
        return torch.empty(1, 1, size, size, size, device="meta")

    found = placer.largest(model, cube, sizes, devices=devices)
    assert found.size is not None and found.answer is not None
    assert placer.make_plan(model, found.answer.spec, cube(found.size)).fits
    assert sizes[0] < found.size < sizes[-1]
    assert [t.size for t in found.tried] == sorted(t.size for t in found.tried)
    assert all(t.fits == (t.size <= found.size) for t in found.tried)


def test_no_size_fits() -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(64, 64)
    found = placer.largest(
        model,
        lambda rows: torch.empty(rows, 64, device="meta"),
        [8, 16],
        devices=[{"name": "cpu:0", "memory": 1000}],
    )
    assert found.size is None and found.answer is None and len(found.tried) == 1


@given(limit=st.integers(0, 40), count=st.integers(1, 40), first=st.integers(0, 50))
def test_bisection_by_hand(limit: int, count: int, first: int) -> None:
    """With a planner for which sizes up to ``limit`` fit."""
    from placer.search import largest

    asked: list[int] = []

    class Wanted(int):
        devices, machine = (), None

    class Found:
        def __init__(self, size: int) -> None:
            fits = size <= limit
            asked.append(size)
            strategy = type("S", (), {"describe": staticmethod(lambda: "one device")})
            self.best = type("R", (), {"strategy": strategy, "plan": None})() if fits else None
            self.nearest = type("R", (), {"strategy": strategy, "plan": None})()
            self.unfit = ()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(largest, "find_strategy", lambda wanted, make: Found(int(wanted)))
        patch.setattr(largest, "answer_of", lambda found, make, devices: asked[-1])
        case = type("C", (), {})
        found = largest.find_largest(
            range(1, count + 1),
            lambda size: _with(case(), wanted=Wanted(size), make=None),
            first=first,
        )
    assert asked[0] == min(first + 1, count)
    best = min(limit, count)
    assert found.size == (best or None) and found.answer == (best or None)
    assert len(asked) == len(set(asked)) <= 2 * count.bit_length() + 1


def _with(value: object, **fields: object) -> object:
    for name, field in fields.items():
        setattr(value, name, field)
    return value
