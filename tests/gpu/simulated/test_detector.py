"""The accelerator finds what it is there for, so that its silence in the other tests means something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from gpu.simulated.accelerator import current_stream, device, new_stream, on_stream
from torch import nn

import placer
from placer.executor.places import side_stream


def _reads(extension: Any) -> None:
    """The result of another stream."""
    other = new_stream(device(1))
    other.wait_stream(current_stream(device(1)))
    with on_stream(other):
        made = torch.ones(4, device=device(1))
    made * 2


def _overwrites(extension: Any) -> None:
    """What another stream reads."""
    other, x = new_stream(device(1)), torch.ones(4, device=device(1))
    other.wait_stream(current_stream(device(1)))
    with on_stream(other):
        x * 2
    x.zero_()


def _frees(extension: Any) -> None:
    """What another stream reads."""
    other, x = new_stream(device(1)), torch.ones(4, device=device(1))
    other.wait_stream(current_stream(device(1)))
    with on_stream(other):
        x * 2
    del x


def _copies(extension: Any) -> None:
    """To memory that is not pinned, without waiting."""
    torch.empty(4).copy_(torch.ones(4, device=device(1)), non_blocking=True)


@pytest.mark.parametrize(
    ("does", "found"),
    [
        (_reads, "made on stream"),
        (_overwrites, "overwrites what"),
        (_frees, "is freed"),
        (_copies, "not pinned"),
    ],
)
def test_finds(extension: Any, does: Callable[[Any], None], found: str) -> None:
    does(extension)
    assert any(found in problem for problem in extension.take_problems())


def test_waiting_is_enough(extension: Any) -> None:
    """Waiting for a stream, waiting for an event, ``record_stream``, and waiting on the host."""
    other, x = new_stream(device(1)), torch.ones(4, device=device(1))
    other.wait_stream(current_stream(device(1)))
    with on_stream(other):
        y = x * 2
        x.record_stream(other)
        made = other.record_event()
    del x
    current_stream(device(1)).wait_event(made)
    y + 1
    y.record_stream(current_stream(device(1)))
    with on_stream(other):
        z = y * 3
    other.synchronize()
    del y
    z.cpu()


def test_data_of_a_copy_arrive_when_somebody_waited() -> None:
    target = torch.empty(4, pin_memory=True).zero_()
    target.copy_(torch.ones(4, device=device(2)), non_blocking=True)
    assert target.sum() == 0
    current_stream(device(2)).synchronize()
    assert target.sum() == 4


@pytest.mark.parametrize("other", [torch.ones(4), "simulated:0"], ids=["of the CPU", "elsewhere"])
def test_an_operation_has_one_device(other: Any) -> None:
    x = torch.ones(4, device=device(1))
    y = other if isinstance(other, torch.Tensor) else torch.ones(4, device=other)
    with pytest.raises(RuntimeError, match="same device"):
        x + y


@pytest.mark.parametrize("broken", ["waits for no copy", "copies what may not be there"])
def test_finds_a_broken_executor(extension: Any, broken: str) -> None:
    """An offloading that does not wait; the tests of steps find the same."""
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()),
        torch.randn(4, 8),
    )
    spec = {"devices": ["cuda:0", "cuda:1"], "offload": ["**"], "offload_overlap": True}
    placed = placer.compile(model, spec, x)
    if broken == "waits for no copy":
        patch = mock.patch.object(side_stream._CudaStream, "wait", lambda self, event: None)
    else:
        patch = mock.patch.object(torch.cuda, "current_stream", lambda of: new_stream(of))
    with patch:
        placed.step(x, loss_fn=torch.sum, reduction="sum")
    assert extension.take_problems()
