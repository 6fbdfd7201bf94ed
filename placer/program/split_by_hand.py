"""Finds out on which devices a model puts its own layers, without these devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._pytree import tree_leaves

from placer._torch import storage_key
from placer.program.moves import IgnoreDeviceMoves, replace_device
from placer.spec.fields import device_name


class DeviceNotes(IgnoreDeviceMoves):
    """Ignores moves to accelerators, and notes which tensors would be where.

    A tensor is on the device that the call which makes it names, else on that of the call's arguments; so is
    a parameter that a call reads. In this context, a model is built and, if its constructor does not say
    where its layers are, called with tensors on ``meta``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._devices: dict[int, torch.device] = {}
        self._kept: list[UntypedStorage] = []  # so that no address is used twice

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = dict(kwargs or {})
        if name == "cpu" or (name == "to" and str((*args[1:2], kwargs.get("device"))[0]) == "cpu"):
            self._note(args[0], torch.device("cpu"))
            return args[0]
        _, _, device = replace_device(name, args, kwargs)
        result = super().__torch_function__(func, types, args, kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if device is None:
            device = next(filter(None, map(self.device_of, given)), None)
            given = [tensor for tensor in given if isinstance(tensor, nn.Parameter)]
        else:
            given = []
        if device is not None:
            for tensor in given:
                if self.device_of(tensor) is None:
                    self._note(tensor, device)
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._note(leaf, device)
        return result

    def device_of(self, tensor: Tensor) -> torch.device | None:
        """The device on which ``tensor`` would be; None if that is not known."""
        if tensor.device.type not in ("cpu", "meta"):
            return tensor.device
        return self._devices.get(storage_key(tensor))

    def _note(self, tensor: Tensor, device: torch.device) -> None:
        self._devices[storage_key(tensor)] = device
        self._kept.append(tensor.untyped_storage())

    def layers_of(self, model: nn.Module) -> Mapping[str, str | None]:
        """Path -> device of each module with parameters of its own; None if it is not known."""
        found: dict[str, str | None] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            path = name.rpartition(".")[0]
            device = self.device_of(parameter)
            found[path] = found.get(path) or (None if device is None else device_name(str(device)))
        return found
