"""Modules that are a single node of the graph: layers of ``torch.nn``, and modules with hooks."""

from __future__ import annotations

import functools
from collections.abc import Collection, Container, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

from placer._torch import FORWARD_HOOK_TABLES, HOOK_TABLES, hooks_of
from placer.program.failure import locate_function
from placer.program.objects.paths import function_parts
from placer.program.objects.reachable import ReachableState
from placer.program.types import WholeModule

_PLAIN = (bool, int, float, str)
# Modules of torch.nn that contain layers: they are recorded operation by operation.
_CONTAINERS = (
    nn.Sequential, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder,
    nn.TransformerEncoderLayer, nn.TransformerDecoderLayer,
)  # fmt: skip


def is_torch_leaf(module: nn.Module) -> bool:
    """Is ``module`` a layer of ``torch.nn`` that becomes one node of the graph?

    One with a ``forward`` of its own, such as a wrapper of torch's, is not: it may compute anything.
    """
    is_layer = type(module).__module__.startswith(("torch.nn", "torch.ao.nn"))
    return is_layer and not isinstance(module, _CONTAINERS) and "forward" not in vars(module)


def is_inside(paths: Collection[str], path: str) -> bool:
    """Is the module at ``path`` one of those at ``paths``, or inside one?"""
    return any(path == p or path.startswith(p + ".") for p in paths)


def must_stay_whole(module: nn.Module) -> bool:
    """Does ``module`` have hooks or parametrizations, which must run around the whole of it?"""
    return has_hooks(module) or "parametrizations" in module._modules


def has_hooks(module: nn.Module) -> bool:
    """Does ``module`` have hooks that run when it is called, forward or backward?"""
    return any(map(module.__dict__.get, HOOK_TABLES))


def hook_count(module: nn.Module) -> int:
    """The number of hooks that run when ``module`` is called, forward and backward."""
    return sum(len(module.__dict__.get(name) or ()) for name in HOOK_TABLES)


class OwnHook:
    """A hook of the model itself; equal to another function of the same code with the same variables."""

    def __init__(self, hook: Any) -> None:
        self._parts = function_parts(hook) or [("", hook)]  # what lives keeps its id
        values = [(type(x), x if isinstance(x, _PLAIN) else id(x)) for _, x in self._parts]
        self._key = getattr(hook, "__code__", None), *values

    def __deepcopy__(self, memo: object) -> OwnHook:
        return self

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnHook) and self._key == other._key


def own_hooks(
    module: nn.Module, code: ReachableState, modules: Container[int]
) -> tuple[OwnHook, ...]:
    """The hooks of ``module`` that are the model's own, with ``code`` and ``modules`` (ids)."""
    return tuple(OwnHook(x) for x in hooks_of(module) if _is_own(x, code, modules))


def runs_own_hooks(module: nn.Module, code: ReachableState, modules: Container[int]) -> bool:
    """Does ``module`` have forward hooks, and are all its hooks those of the model itself?

    They are part of what forward computes, and recorded like it. So it is with functions that the model's
    ``code`` defines, and with methods of its ``modules`` (ids).
    """
    tables = {name: (module.__dict__.get(name) or {}).values() for name in HOOK_TABLES}
    hooks = [hook for name in FORWARD_HOOK_TABLES for hook in tables[name]]
    return len(hooks) == sum(map(len, tables.values())) > 0 and all(
        _is_own(hook, code, modules) for hook in hooks
    )


def _is_own(hook: Any, code: ReachableState, modules: Container[int]) -> bool:
    function = hook.func if isinstance(hook, functools.partial) else hook
    if isinstance(function, MethodType):
        return id(function.__self__) in modules
    return code.defines(getattr(function, "__code__", None))


@contextmanager
def without_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Remove the forward and backward hooks of ``modules`` in this block."""
    tables = [module.__dict__[name] for module in modules for name in HOOK_TABLES]
    contents = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, content in zip(tables, contents, strict=True):
            table.update(content)


def find_whole_modules(model: nn.Module, code: ReachableState) -> list[WholeModule]:
    """Submodules that must be a single node, with the reason and the line of the hook or forward of each.

    ``code`` is that of the model.
    """
    whole = []
    modules = set(map(id, model.modules()))
    for path, module in model.named_modules():
        if not path or is_torch_leaf(module) or not must_stay_whole(module):
            continue
        if "parametrizations" not in module._modules and runs_own_hooks(module, code, modules):
            continue
        hooks = [hook for name in HOOK_TABLES for hook in getattr(module, name, {}).values()]
        location = locate_function(hooks[0] if hooks else type(module).forward)
        reason = "it has parametrized parameters, which must be computed inside it"
        if hooks:
            reason = "it has hooks, which must run around the whole module"
        whole.append(WholeModule(layer=path, reason=reason, location=location))
    return whole
