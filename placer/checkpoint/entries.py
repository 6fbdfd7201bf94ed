"""The entries of a checkpoint: a flat dict from entry names to tensors and plain values.

======================  ==========================================================================
``model/NAME``          a parameter or buffer of the ``state_dict``, under the first of its names
``state/NAME/KEY``      the optimizer's ``state[parameter][KEY]``
``group/NAME``          the options (learning rate …) of the parameter group that has NAME
``random/RANK``         the states of that rank's random generators, and the layout of the job
``extra``               the caller's argument of ``save``
======================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from placer.errors import PlacerError
from placer.generators import random_state, set_random_state
from placer.program import first_names

Entries = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The tensors of a process: ``first_name`` maps local names to first names; it saves the ``owned`` ones.

    ``owned`` has first names.
    """

    first_name: Mapping[str, str]
    owned: Collection[str]


def contents_of(module: nn.Module) -> Contents:
    """The contents of a process that has the whole module, and saves all of it."""
    first_name = first_names(module)
    return Contents(first_name=first_name, owned=frozenset(first_name.values()))


def entry_name(entry: str) -> str:
    """The name of an entry in error messages, without its kind.

    >>> entry_name("model/fc.weight"), entry_name("state/fc.weight/exp_avg"), entry_name("extra")
    ('fc.weight', 'fc.weight/exp_avg', 'extra')
    """
    kind, _, name = entry.partition("/")
    return name or kind


def module_state(module: nn.Module) -> dict[str, Any]:
    """The ``state_dict`` that ``nn.Module`` computes for ``module``, or for the model that was placed.

    Changes by an overridden ``state_dict`` of the root module are not part of a checkpoint.
    """
    return nn.Module.state_dict(module)


def model_entries(module: nn.Module, contents: Contents) -> Entries:
    """The tensors of the ``state_dict`` themselves (no copies), and modules' extra state."""
    found: Entries = {}
    for name, value in module_state(module).items():
        found.setdefault(f"model/{contents.first_name.get(name, name)}", value)
    return found


def parameter_names(
    module: nn.Module, contents: Contents, optimizer: Optimizer
) -> dict[int, tuple[str, Tensor]]:
    """``id`` of each parameter of the optimizer -> (its first name, the parameter).

    Leaves out a parameter without elements, which is the placeholder of a rank without parameters. Raises
    ``PlacerError`` for any other parameter that is not one of the module's.
    """
    names = {id(p): contents.first_name[n] for n, p in module.named_parameters()}
    found = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names and parameter.numel():
                raise PlacerError(
                    f"optimizer, group {number}",
                    f"a parameter of shape {tuple(parameter.shape)} is not one of the module's",
                    "create the optimizer with the parameters() of the module that is saved or loaded",
                )
            if id(parameter) in names:
                found[id(parameter)] = (names[id(parameter)], parameter)
    return found


def optimizer_entries(
    module: nn.Module, contents: Contents, optimizer: Optimizer, sharded: Collection[int] = ()
) -> Entries:
    """The optimizer's state and group options of every parameter, under the parameter's name.

    Without the state of parameters whose ids are in ``sharded``.
    """
    names = parameter_names(module, contents, optimizer)
    found: Entries = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        for name, parameter in (names[id(p)] for p in group["params"] if id(p) in names):
            found[f"group/{name}"] = options
            if id(parameter) not in sharded:
                for key, value in optimizer.state.get(parameter, {}).items():
                    found[f"state/{name}/{key}"] = value
    return found


def restore_optimizer(
    module: nn.Module, contents: Contents, optimizer: Optimizer, entries: Entries
) -> None:
    """Restore the entries of `optimizer_entries` through the optimizer's ``load_state_dict``."""
    names = parameter_names(module, contents, optimizer)
    state: dict[int, dict[str, Any]] = {}
    groups = []
    saved = by_parameter(entries)
    index = 0
    for group in optimizer.param_groups:
        own = [names[id(p)][0] if id(p) in names else None for p in group["params"]]
        options = next((entries[f"group/{name}"] for name in own if name is not None), group)
        groups.append({**options, "params": []})
        for name in own:
            if name is not None and name in saved:
                state[index] = saved[name]
            groups[-1]["params"].append(index)
            index += 1
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def by_parameter(entries: Entries) -> dict[str, dict[str, Any]]:
    """The entries ``state/NAME/KEY`` as nested dicts.

    >>> by_parameter({"state/fc.weight/step": 3, "group/fc.weight": {}})
    {'fc.weight': {'step': 3}}
    """
    found: dict[str, dict[str, Any]] = {}
    for entry, value in entries.items():
        kind, _, rest = entry.partition("/")
        if kind == "state":
            name, _, key = rest.rpartition("/")
            found.setdefault(name, {})[key] = value
    return found


def require_alike_groups(
    module: nn.Module, contents: Contents, optimizer: Optimizer, entries: Entries
) -> None:
    """Raise ``PlacerError`` if parameters of one group were saved with different options."""
    names = parameter_names(module, contents, optimizer)
    for number, group in enumerate(optimizer.param_groups):
        known = [names[id(p)][0] for p in group["params"] if id(p) in names]
        for name in known:
            first, option = entries[f"group/{known[0]}"], entries[f"group/{name}"]
            if not _same(option, first):
                raise PlacerError(
                    f"optimizer, group {number}",
                    f"{known[0]!r} and {name!r} were saved in groups with different options: "
                    f"{_show(first)} and {_show(option)}",
                    "create the same parameter groups as when the checkpoint was saved",
                )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    return bool(one == other)


def _show(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in list(options.items())[:4])


def random_entry(devices: Iterable[torch.device], layout: str) -> dict[str, Any]:
    """The states of torch's default generators of the CPU and of ``devices``."""
    states = {"cpu": random_state(torch.device("cpu"))}
    states |= {str(device): random_state(device) for device in devices if device.type != "cpu"}
    return {"layout": layout, "states": states}


def restore_random(
    entry: Mapping[str, Any] | None, devices: Iterable[torch.device], layout: str
) -> None:
    """Restore random generators, unless they were saved by a job with another layout."""
    if entry is None or entry["layout"] != layout:
        return
    set_random_state(torch.device("cpu"), entry["states"]["cpu"])
    for device in devices:
        if device.type != "cpu" and str(device) in entry["states"]:
            set_random_state(device, entry["states"][str(device)])
