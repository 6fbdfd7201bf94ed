"""Finds which rank has which parameters and buffers, and builds a rank's part of the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from placer.emit import StagedModel, materialize
from placer.program import Stored, first_names, named_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """The devices of a replica that have each parameter and buffer; the same on every rank.

    A tensor with several names, or read by several stages, has one entry in ``holders`` under the first
    of its names. The first device of the entry owns it.
    """

    device_of: tuple[int, ...]  # for each stage, the index of its device in the replica
    names: tuple[tuple[str, ...], ...]  # for each device of the replica, the names it has, in order
    first_name: Mapping[str, str]  # for every name, the first of the tensor's names
    # For a first name, the devices that have it, owner first.
    holders: Mapping[str, tuple[int, ...]]


def find_ownership(model: nn.Module, staged: StagedModel, device_of: tuple[int, ...]) -> Ownership:
    """The ownership when stage ``s`` runs on device ``device_of[s]`` of its replica.

    A device has the tensors that its stages read; a tensor that no stage reads is on its owner only.
    """
    first_name = first_names(model)
    read = {name for stage in staged.stages for name in stage.state}
    devices = range(max(device_of) + 1)
    have: list[set[str]] = [set() for _ in devices]
    for stage in staged.stages:
        have[device_of[stage.index]].update(stage.state)
    for name, owner in staged.state_stage.items():
        if name not in read:
            have[device_of[owner]].add(name)
    holders: dict[str, tuple[int, ...]] = {}
    for name, first in first_name.items():
        owner = device_of[staged.state_stage[name]]
        others = [d for d in devices if name in have[d]]
        holders[first] = tuple(dict.fromkeys((*holders.get(first, (owner,)), *others)))
    return Ownership(
        device_of=device_of,
        names=tuple(tuple(name for name in first_name if name in own) for own in have),
        first_name=first_name,
        holders=holders,
    )


def build_part(
    model: nn.Module,
    staged: StagedModel,
    ownership: Ownership,
    device_index: int,
    device: torch.device,
    *,
    weights: Path | None = None,
    initialize: Callable[[nn.Module], None] | None = None,
    absent: dict[str, torch.Tensor] | None = None,
    tree: bool = False,
) -> nn.Module:
    """A copy of ``model`` with only the tensors of ``device_index``, created directly on ``device``.

    It lacks the modules whose own tensors are all elsewhere, if the device's stages do not call them and
    forward stores nothing in their attributes. Modules without tensors are on every rank, because the caller
    may change their modes and attributes. ``absent`` is that of `materialize`. With ``tree`` (if
    `copying.is_tree` of the model) they are left out too, and nothing else is copied, which takes much less
    time; no caller sees such a part.
    """
    names = ownership.names[device_index]
    homes = dict.fromkeys(ownership.first_name, device)
    only = {ownership.first_name[name] for name in names}
    stages = [s for s in staged.stages if ownership.device_of[s.index] == device_index]
    called = {path for stage in stages for path in stage.modules}
    kept = called | {path for path in map(_stored_in, staged.stored) if path is not None}
    if not tree:
        paths = {path for path, _ in model.named_modules(remove_duplicate=False)}
        kept |= paths - {name.rpartition(".")[0] for name in ownership.first_name}
    owners = {name.rpartition(".")[0] for name in (*names, *only)}
    if tree:
        model = _shallow(model)
        _drop_modules(model, called, kept | owners)
    part = materialize(
        model, homes, weights=weights, initialize=initialize, only=only, absent=absent
    )
    _drop_tensors(part, set(names))
    _drop_modules(part, called, kept | {name.rpartition(".")[0] for name in names})
    return part


def _stored_in(each: Stored) -> str | None:
    """The module in whose attributes forward stores ``each``; None if it is in no attribute of a module."""
    if each.root != "model" or each.kind in ("write", "requires_grad"):
        return None
    return None if each.path[1] in ("_parameters", "_buffers", "_modules") else each.path[0]


def _shallow(model: nn.Module) -> nn.Module:
    """A twin of ``model`` with the same tensors and attributes, from which submodules can be dropped."""
    made: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        made[module] = module.__class__.__new__(module.__class__)
        made[module].__dict__.update(vars(module))
    for module, twin in made.items():
        twin.__dict__["_modules"] = {
            name: child if child is None else made[child] for name, child in module._modules.items()
        }
    return made[model]


def broadcast_weights(
    model: nn.Module, part: nn.Module, ownership: Ownership, device: torch.device
) -> None:
    """Copy the values of rank 0's ``model`` to every rank's ``part``; a collective call.

    ``DistributedDataParallel`` does the same, so a program need not seed its model. Tensors on ``meta``
    are skipped; they must be the same ones on all ranks. A rank needs memory for at most one tensor that
    it does not have itself.
    """
    held = {ownership.first_name[name]: tensor.detach() for name, tensor in named_state(part)}
    given = {ownership.first_name[name]: tensor.detach() for name, tensor in named_state(model)}
    for name, tensor in given.items():
        if tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
            continue
        if dist.get_rank() == 0:
            flat = tensor.to(device).reshape(-1)
        else:
            flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=device)
        dist.broadcast(flat.view(torch.uint8), 0)  # backends do not support all dtypes
        if name in held and dist.get_rank() > 0:
            held[name].copy_(flat.view(tensor.shape))


def _drop_tensors(part: nn.Module, kept: Collection[str]) -> None:
    for module, prefixes in _prefixes(part).items():
        for table in (module._parameters, module._buffers):
            for leaf in [name for name, tensor in table.items() if tensor is not None]:
                if not any(prefix + leaf in kept for prefix in prefixes):
                    del table[leaf]


def _drop_modules(part: nn.Module, whole: Collection[str], kept: Collection[str]) -> None:
    """Delete the submodules that are not in ``kept``, do not contain one of ``kept``, nor are in ``whole``.

    All descendants of the modules ``whole`` stay. A module with several paths stays if any of them does.
    """
    wanted = {path[:end] for path in kept for end in _ends(path)}
    untouched = {module for path in whole for module in part.get_submodule(path).modules()}
    for module, prefixes in _prefixes(part).items():
        if module not in untouched:
            for name in list(module._modules):
                if not any(prefix + name in wanted for prefix in prefixes):
                    del module._modules[name]


def _prefixes(part: nn.Module) -> dict[nn.Module, list[str]]:
    """For each module the paths under which it is registered, each with a dot at its end."""
    found: dict[nn.Module, list[str]] = {}
    for path, module in part.named_modules(remove_duplicate=False):
        found.setdefault(module, []).append(f"{path}." if path else "")
    return found


def _ends(path: str) -> list[int]:
    """The lengths of a dotted path's prefixes, the path itself included."""
    return [i for i, c in enumerate(path) if c == "."] + [len(path)]
