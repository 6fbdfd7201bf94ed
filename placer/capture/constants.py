"""Values that a program may look at although its tensors are fake: those of constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx
from torch._subclasses import FakeTensor

# Operations that pick, convert or compare; none draws random numbers or writes to what it reads.
_READERS = {
    "__getitem__",
    "getitem",
    "getattr",
    "unbind",
    "select",
    "to",
    "cpu",
    "cuda",
    "float",
    "double",
    "long",
    "int",
    "bool",
    "detach",
    "clone",
    "reshape",
    "view",
    "flatten",
    "squeeze",
    "unsqueeze",
    "sum",
    "any",
    "all",
    "max",
    "min",
    "amax",
    "amin",
    "argmax",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
}


def find_constant(node: fx.Node, constants: Mapping[str, Tensor]) -> fx.Node | None:
    """The constant that ``node`` is picked from, if it has data and nothing writes to it so far.

    Constants are tensors that are neither parameters nor buffers nor inputs, such as plain
    attributes.
    """
    while node.name not in constants:
        sources = node.all_input_nodes
        if _name(node) not in _READERS or len(sources) != 1:
            return None
        (node,) = sources
    value = constants[node.name]
    known = value.device.type != "meta" and not isinstance(value, FakeTensor)
    return node if known and not is_written(node) else None


def pick_value(node: fx.Node, constant: fx.Node, value: Tensor) -> Any:
    """The value of ``node``, which is picked from ``constant``, whose value is ``value``."""
    if node is constant:
        return value
    found = pick_value(node.all_input_nodes[0], constant, value)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda _: found)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def is_written(constant: fx.Node) -> bool:
    """Does a node write to ``constant``, or to what may be a view: what is made of it alone?"""
    views = [constant]
    for view in views:
        for user in view.users:
            if _writes(user) and user.args[:1] == (view,):
                return True
            if user.all_input_nodes == [view]:
                views.append(user)
    return False


def _name(node: fx.Node) -> str:
    if node.op not in ("call_method", "call_function"):
        return ""
    return str(getattr(node.target, "__name__", node.target))


def _writes(node: fx.Node) -> bool:
    name = _name(node)
    if name.endswith("__"):
        return name == "__setitem__" or name.startswith("__i")  # x += 1
    return name == "setitem" or name.endswith("_")
