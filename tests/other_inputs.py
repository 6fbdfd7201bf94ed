"""The law for later calls: the placed module equals the plain one on inputs other than the example's.

Outputs, gradients of parameters and inputs, buffers, modes, and the plain attributes of modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from oracle import assert_close
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

import placer

Arguments = tuple[Any, ...]

# How a model is cut: each must be equal, or refused with one clear error.
WAYS: dict[str, dict[str, Any]] = {
    "one device": {"devices": 1},
    "stages": {},
    "recomputed": {"checkpoint": ["**"]},
    "micro-batches": {"microbatches": 2},
    "replicas": {"replicas": 2},
}
UNCUT = ("one device", "stages", "recomputed")
CUT = ("micro-batches", "replicas")


def compile_way(model: nn.Module, args: Arguments, way: str, **fields: Any) -> placer.PlacedModule:
    """``model`` placed for the example ``args``, cut in the ``way`` of this name."""
    spec = {"devices": 2, "objective": "memory", "reserve": 0, **WAYS[way], **fields}
    spec["devices"] = [f"cuda:{i}" for i in range(spec["devices"])]
    return placer.compile(model, spec, args, run_on="cpu")


def assert_equal_calls(
    make: Callable[[], nn.Module],
    calls: Sequence[Callable[[], Arguments]],
    way: str = "stages",
    *,
    train: bool = True,
    between: Callable[[], object] = lambda: None,
    **fields: Any,
) -> placer.PlacedModule:
    """Compare the model placed for the first of ``calls`` with the plain one in all the others, twice.

    ``make`` makes the model; both are made from the same seed. With ``train`` the calls are differentiated,
    else they are made without gradients, in eval mode. ``between`` is done before every call.
    """
    torch.manual_seed(0)
    plain = make().double().train(train)
    torch.manual_seed(0)
    model = make().double().train(train)
    placed = compile_way(model, calls[0](), way, **fields)
    for number, call in enumerate([*calls[1:], *calls[1:]]):
        between()
        results = []
        for module in (placed, plain):
            torch.manual_seed(number)
            args = call()
            with torch.set_grad_enabled(train):
                results.append((module(*args), args))
            if train:
                _loss(results[-1][0]).backward()
        for part, name in enumerate(("result", "arguments")):
            _assert_equal(results[0][part], results[1][part], f"call {number}, {name}")
        assert_equal_state(placed, plain, f"call {number}")
    return placed


def assert_equal_state(placed: nn.Module, plain: nn.Module, where: str) -> None:
    """Compare gradients, buffers, modes and plain attributes."""
    for (name, ours), (_, theirs) in zip(
        placed.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert_close(ours.grad, theirs.grad, f"{where}, gradient of {name}")
    for name, buffer in plain.named_buffers():
        assert_close(placed.get_buffer(name), buffer, f"{where}, buffer {name}")
    for path, module in plain.named_modules():
        other = placed.get_submodule(path)
        assert other.training == module.training, f"{where}, mode of {path}"
        for name, value in vars(module).items():
            if not name.startswith("_") and isinstance(value, int | float | str | list | dict):
                assert getattr(other, name) == value, f"{where}, {path}.{name}"


def _loss(result: Any) -> Tensor:
    """A loss in which every element of ``result`` has another weight."""
    leaves = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.requires_grad]
    weights = [torch.linspace(0.3, 1.3, x.numel(), dtype=x.dtype).view_as(x) for x in leaves]
    return torch.stack([(x.square() * w).sum() for x, w in zip(leaves, weights, strict=True)]).sum()


def _assert_equal(ours: Any, theirs: Any, where: str) -> None:
    (found, form), (expected, other_form) = tree_flatten(ours), tree_flatten(theirs)
    assert form == other_form, where
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if isinstance(b, Tensor):
            assert_close(a.detach(), b.detach(), f"{where} {i}")
            assert a.requires_grad == b.requires_grad, f"{where} {i}"
            assert_close(
                a.grad if a.is_leaf else None, b.grad if b.is_leaf else None, f"{where} {i}"
            )
