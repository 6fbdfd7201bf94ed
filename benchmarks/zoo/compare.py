"""Run a module once and keep all it computes; compare two such runs tensor by tensor."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.zoo.subject import Call


class Failed(Exception):
    """The model does not pass; the message has the phase and the reason."""


def is_tensor(value: Any) -> bool:
    """Is it a tensor?"""
    return isinstance(value, Tensor)


def seeded(function: Callable[[], Any]) -> Any:
    """The result of ``function`` with all random number generators in their initial states."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return function()


def train(module: nn.Module, call: Call) -> dict[str, Tensor | None]:
    """Outputs, loss, gradients and buffers of one forward and backward; the module's state is kept."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    args, kwargs = _fresh_containers(call)
    module.zero_grad()
    output = seeded(lambda: module(*args, **kwargs))
    loss = _loss(output)
    if loss.requires_grad:
        loss.backward()
    values: dict[str, Tensor | None] = {"loss": loss.detach()}
    for index, leaf in enumerate(tree_leaves(output)):
        if is_tensor(leaf):
            values[f"output {index}"] = leaf.detach().clone()
    for name, parameter in module.named_parameters():
        values[f"gradient of {name}"] = parameter.grad
    for name, buffer in module.named_buffers():
        values[f"buffer {name}"] = buffer.clone()
    module.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in before and buffer.shape == before[name].shape:
                buffer.copy_(before[name])
    return values


def _fresh_containers(call: Call) -> Call:
    """The same tensors in new lists, because some models write to the list that they get."""
    return tree_map(lambda leaf: leaf, call)


def _loss(output: Any) -> Tensor:
    """A loss that weights every floating-point result differently."""
    leaves = [t for t in tree_leaves(output) if is_tensor(t) and t.is_floating_point()]
    parts = [(t.square().mean() + t.mean()) * (i + 1) for i, t in enumerate(leaves) if t.numel()]
    return torch.stack(parts).sum() if parts else torch.zeros(())


def infer(module: nn.Module, call: Call) -> dict[str, Tensor | None]:
    args, kwargs = _fresh_containers(call)
    with torch.no_grad():
        output = seeded(lambda: module(*args, **kwargs))
    leaves = enumerate(tree_leaves(output))
    return {f"output {index}": leaf for index, leaf in leaves if is_tensor(leaf)}


def jitter(module: nn.Module) -> nn.Module:
    """``module`` with every weight changed by a rounding error."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.is_floating_point():
                signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
                weight.mul_(1 + torch.finfo(weight.dtype).eps * signs)
    return module


def compare(
    found: dict[str, Tensor | None],
    expected: dict[str, Tensor | None],
    tolerance: float,
    jittered: Callable[[], dict[str, Tensor | None]] | None = None,
) -> None:
    """Raise ``Failed`` for the first tensor that is off by more than ``tolerance`` of its largest value.

    A gradient whose true value is zero (a bias before a norm) is noise. So every gradient may also be off by
    ``tolerance`` times a millionth of the largest gradient. A gradient as small as the rounding error of the
    largest one may be off by ten times the change that rounding errors in the weights cause in eager mode
    (``jittered``).
    """
    if list(found) != list(expected):
        names = sorted(set(found) ^ set(expected))[:3]
        raise Failed(f"other results than eager: {', '.join(names) or 'in another order'}")
    grads = [v for n, v in expected.items() if n.startswith("gradient") and v is not None]
    largest = max((_size(grad) for grad in grads), default=0.0)
    for name, value in expected.items():
        ours = found[name]
        if (ours is None) != (value is None):
            raise Failed(f"{name} is None {'in eager' if value is None else 'when placed'} only")
        if ours is None or value is None:
            continue
        if ours.shape != value.shape or ours.dtype != value.dtype:
            raise Failed(f"{name} is {ours.dtype} {tuple(ours.shape)}, not {tuple(value.shape)}")
        gradient = name.startswith("gradient")
        allowed = tolerance * max(_size(value), 1e-6 * largest if gradient else 0.0)
        if _close(ours, value, allowed):
            continue
        if gradient and jittered and _size(value) <= 10 * torch.finfo(value.dtype).eps * largest:
            moved = jittered()[name]
            if moved is not None and _close(ours, value, 10 * _size(moved - value)):
                continue
        error = _size(ours.double() - value.double()) / max(_size(value), 1e-300)
        raise Failed(f"{name} differs from eager by {error:.1e} of its largest value")


def _close(ours: Tensor, value: Tensor, allowed: float) -> bool:
    if ours.is_floating_point() or ours.is_complex():
        return torch.allclose(ours, value, rtol=0, atol=allowed, equal_nan=True)
    return torch.equal(ours, value)


def _size(value: Tensor) -> float:
    if not value.numel():
        return 0.0
    size = value.detach().abs().nan_to_num() if value.dtype != torch.bool else value
    return float(size.max())
