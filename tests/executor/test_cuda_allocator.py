"""Expandable segments are turned on where a plan assumes them and nobody else has chosen."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from plans import make_plan
from torch import nn

from placer import _torch
from placer.executor.distributed import launch
from placer.executor.distributed.job.assignment import Job
from placer.executor.places import cuda_allocator
from placer.executor.places.cuda_allocator import AllocatorWarning, prepare_allocator
from placer.executor.places.place import Place
from placer.plan.types import Plan
from placer.versions import ALLOCATOR_VARIABLES

GIB = 2**30
GPU = [Place("cuda:0", torch.device("cuda:0"))]


class Torch:
    """Stands for torch's allocator on a machine that has a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, can: bool = True, reserved: int = 0):
        self.expandable, self.can, self.asked, self.given = False, can, 0, ""
        monkeypatch.setattr(cuda_allocator, "has_expandable_segments", lambda: self.expandable)
        monkeypatch.setattr(cuda_allocator, "set_expandable_segments", self._turn_on)
        monkeypatch.setattr(cuda_allocator, "given_allocator_settings", lambda: self.given)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
        for name in ALLOCATOR_VARIABLES:
            monkeypatch.delenv(name, raising=False)

    def _turn_on(self) -> None:
        self.asked += 1
        self.expandable = self.can


def plan(allocator: str | None = "expandable") -> Plan:
    made = make_plan(budget=16 * GIB)
    devices = tuple(replace(d, allocator=allocator, reserved=13 * GIB) for d in made.devices)
    return replace(made, devices=devices)


def test_they_are_turned_on_where_nothing_was_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Torch(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare_allocator(plan(), GPU)
        prepare_allocator(plan(), GPU)
    assert fake.expandable and fake.asked == 1


CPU = [Place("cuda:0", torch.device("cpu"))]


@pytest.mark.parametrize(
    ("allocator", "places"), [("default", GPU), (None, GPU), ("expandable", CPU)]
)
def test_a_plan_that_does_not_count_on_them_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, allocator: str | None, places: list[Place]
) -> None:
    fake = Torch(monkeypatch)
    prepare_allocator(plan(allocator), places)
    assert not fake.asked


@pytest.mark.parametrize("by", ["the user", "the program"])
def test_what_is_set_stays(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """Turning expandable segments on would reset all other settings to their defaults."""
    fake, said = Torch(monkeypatch), "max_split_size_mb:128"
    if by == "the user":
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", said)
        said = f"PYTORCH_CUDA_ALLOC_CONF={said}"
    else:
        fake.given = said
    with pytest.warns(AllocatorWarning, match=f"{said} is set"):
        prepare_allocator(plan(), GPU)
    assert not fake.asked


def test_settings_are_read_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "expandable_segments": True}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": settings})
    assert _torch.has_expandable_segments()
    assert _torch.given_allocator_settings() == "expandable_segments:True"


def test_another_backend_has_no_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``backend:cudaMallocAsync`` torch refuses to tell its settings."""

    def refuse() -> None:
        raise RuntimeError("Calling snapshot with backend:cudaMallocAsync is not meaningful.")

    monkeypatch.setattr(torch.cuda.memory, "_snapshot", refuse)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    assert not _torch.has_expandable_segments()
    with pytest.warns(AllocatorWarning, match="backend:cudaMallocAsync is set"):
        prepare_allocator(plan(), GPU)


def test_a_rank_does_it_before_it_talks_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a process group with only NCCL, messages are in the GPU's memory: it would be in use."""
    order: list[str] = []

    class Talks(Exception):
        pass

    def talk(*args: Any, **options: Any) -> None:
        order.append("talk")
        raise Talks

    monkeypatch.setattr(launch, "prepare_allocator", lambda *args: order.append("prepare"))
    monkeypatch.setattr(launch, "join_job", lambda job: None)
    monkeypatch.setattr(launch, "FailureBroadcast", MagicMock())
    monkeypatch.setattr(launch, "default_timeout", MagicMock())
    monkeypatch.setattr(launch, "compare_plans", talk)
    job = Job(rank=0, world_size=2, local_rank=0)
    with pytest.raises(Talks):
        launch.launch(nn.Linear(1, 1), lambda: (MagicMock(), plan()), job, run_on="cpu")
    assert order == ["prepare", "talk"]


def test_memory_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Torch(monkeypatch, reserved=3 * GIB)
    with pytest.warns(AllocatorWarning, match=r"3.00 GiB of cuda:0 were already reserved") as told:
        prepare_allocator(plan(), GPU)
    assert "13.00 GiB on cuda:0, with 2.00 GiB to spare" in str(told[0].message)
    assert not fake.asked


def test_what_has_no_effect_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    Torch(monkeypatch, can=False)
    with pytest.warns(AllocatorWarning, match="this platform does not support them"):
        prepare_allocator(plan(), GPU)
