"""Replaces functions and classes' methods of torch, and operators' kernels, where torch calls no hook.

Each replacement but `call_before_clipping` lasts for a ``with`` block, and has effect on all threads.
The names that are replaced are in the tables of `placer._torch`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.utils import parametrize


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """In this block, a class or module has ``value`` as its attribute ``name``."""
    original = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def uncached_parametrizations() -> Iterator[None]:
    """In this block, ``torch.nn.utils.parametrize.cached()`` around it has no effect."""
    enabled = _replaced(parametrize, "_cache_enabled", 0)
    with enabled, _replaced(parametrize, "_cache", {}):
        yield


@contextmanager
def override_conversion(convert: Callable[..., nn.Module]) -> Iterator[None]:
    """In this block, ``module.to(…)`` and its like call ``convert(original, module, function, …)``."""
    original = nn.Module._apply

    @wraps(original)
    def converted(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return convert(original, module, *args, **kwargs)

    with _replaced(nn.Module, "_apply", converted):
        yield


@contextmanager
def override_calls(
    *,
    call: Callable[[Callable[..., Any], nn.Module, Any, Any], Any],
    apply: Callable[[Callable[..., Any], Any, Any, Any], Any],
) -> Iterator[None]:
    """In this block, calls of modules and of ``apply`` of an ``autograd.Function`` are given away.

    ``module(*args, **kwargs)`` is ``call(original, module, args, kwargs)``, and
    ``cls.apply(*args, **kwargs)`` is ``apply(original, cls, args, kwargs)``, where ``original`` is the
    unpatched ``cls.apply``.
    """
    original_call = nn.Module.__call__
    original_apply = torch.autograd.Function.__dict__["apply"]

    def module_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(original_call, module, args, kwargs)

    def function_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return apply(original_apply.__get__(None, cls), cls, args, kwargs)

    calling = _replaced(nn.Module, "__call__", module_call)
    with calling, _replaced(torch.autograd.Function, "apply", classmethod(function_apply)):
        yield


@contextmanager
def override_function_forwards(
    forward: Callable[[Callable[..., Any], Any, Any], Any],
) -> Iterator[None]:
    """In this block, ``apply`` of an ``autograd.Function`` calls ``forward(original, cls, args)``.

    ``original`` is the ``forward`` of ``cls``, and ``args`` are its arguments, with a context or without. An
    alias of ``apply`` that the model's code took at import (``scan = Scan.apply``) calls it too.
    """
    replaced = [cls for cls in _subclasses(torch.autograd.Function) if "forward" in vars(cls)]
    originals = [vars(cls)["forward"] for cls in replaced]
    try:
        for cls, original in zip(replaced, originals, strict=True):
            cls.forward = staticmethod(_giving_away(forward, original.__get__(None, cls), cls))
        yield
    finally:
        for cls, original in zip(replaced, originals, strict=True):
            cls.forward = original


def _giving_away(
    forward: Callable[[Callable[..., Any], Any, Any], Any], original: Callable[..., Any], cls: Any
) -> Callable[..., Any]:
    def given_away(*args: Any) -> Any:
        return forward(original, cls, args)

    # Not `functools.wraps`: torch alone has a hundred such classes, and each recording replaces all of them.
    given_away.__wrapped__ = original  # type: ignore[attr-defined]
    return given_away


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for child in type.__subclasses__(cls):
        yield child
        yield from _subclasses(child)


@contextmanager
def override_script_functions(
    call: Callable[[Callable[..., Any], Any, Any, Any], Any],
) -> Iterator[None]:
    """In this block, functions of TorchScript are called as ``call(original, function, args, kwargs)``."""
    kind: Any = torch.jit.ScriptFunction
    original = kind.__call__

    def function_call(function: Any, *args: Any, **kwargs: Any) -> Any:
        return call(original, function, args, kwargs)

    with _replaced(kind, "__call__", function_call):
        yield


@contextmanager
def override_grad_enabled(answer: Callable[[Callable[[], bool]], bool]) -> Iterator[None]:
    """In this block, ``torch.is_grad_enabled()`` is ``answer(original)``."""
    original = torch.is_grad_enabled

    def grad_enabled() -> bool:
        return answer(original)

    with _replaced(torch, "is_grad_enabled", grad_enabled):
        yield


@contextmanager
def call_before_seeding(seed: Callable[[], None]) -> Iterator[None]:
    """In this block, functions of ``torch.random`` call ``seed`` before they set the generator's state."""

    class Generator:
        """A proxy for torch's default generator."""

        def __getattr__(self, name: str) -> Any:
            if name in ("manual_seed", "seed", "set_state"):
                seed()
            return getattr(torch.default_generator, name)

    with _replaced(torch.random, "default_generator", Generator()):
        yield


@contextmanager
def override_getattribute(
    classes: Iterable[type[nn.Module]],
    make: Callable[[type[nn.Module], Callable[..., Any]], Callable[[nn.Module, str], Any]],
) -> Iterator[None]:
    """In this block, each class of ``classes`` has the ``__getattribute__`` ``make(cls, original)``."""
    classes = tuple(dict.fromkeys(classes))
    originals = {cls: cls.__getattribute__ for cls in classes}
    own = {cls: vars(cls).get("__getattribute__") for cls in classes}
    try:
        for cls in classes:
            cls.__getattribute__ = make(cls, originals[cls])  # type: ignore[method-assign, assignment]
        yield
    finally:
        for cls, before in own.items():
            if before is None:
                del cls.__getattribute__
            else:
                cls.__getattribute__ = before  # type: ignore[method-assign]


@contextmanager
def override_setattr(set_attribute: Callable[..., None]) -> Iterator[None]:
    """In this block, modules get attributes by ``set_attribute(original, module, name, value)``."""
    original = nn.Module.__setattr__

    def setattr_(module: nn.Module, name: str, value: Any) -> None:
        set_attribute(original, module, name, value)

    nn.Module.__setattr__ = setattr_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.__setattr__ = original  # type: ignore[method-assign]


@contextmanager
def watch_missing_attributes(note: Callable[[Tensor, str], None]) -> Iterator[None]:
    """In this block, ``note(tensor, name)`` is called when an attribute of a fake tensor is not found."""

    def missing(tensor: FakeTensor, name: str) -> None:
        note(tensor, name)
        raise AttributeError(f"{type(tensor).__name__!r} object has no attribute {name!r}")

    FakeTensor.__getattr__ = missing  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del FakeTensor.__getattr__  # type: ignore[attr-defined]


def call_before_clipping(check: Callable[[Sequence[Tensor]], None]) -> Callable[[], object]:
    """Make ``torch.nn.utils.clip_grad_norm_`` call ``check`` with the gradients before it takes their norm.

    This works however the function is imported. Returns a function that removes the check.
    """
    _replace_total_norm()
    key = object()
    _clipping_checks[key] = check
    return partial(_clipping_checks.pop, key, None)


_clipping_checks: dict[object, Callable[[Sequence[Tensor]], None]] = {}


@cache
def _replace_total_norm() -> None:
    """Patch the function that ``clip_grad_norm_`` looks up in its module, once per process."""
    module: Any = torch.nn.utils.clip_grad
    total_norm = module._get_total_norm

    @wraps(total_norm)
    def checked(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        for check in list(_clipping_checks.values()):
            check(tensors)
        return total_norm(tensors, *args, **kwargs)

    module._get_total_norm = checked


@contextmanager
def override_operators(
    key: str, kernels: Mapping[Any, Callable[..., Any]], *, with_keyset: bool = False
) -> Iterator[None]:
    """In this block, the dispatcher calls ``kernels`` (aten operator -> function) at the dispatch key."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            # By torch 2.11, of the first kernel that is replaced.
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for op, kernel in kernels.items():
                name = op.name().removeprefix("aten::")
                library.impl(name, kernel, key, with_keyset=with_keyset, allow_override=True)
        yield
