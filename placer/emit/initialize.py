"""Computes initial values for parameters on ``meta``, module by module."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from placer._torch import copy_attributes, copy_gradient_hooks, refresh_weight_list
from placer.errors import PlacerError


def initialize_module(
    model: nn.Module,
    missing: Collection[str],
    device_of: Mapping[str, torch.device],
    *,
    initialize: Callable[[nn.Module], None] | None,
) -> None:
    """Give initial values to the ``missing`` parameters and buffers of ``model``, which are on ``meta``.

    Modules are initialised one at a time on the CPU, by ``initialize`` or their
    ``reset_parameters()``, with a random seed derived from the module's path; the values are then moved to
    ``device_of[name]``. The state of the global random number generator is restored. Raises
    ``PlacerError``, which names every module that cannot be initialised.
    """
    owners: dict[str, list[str]] = {}
    for name in missing:
        path, _, leaf = name.rpartition(".")
        owners.setdefault(path, []).append(leaf)
    without = [
        f"{path or 'the model'} ({type(model.get_submodule(path)).__name__}: {', '.join(leaves)})"
        for path, leaves in owners.items()
        if initialize is None and not callable(_reset_of(model.get_submodule(path)))
    ]
    if without:
        listed = "\n    ".join(without)
        raise PlacerError(
            "model on meta",
            f"these modules have no reset_parameters():\n    {listed}",
            "pass weights=… (a checkpoint file) or initialize=… (a function of one module)",
        )
    # id of an old tensor -> (the old tensor, which keeps the id valid, the new tensor)
    made: dict[int, tuple[Tensor, Tensor]] = {}
    with torch.random.fork_rng(devices=[]):
        for path, leaves in owners.items():
            torch.manual_seed(zlib.crc32(path.encode()))
            module = model.get_submodule(path)
            values = _initialized(module, initialize)
            for leaf in leaves:
                name = f"{path}.{leaf}" if path else leaf
                old = module._parameters.get(leaf, module._buffers.get(leaf))
                assert old is not None
                made[id(old)] = (old, tensor_like(old, values[leaf].to(device_of[name])))
    _replace(model, made)


def _reset_of(module: nn.Module) -> object:
    reset = getattr(module, "reset_parameters", None)
    return reset or getattr(module, "_reset_parameters", None)


def _initialized(
    module: nn.Module, initialize: Callable[[nn.Module], None] | None
) -> dict[str, Tensor]:
    """The initial values of the module's own parameters and buffers, on the CPU."""
    alone = copy.copy(module)
    alone.__dict__ = dict(module.__dict__)
    alone._modules = dict(module._modules)
    alone._parameters = {
        name: p if p is None else nn.Parameter(_empty(p), p.requires_grad)
        for name, p in module._parameters.items()
    }
    alone._buffers = {name: b if b is None else _empty(b) for name, b in module._buffers.items()}
    if initialize is not None:
        initialize(alone)
    else:
        reset = _reset_of(alone)
        assert callable(reset)
        reset()
    own = {**alone._parameters, **alone._buffers}
    return {name: tensor.detach() for name, tensor in own.items() if tensor is not None}


def _empty(tensor: Tensor) -> Tensor:
    """A CPU tensor: zeros for a tensor on ``meta``, otherwise its data."""
    return torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.detach().cpu()


def tensor_like(original: Tensor, data: Tensor) -> Tensor:
    """``data`` as a parameter like ``original``, or as a plain tensor; with its attributes and hooks."""
    made = data.requires_grad_(original.requires_grad)
    if isinstance(original, nn.Parameter):
        made = nn.Parameter(data, requires_grad=original.requires_grad)
        if made.requires_grad:
            copy_gradient_hooks(original, made)
    copy_attributes(original, made)
    return made


def _replace(model: nn.Module, made: Mapping[int, tuple[Tensor, Tensor]]) -> None:
    """Replace each old tensor by its new one under all of its names, since it may be tied."""
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, old in table.items():
                if id(old) in made:
                    table[name] = made[id(old)][1]
        refresh_weight_list(module)
