"""The state of torch's default random generator of a device."""

from __future__ import annotations

import torch
from torch import Tensor


def random_state(device: torch.device) -> Tensor:
    """The state of the default generator that operations on ``device`` draw from; the CPU's for ``meta``."""
    if device.type in ("cpu", "meta"):
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Set the state of that generator."""
    if device.type in ("cpu", "meta"):
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
