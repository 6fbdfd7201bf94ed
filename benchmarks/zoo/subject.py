"""A model to be tested with placer: how to build it, and its example inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model by name; owns no weights until ``build`` is called.

    ``call(training)`` gives the arguments of ``forward``: a batch of two, on the CPU.
    """

    name: str
    build: Callable[[], nn.Module]
    call: Callable[[bool], Call]
    may_be_whole: bool = False  # one coarse leaf is enough (detection)
    float64: bool = True  # compare in float64 where the model allows it


def positional(*shapes: tuple[int, ...]) -> Callable[[bool], Call]:
    """Random normal tensors of these shapes as positional arguments."""

    def call(training: bool) -> Call:
        return tuple(torch.randn(shape) for shape in shapes), {}

    return call


def keywords(**makers: Callable[[], Any]) -> Callable[[bool], Call]:
    """Keyword arguments, each made by its own function."""

    def call(training: bool) -> Call:
        return (), {name: make() for name, make in makers.items()}

    return call


def convert(call: Call, dtype: torch.dtype) -> Call:
    """``call`` with its floating-point tensors in ``dtype``."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, cast, call)


def to_meta(call: Call) -> Call:
    """``call`` with tensors that have no data."""
    return tree_map_only(Tensor, lambda tensor: tensor.to("meta"), call)


def with_rows(call: Call, rows: int) -> Call:
    """``call`` with another number of rows in every batched tensor (batch of two)."""

    def repeat(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.size(0) != 2:
            return tensor
        return torch.cat([tensor] * -(-rows // 2))[:rows]

    return tree_map_only(Tensor, repeat, call)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was found for one model; ``problem`` is empty when everything asked for is true."""

    name: str
    passed: bool
    problem: str = ""
    nodes: int = 0
    pieces: int = 0
    largest_share: float = 0.0  # of two stages' seconds
    best_share: float = 0.0  # the least largest share of any cut of the program's order in two
    largest_share_4: float = 0.0
    dtype: str = ""
    whole: tuple[str, ...] = ()  # submodules kept whole
    reasons: tuple[str, ...] = ()  # why, for each
    other_batch: str = ""  # "equal", "refused: why", or what went wrong
    capture_seconds: float = 0.0  # of processor time, for one capture
    seconds: float = 0.0  # of processor time, for all of it
