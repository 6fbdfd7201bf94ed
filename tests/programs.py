"""Models made at random: hypothesis draws a program, `Program` runs it.

A program is a list of steps over a growing list of values, all of shape (rows, channels, 6, 6) with
their own number of channels. Indices are taken modulo what there is, so that every list of steps is a
program and hypothesis can shrink it freely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

CHANNELS, SIDE = 4, 6
_WIDEST = 16


@dataclass(frozen=True, slots=True)
class Step:
    """One step: what it does, which values it reads, and a number that chooses among its variants."""

    kind: str
    first: int
    second: int
    option: int


_MODULE_KINDS = ("conv", "grouped", "pointwise", "batch", "group", "instance", "drop", "block")
_PLAIN_KINDS = (
    "add",
    "multiply",
    "concatenate",
    "activate",
    "pool",
    "chunk",
    "factory",
    "detach",
    "no_grad",
    "branch",
    "reshape",
)
_STATE_KINDS = ("shared", "tied", "parameter", "counter")
_IN_PLACE_KINDS = ("relu_", "add_", "write_view", "inplace_module")
KINDS = (*_MODULE_KINDS, *_PLAIN_KINDS, *_STATE_KINDS, *_IN_PLACE_KINDS)


class Block(nn.Module):
    """A residual block, so that layers have names two deep."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.conv(self.norm(x)))


class Program(nn.Module):
    """The model of a list of steps; ``outputs`` are the values it returns, in a ``structure``."""

    def __init__(self, steps: Sequence[Step], outputs: Sequence[int], structure: str) -> None:
        super().__init__()
        self.steps, self.outputs, self.structure = tuple(steps), tuple(outputs), structure
        self.layers = nn.ModuleDict()
        self.weights = nn.ParameterDict()
        self.register_buffer("calls", torch.zeros(()))
        self._module_of: dict[int, str] = {}
        widths = [CHANNELS]
        for index, step in enumerate(self.steps):
            widths += self._prepare(index, step, widths)
        self.head = nn.Linear(widths[-1], 3)

    def _prepare(self, index: int, step: Step, widths: list[int]) -> list[int]:
        """Make what step ``index`` owns; the widths of the values that it adds."""
        width = widths[step.first % len(widths)]
        module, name = _module(step, width), f"{step.kind}{index}"
        if step.kind in ("shared", "tied"):
            near = [
                k for k, m in self.layers.items() if isinstance(m, nn.Conv2d) and _fits(m, width)
            ]
            if near:
                self._module_of[index] = near[step.option % len(near)]
            else:
                module = nn.Conv2d(width, width, 3, padding=1)
        if step.kind == "parameter":
            self.weights[name] = nn.Parameter(torch.randn(1, width, 1, 1))
        if module is not None:
            self.layers[name] = module
            self._module_of[index] = name
        used = self.layers[self._module_of[index]] if index in self._module_of else None
        return _widths_after(step, widths, width, used)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        values = [x if scale is None else x * scale]
        for index, step in enumerate(self.steps):
            values += self._run(index, step, values)
        results = [values[i % len(values)] for i in self.outputs]
        logits = self.head(values[-1].mean((2, 3)))
        if self.structure == "tensor":
            return logits
        if self.structure == "dict":
            return {"logits": logits, "maps": results, "rows": x.shape[0]}
        return (logits, *results)

    def _run(self, index: int, step: Step, values: list[Tensor]) -> list[Tensor]:
        a, b = values[step.first % len(values)], values[step.second % len(values)]
        if index in self._module_of:
            module = self.layers[self._module_of[index]]
            if step.kind == "tied":
                assert isinstance(module, nn.Conv2d)
                return [F.conv2d(a, module.weight, padding=module.padding, groups=module.groups)]
            return [module(a if step.kind != "inplace_module" else a + 1)]
        if step.kind == "parameter":
            return [a * self.weights[f"parameter{index}"]]
        if step.kind == "counter":
            self.calls += 1
            return [a + self.calls.clone()]
        return _plain(step, a, b)


def _module(step: Step, width: int) -> nn.Module | None:
    wide = min(_WIDEST, width + 2 * (step.option % 3))
    makers: Mapping[str, Any] = {
        "conv": lambda: nn.Conv2d(width, wide, 3, padding=1),
        "grouped": lambda: nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False),
        "pointwise": lambda: nn.Conv2d(width, CHANNELS, 1),
        "batch": lambda: nn.BatchNorm2d(width),
        "group": lambda: nn.GroupNorm(1, width),
        "instance": lambda: nn.InstanceNorm2d(width, affine=True),
        "drop": lambda: nn.Dropout((0.1, 0.5)[step.option % 2]),
        "block": lambda: Block(width),
        "inplace_module": lambda: nn.ReLU(inplace=True),
    }
    return makers[step.kind]() if step.kind in makers else None


def _fits(conv: nn.Conv2d, width: int) -> bool:
    return conv.in_channels == width and conv.padding[0] in (0, 1)


def _widths_after(step: Step, widths: list[int], width: int, module: nn.Module | None) -> list[int]:
    second = widths[step.second % len(widths)]
    if isinstance(module, nn.Conv2d):
        return [module.out_channels]
    if step.kind in ("add", "multiply", "branch"):
        return [min(width, second)]
    if step.kind == "concatenate":
        return [min(_WIDEST, width + second)]
    if step.kind == "chunk":
        return [(width + 1) // 2, width // 2] if width > 1 else [width]
    return [width]


def _plain(step: Step, a: Tensor, b: Tensor) -> list[Tensor]:
    """The steps that own no state."""
    option = step.option
    narrow = min(a.shape[1], b.shape[1])
    if step.kind == "add":
        return [a[:, :narrow] + b[:, :narrow]]
    if step.kind == "multiply":
        return [a[:, :narrow] * torch.sigmoid(b[:, :narrow])]
    if step.kind == "concatenate":
        return [torch.cat([a, b], 1)[:, :_WIDEST]]
    if step.kind == "activate":
        return [(F.gelu, torch.tanh, F.silu, torch.relu)[option % 4](a)]
    if step.kind == "pool":
        return [F.interpolate(F.max_pool2d(a, 2), size=a.shape[-2:])]
    if step.kind == "chunk":
        return list(a.chunk(2, dim=1))
    if step.kind == "factory":
        ramp = torch.arange(a.shape[-1], device=a.device, dtype=a.dtype)
        return [a + ramp * torch.ones(a.shape[0], 1, 1, 1, device=a.device, dtype=a.dtype)]
    if step.kind == "detach":
        return [a.detach() + a * 0.5]
    if step.kind == "no_grad":
        with torch.no_grad():
            shift = a.mean((2, 3), keepdim=True)
        return [a - shift]
    if step.kind == "branch":
        return [a[:, :narrow] - b[:, :narrow] if a.shape[1] > b.shape[1] else a[:, :narrow] * 0.5]
    if step.kind == "reshape":
        flat = a.flatten(2).transpose(1, 2)
        return [flat.transpose(1, 2).reshape(a.shape)]
    return [_in_place(step, a)]


def _in_place(step: Step, a: Tensor) -> Tensor:
    y = a * 1.5 if step.option % 2 else a.tanh()
    if step.kind == "relu_":
        return y.relu_()
    if step.kind == "add_":
        y += a
        return y
    assert step.kind == "write_view", step.kind
    z = y + 1
    z[:, : max(1, z.shape[1] // 2)].mul_(0.5)
    return z


_indices = st.integers(0, 30)
_steps = st.builds(Step, st.sampled_from(KINDS), _indices, _indices, _indices)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A model of 2 to 12 steps in float64, in train mode, its weights drawn with seed 0."""
    steps = draw(st.lists(_steps, min_size=2, max_size=12))
    outputs = draw(st.lists(_indices, max_size=2))
    structure = draw(st.sampled_from(("tensor", "tuple", "dict")))
    torch.manual_seed(0)
    model = Program(steps, outputs, structure).double()
    for norm in model.modules():
        if isinstance(norm, nn.InstanceNorm2d | nn.GroupNorm | nn.BatchNorm2d):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
    return model


def inputs(rows: int, *, scaled: bool) -> tuple[Tensor, ...]:
    """A batch for a `Program`, with or without the optional argument."""
    torch.manual_seed(1)
    x = torch.randn(rows, CHANNELS, SIDE, SIDE, dtype=torch.float64)
    return (x, torch.rand(rows, 1, 1, 1, dtype=torch.float64)) if scaled else (x,)
