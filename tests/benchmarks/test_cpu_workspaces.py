"""Workspaces of CPU kernels equal those in the allocator's events, operator by operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.cpu_workspaces import workspace_nbytes

SLACK = 1024  # bytes: rows of weights, tables of indices


class Calls(TorchDispatchMode):
    """Labels every operator's call for the profiler, and notes its workspace by formula."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.formulas: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch.profiler.record_function(f"call {len(self.names)}"):
            result = func(*args, **kwargs or {})
        self.names.append(str(func))
        self.formulas.append(workspace_nbytes(func, args, kwargs or {}, result))
        return result


def allocated(run: Callable[[], Any]) -> dict[str, tuple[int, int]]:
    """Operator -> bytes inside its call beyond arguments and results, by formula and by events."""
    calls = Calls()
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile, calls:
        run()
    events: list[tuple[int, int, int]] = []  # time, call, bytes

    def collect(event: Any, call: int) -> None:
        if event.tag == _EventType.Allocation and call >= 0:
            events.append((event.start_time_ns, call, event.extra_fields.alloc_size))
        call = int(event.name.split()[1]) if event.name.startswith("call ") else call
        for child in event.children:
            collect(child, call)

    for root in profile.profiler.kineto_results.experimental_event_tree():
        collect(root, -1)
    live, most = [0] * len(calls.names), [0] * len(calls.names)
    for _, call, nbytes in sorted(events):
        live[call] += nbytes
        most[call] = max(most[call], live[call])
    return {
        name: (formula, peak - max(0, end))
        for name, formula, peak, end in zip(calls.names, calls.formulas, most, live, strict=True)
    }


def R(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def half(*shape: int) -> Tensor:
    return R(*shape, dtype=torch.bfloat16)


def back(result: Tensor, grad: Tensor | None = None) -> None:
    result.backward(torch.randn_like(result) if grad is None else grad)


def last(*shape: int) -> Tensor:
    return torch.randn(*shape).to(memory_format=torch.channels_last).requires_grad_()


def attend(length: int) -> None:
    x = torch.randn(8, length, 64)
    with torch.no_grad():
        nn.MultiheadAttention(64, 4, batch_first=True).eval()(x, x, x, need_weights=False)


IMAGE, SKEW = (4, 8, 32, 32), (8, 4, 32, 32)
CASES: dict[str, Callable[[], Any]] = {
    "batch norm": lambda: back(nn.BatchNorm2d(8)(R(*IMAGE))),
    "batch norm in half": lambda: back(nn.BatchNorm2d(8)(half(*IMAGE))),
    "batch norm, evaluation": lambda: back(nn.BatchNorm2d(8).eval()(R(*IMAGE))),
    "batch norm, channels last": lambda: back(nn.BatchNorm2d(8)(last(*IMAGE))),
    "batch norm, mixed formats": lambda: back(nn.BatchNorm2d(8)(last(*IMAGE)), R(*IMAGE)),
    "batch norm, a skew gradient": lambda: back(
        nn.BatchNorm2d(8)(R(*IMAGE)), R(*SKEW).transpose(0, 1)
    ),
    "batch norm, weights alone": lambda: back(nn.BatchNorm2d(8)(torch.randn(*IMAGE))),
    "instance norm": lambda: back(nn.InstanceNorm2d(8, affine=True)(R(*IMAGE))),
    "layer norm": lambda: back(nn.LayerNorm(64)(R(16, 32, 64))),
    "layer norm, skew": lambda: back(nn.LayerNorm(64)(R(16, 32, 64).transpose(0, 1))),
    "group norm": lambda: back(nn.GroupNorm(2, 8)(R(*IMAGE))),
    "mean": lambda: R(*IMAGE).mean((2, 3)),
    "mean in half": lambda: half(*IMAGE).mean((2, 3)),
    "mean in half, all": lambda: half(*IMAGE).mean(),
    "mean of half": lambda: half(*IMAGE).mean(1, dtype=torch.float32),
    "sum in half, all": lambda: half(*IMAGE).sum(),
    "sum in half, rows": lambda: half(512, 64).sum(0),
    "sum in half, both ends": lambda: half(*IMAGE).sum((0, 2, 3)),
    "sum in half, one end": lambda: half(8, 16, 32).sum((0, 1)),
    "sum of booleans": lambda: (R(*IMAGE) > 0).sum(1),
    "logsumexp": lambda: R(*IMAGE).logsumexp(1),
    "mixed types": lambda: R(*IMAGE) * half(*IMAGE),
    "mixed types, a row": lambda: half(*IMAGE) + R(1, 8, 1, 1),
    "mixed types in place": lambda: half(*IMAGE).detach().mul_(R(*IMAGE).detach()),
    "mixed types, integers": lambda: torch.ones(64, 64) - torch.ones(64, 64, dtype=torch.long),
    "integers divided": lambda: torch.ones(64, 64).long() / torch.ones(64, 64).long(),
    "a number added": lambda: half(*IMAGE) + torch.tensor(1.0),
    "where": lambda: torch.where(R(*IMAGE) > 0, R(*IMAGE), half(*IMAGE)),
    "softmax": lambda: back(R(*IMAGE).softmax(1)),
    "softmax, skew": lambda: back(R(*IMAGE).transpose(1, 2).softmax(1)),
    "softmax, a skew gradient": lambda: back(R(*IMAGE).softmax(1), R(*SKEW).transpose(0, 1)),
    "log softmax, skew": lambda: back(R(*IMAGE).transpose(1, 2).log_softmax(1)),
    "safe softmax": lambda: torch.ops.aten._safe_softmax(R(*IMAGE), -1),
    "attention, short": lambda: attend(32),
    "attention, long": lambda: attend(200),
    "upsampling, small": lambda: back(F.interpolate(R(*IMAGE), size=64)),
    "upsampling, large": lambda: back(F.interpolate(R(*IMAGE), size=65)),
    "bilinear, small": lambda: back(F.interpolate(R(*IMAGE), size=64, mode="bilinear")),
    "bilinear, channels last": lambda: F.interpolate(last(*IMAGE), size=64, mode="bilinear"),
    "bilinear, three channels": lambda: F.interpolate(R(2, 3, 32, 32), size=99, mode="bilinear"),
}


@pytest.mark.matrix(12)
@pytest.mark.parametrize("name", CASES)
def test_the_formula_is_what_the_allocator_saw(name: str) -> None:
    found = allocated(CASES[name])
    assert found
    for op, (formula, events) in found.items():
        assert formula == pytest.approx(events, abs=SLACK if "upsample" not in op else 4096), op
