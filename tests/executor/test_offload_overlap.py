"""Offloaded activations that are copied beside the kernels, on a stream that is as late as it may be.

There is no GPU here. `LateStream` copies nothing until it must, which is when the main stream waits. A
tensor that was let go of too early, was written over, or is used before it has come is found out so.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import models
import pytest
import torch
from oracle import assert_same
from torch import Tensor, nn
from unet3d import unet3d

import placer
from placer.executor.places.place import HOST, Place
from placer.executor.places.side_stream import _CudaStream
from placer.executor.stages import offload
from placer.executor.stages.offload import offload_saved
from placer.plan.store import plan_from_json, plan_to_json

D = torch.float64


class _End(NamedTuple):
    """A tensor that is not kept alive."""

    storage: weakref.ref[Any]
    dtype: torch.dtype
    view: tuple[int, torch.Size, tuple[int, ...]]

    @classmethod
    def of(cls, tensor: Tensor) -> _End:
        view = (tensor.storage_offset(), tensor.size(), tensor.stride())
        return cls(weakref.ref(tensor.untyped_storage()), tensor.dtype, view)

    def tensor(self) -> Tensor | None:
        storage = self.storage()
        return (
            None if storage is None else torch.empty(0, dtype=self.dtype).set_(storage, *self.view)
        )


class LateStream:
    """Copies in order, when the main stream waits for one of them or for a later one."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.problems: list[str] = []
        self._begun: list[tuple[int, _End, _End]] = []
        self._count = 0

    def copy(self, source: Tensor, target: Tensor | None, place: Place) -> tuple[Tensor, int]:
        assert target is None
        nothing = float("nan") if source.is_floating_point() else 1
        target = torch.full_like(source, nothing)
        self._count += 1
        self._begun.append((self._count, _End.of(source), _End.of(target)))
        self.events.append(f"{'to host' if place is HOST else 'back'} {self._count}")
        return target, self._count

    def wait(self, event: int) -> None:
        self.events.append(f"wait {event}")
        while self._begun and self._begun[0][0] <= event:
            number, *ends = self._begun.pop(0)
            source, target = (end.tensor() for end in ends)
            if source is None or target is None:
                self.problems.append(f"copy {number}: a tensor was let go of before its copy")
            else:
                target.copy_(source)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateStream]:
    found = LateStream()
    monkeypatch.setattr(offload, "side_stream", lambda device: found)
    offload._queue_of.cache_clear()
    yield found
    offload._queue_of.cache_clear()
    assert not found.problems


CASES = {
    "in place": (models.InPlace, lambda: torch.randn(8, 2, 5, 5, dtype=D)),
    "recurrent": (models.Recurrent, lambda: torch.randn(8, 4, 3, dtype=D)),
    "tied transformer": (models.TiedTransformer, lambda: torch.randint(0, 17, (8, 6))),
    "U-Net": (
        lambda: unet3d(width=2, depth=3, norm="batch"),
        lambda: torch.randn(4, 1, 8, 8, 8, dtype=D),
    ),
}


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("name", "checkpoint"), [*((n, []) for n in CASES), ("U-Net", ["**"])])
def test_results_equal_eager_on_the_latest_stream(
    stream: LateStream, name: str, checkpoint: list[str]
) -> None:
    torch.manual_seed(0)
    build, inputs = CASES[name]
    model, x = build().double(), inputs()
    spec = {"devices": ["cpu:0", "cpu:1"], "offload": ["**"], "checkpoint": checkpoint}
    cut = {"microbatches": 2, "schedule": "1F1B", "offload_overlap": True}
    plan = placer.make_plan(model, {**spec, **cut}, x)
    assert plan.overlaps
    assert plan_from_json(plan_to_json(plan)) == plan
    assert_same(model, plan, (x,))
    assert "back" in " ".join(stream.events)


def _chain(size: int = 3) -> tuple[Tensor, Tensor]:
    """A result whose backward needs three tensors that nothing else keeps, and its input."""
    x = torch.randn(size, dtype=D, requires_grad=True)
    with offload_saved([], [Place("cuda:0", torch.device("cpu"))], overlapped=True):
        return x.sin().sin().sin(), x


def test_a_tensor_comes_back_while_the_one_saved_after_it_is_used(stream: LateStream) -> None:
    y, _ = _chain()
    # Each is kept until the next copy begins.
    assert stream.events == ["to host 1", "wait 1", "to host 2", "wait 2", "to host 3"]
    stream.events.clear()
    y.sum().backward()
    assert stream.events == ["wait 3", "back 4", "wait 4", "back 5", "wait 5", "back 6", "wait 6"]


def test_a_result_that_is_dropped_leaves_no_copy_under_way(stream: LateStream) -> None:
    y, _ = _chain()
    del y
    assert stream.events[-1] == "wait 3"


def test_a_cuda_copy_waits_for_the_main_stream_and_runs_on_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With streams that only write down what they are asked for: there is no GPU here."""
    said: list[str] = []
    running = ["main"]

    class Stream:
        def __init__(self, device: object = None, name: str = "side") -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            said.append(f"{self.name} waits for {other.name}")

        def record_event(self) -> str:
            said.append(f"event on {self.name}")
            return "event"

        def wait_event(self, event: str) -> None:
            said.append(f"{self.name} waits for {event}")

    class Target:
        def copy_(self, source: object, *, non_blocking: bool) -> None:
            assert non_blocking
            said.append(f"copy on {running[-1]}")

    @contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        running.append(stream.name)
        yield
        running.pop()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(name=running[-1]))
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    stream = _CudaStream(torch.device("cuda:0"))
    target: Any = Target()
    found, event = stream.copy(torch.zeros(1), target, HOST)
    assert found is target
    stream.wait(event)
    assert said == [
        "side waits for main", "copy on side", "event on side", "main waits for event"
    ]  # fmt: skip


def test_a_dry_run_has_what_copies_keep() -> None:
    """In forward one tensor more, until the next copy; in backward the one that comes next."""
    model = nn.Sequential(*(nn.Tanh() for _ in range(6)), nn.AdaptiveAvgPool1d(1))
    x = torch.empty(1, 2**18)
    nbytes = x.nbytes
    peaks = []
    for overlap in (False, True):
        spec = {"devices": ["cuda:0"], "offload": ["*"], "offload_overlap": overlap}
        plan = placer.make_plan(model, spec, x.requires_grad_())
        (device,) = placer.simulate(model, plan, x).devices
        assert device.peak == plan.devices[0].peak
        peaks.append(device.peak)
    assert peaks[1] - peaks[0] == nbytes
