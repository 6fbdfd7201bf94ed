"""Makes the steps of the user's own optimizers update pieces of parameters; see `reduction.pieces`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from placer._torch import hook_first_after_step
from placer.errors import PlacerError
from placer.executor.distributed.job.groups import gather_objects
from placer.executor.distributed.reduction.elementwise import require_elementwise
from placer.executor.distributed.reduction.pieces import Pieces
from placer.executor.distributed.runtime import DistributedRuntime, runtime_of_rank


def update_pieces(module: nn.Module) -> None:
    """Make every optimizer that steps with parameters of ``module`` update this rank's pieces of them.

    Hooks on gradients and on the optimizer see whole tensors. Raises ``PlacerError`` at the first step of an
    optimizer that does not update each number by itself, or that has other parameters on other ranks.
    """
    reference = weakref.ref(module)
    hooked: weakref.WeakKeyDictionary[Optimizer, list[Any]] = weakref.WeakKeyDictionary()

    def hook(optimizer: Optimizer, *_: Any) -> None:
        module = reference()
        if module is None:
            return
        runtime = runtime_of_rank(module)
        own = _shared_by(optimizer, runtime.pieces)
        if not own:
            return
        if optimizer not in hooked:
            require_elementwise(optimizer, own[0])
            _require_same_parameters(runtime, own)
        for handle in hooked.get(optimizer, ()):
            handle.remove()
        # In every step again, to be next to the step: the user's own hooks see what they see without pieces.
        hooked[optimizer] = [
            optimizer.register_step_pre_hook(partial(_begin, runtime)),
            hook_first_after_step(optimizer, partial(_end, runtime)),
        ]

    handle = register_optimizer_step_pre_hook(hook)
    weakref.finalize(module, handle.remove)


def _shared_by(optimizer: Optimizer, pieces: Pieces) -> list[nn.Parameter]:
    found = (p for group in optimizer.param_groups for p in group["params"])
    return [p for p in found if id(p) in pieces.shared]


def _require_same_parameters(runtime: DistributedRuntime, own: Sequence[nn.Parameter]) -> None:
    """Raise ``PlacerError`` unless all ranks that have parameters in common update the same ones."""
    names: dict[tuple[int, ...], list[str]] = {}
    for parameter in own:
        shared = runtime.pieces.shared[id(parameter)]
        names.setdefault(shared.holders, []).append(shared.name)
    with runtime.watch():
        for holders, found in sorted(names.items()):
            everyone = gather_objects(sorted(found), runtime.process_groups.of_holders(holders))
            odd = {name for each in everyone for name in set(each) ^ set(everyone[0])}
            if odd:
                raise PlacerError(
                    min(odd),
                    "is in the optimizer on some of the ranks that have it, but not on others",
                    "give the optimizer the same parameters in every replica",
                )


def _begin(
    runtime: DistributedRuntime, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the closure, if the step got one, while parameters are whole; then make pieces of them."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if callable(closure):
        with torch.enable_grad():
            loss = closure()
        if "closure" in kwargs:
            kwargs = {**kwargs, "closure": lambda: loss}
        else:
            args = (args[0], lambda: loss, *args[2:])
    pieces = runtime.pieces
    pieces.begin(_shared_by(optimizer, pieces), optimizer.state)
    return args, kwargs


def _end(runtime: DistributedRuntime, *_: Any) -> None:
    with runtime.watch():
        runtime.pieces.end()
