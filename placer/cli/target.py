"""Call what the user names on the command line: MODEL, and callables that make example inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from placer.errors import nearest
from placer.importing import ModelError, find_callable, user_failure


def build_model(
    target: str,
    arguments: Mapping[str, Any],
    *,
    allocate: bool,
    moves: AbstractContextManager[Any] | None = None,
) -> nn.Module:
    """Build the module that ``target`` (``package.module:callable`` or ``file.py:callable``) returns.

    Without ``allocate``, it is built on ``meta``. If its constructor fails there, for example because it
    reads values of tensors, it is built in memory instead. ``moves`` is for the devices that it names itself.
    Raises ``ModelError`` if that fails too.
    """
    make = find_callable(target)
    if isinstance(make, nn.Module):
        if arguments:
            raise ModelError(
                target, "is a module already, so it takes no --model-arg", "leave it out"
            )
        return make
    _check_arguments(target, make, arguments)
    if not allocate:
        try:
            # So that it sees meta as the default
            with torch.device("meta"), moves or nullcontext():
                return _module(target, make(**arguments))
        except ModelError:
            raise
        except (Exception, SystemExit):  # if it fails in memory too, that error is reported
            pass
    try:
        with moves or nullcontext():
            return _module(target, make(**arguments))
    except ModelError:
        raise
    except (Exception, SystemExit) as error:
        raise user_failure(target, "the model's constructor", error) from error


def _module(target: str, made: Any) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise ModelError(
            target,
            f"returned a {type(made).__name__}, not a torch.nn.Module",
            "name a class or a function that makes the model",
        )
    return made


def _check_arguments(target: str, make: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        unknown = [key for key in arguments if key not in signature.parameters]
        near = nearest(unknown[0], signature.parameters) if unknown else None
        hint = f"did you mean {near!r}? " if near else ""
        raise ModelError(
            target, f"--model-arg does not fit: {error}", f"{hint}it takes {signature}"
        ) from None


def load_example(target: str, *, values_needed: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call ``target``, and return the positional and keyword arguments of forward that it makes.

    It may return a tuple of positional arguments, a dict of keyword arguments, a pair of both, or a
    single argument. Raises ``ModelError`` if it is not found, if it raises an exception, or if it
    returns tensors on ``meta`` and ``values_needed`` is set.
    """
    make = find_callable(target)
    try:
        made = make()
    except (Exception, SystemExit) as error:
        raise user_failure(target, "the example input", error) from error
    match made:
        case (tuple() as args, dict() as kwargs):
            pass
        case tuple():
            args, kwargs = made, {}
        case dict():
            args, kwargs = (), made
        case _:
            args, kwargs = (made,), {}
    unnamed = [key for key in kwargs if not isinstance(key, str)]
    if unnamed:
        raise ModelError(
            target,
            f"returned a dict with the key {unnamed[0]!r}, which names no argument of forward",
            "return a tuple with the dict in it, if the dict is one argument",
        )
    if values_needed and any(
        leaf.device.type == "meta"
        for leaf in tree_leaves((args, kwargs))
        if isinstance(leaf, Tensor)
    ):
        raise ModelError(
            target,
            "returned a tensor on meta, and a real step needs its values",
            "make it in memory",
        )
    return args, kwargs
