"""Torch's random generators: the default one of a device, and those of a rank in a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def own_random_state(device: torch.device, replica_index: int, device_index: int) -> Iterator[None]:
    """Run the block with random generators seeded for this replica and this device.

    The seed is drawn from the CPU's generator, and that draw is the only change to the program's own
    generators. So random numbers that ranks draw outside the block (to shuffle a data set) stay the same
    on all of them.
    """
    drawn = int(torch.randint(2**62, ()).item())
    generators = [torch.default_generator]
    if device.type != "cpu":
        generators.append(torch.get_device_module(device).default_generators[device.index])
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed((drawn + (replica_index << 20) + device_index) % 2**63)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
