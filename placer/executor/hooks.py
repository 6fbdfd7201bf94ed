"""Runs a placed module's own forward hooks in `step`, and refuses hooks and compilers that cannot work."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.jit import is_tracing  # type: ignore[attr-defined]  # it is public all the same

from placer._torch import forward_hooks, forward_pre_hooks, has_backward_hooks, is_under_compile
from placer.errors import PlacerError
from placer.program.objects.paths import spell
from placer.program.objects.reachable import find_reachable_state
from placer.program.objects.restore import Snapshot, hook_owners, module_roots


def run_forward_pre_hooks(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments after the forward pre-hooks of ``module``, by the rules of ``nn.Module.__call__``."""
    args, kwargs = tuple(args), dict(kwargs)
    for hook, with_kwargs in forward_pre_hooks(module):
        if with_kwargs:
            both = hook(module, args, kwargs)
            args, kwargs = args if both is None else both[0], kwargs if both is None else both[1]
            continue
        changed = hook(module, args)
        if changed is not None:
            args = changed if isinstance(changed, tuple) else (changed,)
    return args, kwargs


def run_forward_hooks(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
) -> Any:
    """The output after the forward hooks of ``module``, by the rules of ``nn.Module.__call__``."""
    for hook, with_kwargs in forward_hooks(module):
        given = (args, kwargs, output) if with_kwargs else (args, output)
        changed = hook(module, *given)
        output = output if changed is None else changed
    return output


@contextmanager
def keeping_nothing(module: nn.Module) -> Iterator[None]:
    """In this block, the forward hooks of ``module`` run on a slice of the batch, as they will on others.

    Raises ``PlacerError``, and undoes what they did, if they keep something, as the whole batch would once.
    """
    alone = nn.Module()
    alone._forward_hooks = module._forward_hooks
    modules = set(map(id, module.modules()))
    roots = [*module_roots(module), *hook_owners(alone, "", modules)]
    before = Snapshot(roots, find_reachable_state(alone))
    yield
    for change in before.changes():
        before.restore()
        raise PlacerError(
            "step",
            f"a forward hook on the model sets {spell(change.path)}, once for every slice of the batch",
            "call placed(x) and loss.backward(), which run it once; or use 1 replica and 1 micro-batch",
        )


def refuse_backward_hooks(module: nn.Module) -> None:
    """Raise ``PlacerError`` if ``module`` has full backward hooks, which a schedule cannot run."""
    if has_backward_hooks(module):
        raise PlacerError(
            "step",
            "the model itself has full backward hooks, but a schedule has no single backward of the "
            "whole model in which they could run",
            "call placed(x) and loss.backward(), which run them, or put the hooks on a submodule",
        )


def refuse_compile() -> None:
    """Raise ``PlacerError`` if ``torch.compile``, export or tracing has reached a placed module."""
    if is_under_compile() or is_tracing():
        raise compile_error()


def compile_error() -> PlacerError:
    """The error for ``torch.compile``, ``torch.export`` or ``torch.jit.trace`` of a placed module."""
    exporting = "torch.export" if torch.compiler.is_exporting() else "torch.compile"
    return PlacerError(
        "torch.jit.trace" if is_tracing() else exporting,
        "a placed module runs its stages on several devices, one slice of the batch after the other, so "
        "it cannot be compiled or exported as one graph",
        'call the placed module uncompiled; "compile": true in its spec compiles every stage. In a function '
        "that is compiled, call torch.compiler.disable(placed). To export, export the plain model after "
        "model.load_state_dict(placed.state_dict())",
    )


def apply_in_place(
    apply: Callable[..., Any], fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool
) -> Any:
    """``nn.Module._apply`` of a placed module: casts tensors, but leaves them on their devices, and warns.

    Trainers call ``to(device)`` on what they train. A stage whose weights were moved could not run.
    """
    asked: list[torch.device] = []

    def stay(tensor: torch.Tensor) -> torch.Tensor:
        found = fn(tensor)
        if found.device == tensor.device:
            return found
        asked.append(found.device)
        return tensor.to(found.dtype)

    result = apply(stay, recurse)
    if asked:
        warnings.warn(
            f"a placed module stays on the devices of its plan: nothing was moved to {asked[0]}; "
            "to move it, place it again with another spec",
            stacklevel=4,
        )
    return result
