"""Builds the module tree that a stage's code reads: clones of the model's modules with other tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from placer._torch import clone_shallow, is_in_cache_of_parametrizations
from placer.errors import PlacerError


def build_tree(
    root: nn.Module,
    modules: Iterable[str],
    attributes: Iterable[str],
    read: Callable[[str, Tensor], Tensor],
) -> Any:
    """An object with ``root``'s submodules ``modules`` and tensors ``attributes`` at their paths.

    Every module is a shallow clone with the present hooks, flags and Python attributes, and every
    tensor is replaced by ``read(dotted name, tensor)``. Building takes some microseconds per module,
    so it is done for every step, and no change that the user makes is missed.
    """
    tree = SimpleNamespace(**{_CLONES: []})
    for path in modules:
        _put(tree, path, _clone(root.get_submodule(path), path, read, getattr(tree, _CLONES)))
    for name in attributes:
        owner, _, leaf = name.rpartition(".")
        _put(tree, name, read(name, getattr(root.get_submodule(owner), leaf)))
    return tree


def renew_buffers(root: nn.Module, names: Iterable[str]) -> None:
    """Give ``root`` new tensors for the buffers that forward replaces; those of the caller stay as they are.

    Of buffers that ``root`` has, which on a rank are not all.
    """
    for owner, _, leaf in (name.rpartition(".") for name in names):
        try:
            buffers = root.get_submodule(owner)._buffers
        except AttributeError:
            continue
        if (buffer := buffers.get(leaf)) is not None:
            buffers[leaf] = buffer.detach().clone()


def write_back(tree: Any) -> None:
    """Assign to the root's modules the buffers and attributes that forward assigned to their clones.

    Not needed for tensors that were written in place, nor for a tree that is the root itself.
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

    if is_in_cache_of_parametrizations(module):
        raise PlacerError(
            path,
            "replicas or stages have copies of it, which the cache of parametrize.cached() does not know",
            "call the placed model outside of parametrize.cached(), or use 1 replica",
        )
    clone = clone_shallow(module, tensors({**module._parameters}), tensors({**module._buffers}))
    for name, child in module._modules.items():
        if child is not None:
            clone._modules[name] = _clone(child, f"{path}.{name}", read, clones)
    clones.append((module, clone, {**clone.__dict__, "_buffers": dict(clone._buffers)}))
    return clone


def _put(tree: Any, path: str, value: Any) -> None:
    """Set ``tree.a.b.c = value``, creating the containers ``a`` and ``b`` if needed."""
    *parents, leaf = path.split(".")
    for name in parents:
        if not hasattr(tree, name):
            setattr(tree, name, SimpleNamespace())
        tree = getattr(tree, name)
    if isinstance(tree, nn.Module) and isinstance(value, Tensor):
        return  # the module is in the tree as a whole, with its tensors
    setattr(tree, leaf, value)
