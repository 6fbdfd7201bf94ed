"""Which modules are one node of the graph by nature, or must be before anything is recorded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from placer.program.failure import locate_function
from placer.program.types import WholeModule

# Containers of torch.nn with layers inside: they are looked into.
_CONTAINERS = (
    nn.Sequential,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def is_torch_leaf(module: nn.Module) -> bool:
    """Is ``module`` a layer of ``torch.nn``, which is one node of the graph?"""
    return type(module).__module__.startswith(("torch.nn", "torch.ao.nn")) and not isinstance(
        module, _CONTAINERS
    )


def is_inside(paths: Collection[str], path: str) -> bool:
    """Is the module at ``path`` one of those at ``paths``, or inside one?"""
    return any(path == p or path.startswith(p + ".") for p in paths)


def must_stay_whole(module: nn.Module) -> bool:
    """Has ``module`` what must run around or inside the whole of it: hooks, parametrizations?"""
    table = module.__dict__
    return any(table.get(name) for name in _HOOKS) or "parametrizations" in module._modules


@contextmanager
def without_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Have ``modules`` no hooks in this block that keep them whole."""
    tables = [module.__dict__[name] for module in modules for name in _HOOKS]
    contents = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, content in zip(tables, contents, strict=True):
            table.update(content)


def find_whole_modules(model: nn.Module) -> list[WholeModule]:
    """Submodules that must stay whole, with the line of the hook or of the forward that says so."""
    whole = []
    for path, module in model.named_modules():
        if not path or is_torch_leaf(module) or not must_stay_whole(module):
            continue
        hooks = [hook for name in _HOOKS for hook in getattr(module, name, {}).values()]
        location = locate_function(hooks[0] if hooks else type(module).forward)
        reason = "it has parametrized parameters, which must be computed inside it"
        if hooks:
            reason = "it has hooks, which must run around the whole module"
        whole.append(WholeModule(layer=path, reason=reason, location=location))
    return whole
