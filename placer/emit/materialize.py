"""Copy a model with its parameters and buffers to the devices of a plan, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from placer.emit.initialize import initialize_module, tensor_like
from placer.emit.weights import open_weights
from placer.errors import PlacerError, first_few
from placer.program import named_state
from placer.program.objects.copying import copy_module

Initializer = Callable[[nn.Module], None]


def materialize(
    model: nn.Module,
    device_of: Mapping[str, torch.device],
    *,
    weights: Path | None = None,
    initialize: Initializer | None = None,
    only: Collection[str] | None = None,
    absent: dict[str, Tensor] | None = None,
) -> nn.Module:
    """A copy of ``model`` whose parameters and buffers are on ``device_of[name]``.

    The caller's model is not changed, but the copy has the same hooks, and the same objects in attributes if
    there are no tensors in them (`copy_module`). With ``weights`` (a safetensors file, or a file of
    ``torch.save``, which is memory-mapped), every parameter and buffer is read from the file. Without,
    tensors with data are copied, and modules with tensors on ``meta`` are initialised on the CPU, one
    at a time: by ``initialize(module)`` if given, else by their ``reset_parameters``. Each module's
    random seed is derived from its path, so all placements start from the same weights.
    Tied parameters stay tied. ``only`` are the names of the tensors to make (the first name of tied
    ones); all others are on ``meta``, and are shared by the copies that are made with the same ``absent``,
    which is filled with them. Raises ``PlacerError``, which lists every parameter that cannot
    be made or does not match the file.
    """
    wanted = set(device_of) if only is None else set(only)
    absent = {} if absent is None else absent
    if weights is not None:
        placed = _read(model, device_of, weights, wanted)
    else:
        placed = _copy(model, device_of, wanted)
    memo: dict[int, Any] = {}
    missing: list[tuple[str, Tensor]] = []
    for name, tensor in _named_once(model):
        if name in placed:
            memo[id(tensor)] = tensor_like(tensor, placed[name])
        elif name not in wanted:
            if name not in absent:
                absent[name] = tensor_like(tensor, tensor.detach().to("meta"))
            memo[id(tensor)] = absent[name]
        else:
            memo[id(tensor)] = tensor_like(tensor, tensor.detach())
            missing.append((name, tensor))
    copied = copy_module(model, memo, keep_objects=True)
    if missing:
        names = {name for name, _ in missing}
        initialize_module(copied, names, device_of, initialize=initialize)
    return copied


def _named_once(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter and buffer once, under its first name."""
    return [*model.named_parameters(), *model.named_buffers()]


def _copy(
    model: nn.Module, device_of: Mapping[str, torch.device], wanted: Collection[str]
) -> dict[str, Tensor]:
    return {
        name: tensor.detach().to(device_of[name], copy=True)
        for name, tensor in _named_once(model)
        if name in wanted and not tensor.is_meta
    }


def _read(
    model: nn.Module, device_of: Mapping[str, torch.device], path: Path, wanted: Collection[str]
) -> dict[str, Tensor]:
    names_of: dict[int, list[str]] = {}
    for name, tensor in named_state(model):
        names_of.setdefault(id(tensor), []).append(name)
    saved = nn.Module.state_dict(model, keep_vars=True)
    placed: dict[str, Tensor] = {}
    problems: list[str] = []
    with open_weights(path) as file:
        for name, tensor in _named_once(model):
            names = names_of[id(tensor)]
            found = next((n for n in names if n in file.shapes), None)
            if found is None:
                if not any(n in saved for n in names) and not tensor.is_meta:
                    if name not in wanted:
                        continue
                    placed[name] = tensor.detach().to(device_of[name], copy=True)
                elif any(n in saved for n in names):
                    problems.append(f"{name} is missing")
                continue
            if file.shapes[found] != tuple(tensor.shape):
                problems.append(
                    f"{name} has shape {file.shapes[found]}, the model's is {tuple(tensor.shape)}"
                )
                continue
            if name in wanted:
                placed[name] = file.read(found).to(device_of[name], tensor.dtype, copy=True)
        problems += [f"{name} is not in the model" for name in file.shapes if name not in saved]
    if problems:
        shown = "\n    ".join(first_few(problems, 20))
        raise PlacerError(
            f"weights {path}",
            f"the file does not match the model:\n    {shown}",
            "give a state_dict of this model, saved with safetensors or torch.save",
        )
    return placed
