"""What is done around a call of a placed module: the model's own hooks, and what cannot be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.jit import is_tracing  # type: ignore[attr-defined]  # it is public all the same

from placer._torch import is_under_compile
from placer.errors import PlacerError


def run_forward_pre_hooks(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as the pre-hooks of ``module`` leave them, by ``nn.Module.__call__``'s rules."""
    args, kwargs = tuple(args), dict(kwargs)
    for key, hook in list(module._forward_pre_hooks.items()):
        if key in module._forward_pre_hooks_with_kwargs:
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
    """The output as the forward hooks of ``module`` leave it, by ``nn.Module.__call__``'s rules."""
    for key, hook in list(module._forward_hooks.items()):
        with_kwargs = key in module._forward_hooks_with_kwargs
        given = (args, kwargs, output) if with_kwargs else (args, output)
        changed = hook(module, *given)
        output = output if changed is None else changed
    return output


def refuse_backward_hooks(module: nn.Module) -> None:
    """Raise ``PlacerError`` when ``module`` has full backward hooks: a schedule has no one backward."""
    if module._backward_hooks or module._backward_pre_hooks:
        raise PlacerError(
            "step",
            "the model itself has full backward hooks, and under a schedule there is no one "
            "backward of the whole model that they could see",
            "call placed(x) and loss.backward(), where they run, or put the hooks on a submodule",
        )


def refuse_compile() -> None:
    """Raise ``PlacerError`` when a placed module, or code that calls one, is compiled or traced."""
    if is_under_compile() or is_tracing():
        raise compile_error()


def compile_error() -> PlacerError:
    """That a placed module is not for ``torch.compile``, ``torch.export`` and ``torch.jit.trace``."""
    return PlacerError(
        "torch.jit.trace" if is_tracing() else "torch.compile",
        "a placed module runs its stages on several devices, slice by slice of the batch, and is no one "
        "graph to compile or to export",
        "call the placed module itself, uncompiled; in a function that is compiled, call "
        "torch.compiler.disable(placed); to export, load placed.state_dict() into the plain model",
    )
