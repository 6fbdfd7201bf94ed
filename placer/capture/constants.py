"""Values that a program may look at although its tensors are fake: those of constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx
from torch._subclasses import FakeTensor

from placer._torch import without_modes, without_torch_function

# Operations that pick, convert or compare; none draws random numbers or writes to what it reads.
_READERS = {
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


def constant_value(node: fx.Node, constants: Mapping[str, Tensor]) -> Tensor | None:
    """The value of ``node`` if it is picked from a constant tensor of the model that has data.

    Constants are tensors that are neither parameters nor buffers nor inputs, such as plain
    attributes. None as well when something writes to the constant.
    """
    chain: list[fx.Node] = []
    while node.name not in constants:
        sources = node.all_input_nodes
        if _name(node) not in _READERS or len(sources) != 1:
            return None
        chain.append(node)
        (node,) = sources
    if any(_writes(user) for each in (node, *chain) for user in each.users):
        return None
    value: Any = constants[node.name]
    if value.device.type == "meta" or isinstance(value, FakeTensor):
        return None
    with without_torch_function(), without_modes():
        for each in reversed(chain):
            value = _run(each, value)
    return value if isinstance(value, Tensor) else None


def _run(node: fx.Node, value: Any) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda _: value)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _name(node: fx.Node) -> str:
    if node.op not in ("call_method", "call_function"):
        return ""
    return str(getattr(node.target, "__name__", node.target))


def _writes(node: fx.Node) -> bool:
    name = _name(node)
    return (
        name in ("setitem", "__setitem__")
        or "out" in node.kwargs
        or (name.endswith("_") and not name.endswith("__"))
    )
