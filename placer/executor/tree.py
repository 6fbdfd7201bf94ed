"""Stand-ins for the model's module tree, holding one stage's tensors of one replica."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from placer._torch import clone_shallow


def build_tree(
    root: nn.Module,
    modules: Iterable[str],
    attributes: Iterable[str],
    read: Callable[[str, Tensor], Tensor],
) -> Any:
    """An object with ``root``'s submodules ``modules`` and tensors ``attributes`` at their paths.

    Every module is a shallow clone (same hooks, flags and Python attributes as now), every tensor
    what ``read(dotted name, tensor)`` makes of it. Building costs some microseconds per module,
    which is why it is done anew for every step: nothing the user changes can be missed.
    """
    tree = SimpleNamespace(**{_CLONES: []})
    for path in modules:
        _put(tree, path, _clone(root.get_submodule(path), path, read, getattr(tree, _CLONES)))
    for name in attributes:
        owner, _, leaf = name.rpartition(".")
        _put(tree, name, read(name, getattr(root.get_submodule(owner), leaf)))
    return tree


def write_back(tree: Any) -> None:
    """Give the modules of the root what forward put into their stand-ins: buffers and attributes.

    A tensor that was written in place needs no such care, nor does a tree that is the root itself.
    """
    for module, clone, before in getattr(tree, _CLONES, ()):
        for name, value in clone._buffers.items():
            if value is not before["_buffers"].get(name):
                module._buffers[name] = value
        for name, value in clone.__dict__.items():
            if name not in _TABLES and value is not before.get(name, _CLONES):
                module.__dict__[name] = value


_CLONES = "_clones_of_modules"
_TABLES = ("_modules", "_parameters", "_buffers")


def _clone(
    module: nn.Module, path: str, read: Callable[[str, Tensor], Tensor], clones: list[Any]
) -> nn.Module:
    def tensors(kept: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        return {k: None if t is None else read(f"{path}.{k}", t) for k, t in kept.items()}

    clone = clone_shallow(module, tensors({**module._parameters}), tensors({**module._buffers}))
    for name, child in module._modules.items():
        if child is not None:
            clone._modules[name] = _clone(child, f"{path}.{name}", read, clones)
    clones.append((module, clone, {**clone.__dict__, "_buffers": dict(clone._buffers)}))
    return clone


def _put(tree: Any, path: str, value: Any) -> None:
    """Set ``tree.a.b.c = value``, making the containers on the way."""
    *parents, leaf = path.split(".")
    for name in parents:
        if not hasattr(tree, name):
            setattr(tree, name, SimpleNamespace())
        tree = getattr(tree, name)
    if isinstance(tree, nn.Module) and isinstance(value, Tensor):
        return  # the tensor of a module that is here as a whole already
    setattr(tree, leaf, value)
