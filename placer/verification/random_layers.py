"""Find the layers of a model that draw random numbers of torch, such as dropout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from placer._torch import DispatchMode
from placer.generators import random_state
from placer.operands import tensors_in


@contextmanager
def find_random_layers(module: nn.Module) -> Iterator[list[str]]:
    """In this block, note the innermost layers of ``module`` whose forward draws random numbers.

    The list fills while the block runs: module paths in the order in which they first draw, ``""`` for the
    module's own code. A layer counts if a random operator changed the state of the generator, so a dropout
    in eval mode, or with a probability of 0, does not.
    """
    inside: list[str] = []
    found: list[str] = []

    def enter(name: str, *_: Any) -> None:
        inside.append(name)

    def leave(*_: Any) -> None:
        inside.pop()

    def drew() -> None:
        name = inside[-1] if inside else ""
        if name not in found:
            found.append(name)

    with ExitStack() as stack:
        for name, layer in module.named_modules():
            for handle in (
                layer.register_forward_pre_hook(partial(enter, name)),
                layer.register_forward_hook(leave, always_call=True),
            ):
                stack.callback(handle.remove)
        stack.enter_context(_Draws(drew))
        yield found


class _Draws(DispatchMode):
    """Calls ``drew`` after every operator that drew from the default generator of its device."""

    def __init__(self, drew: Callable[[], None]) -> None:
        super().__init__()
        self._drew = drew

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        devices = {t.device for t in tensors_in(args, kwargs)} | {_asked_for(kwargs)}
        before = {device: random_state(device) for device in devices}
        result = func(*args, **kwargs)
        if any(not torch.equal(state, random_state(device)) for device, state in before.items()):
            self._drew()
        return result


def _asked_for(kwargs: Any) -> torch.device:
    device = kwargs.get("device")
    return torch.device("cpu" if device is None else device)
