"""Constants: tensors whose values a model's code may read while it runs on fake tensors.

Their values do not depend on inputs: they are computed from plain attributes, numpy arrays and sizes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_iter

from placer._torch import without_modes, without_torch_function


def _words(text: str) -> list[str]:
    return text.split()


_MAKERS = _words("""
    tensor as_tensor asarray scalar_tensor new_tensor arange linspace logspace zeros ones full eye
    zeros_like ones_like full_like new_zeros new_ones new_full tril_indices triu_indices
""")
# Pure operations: none draws random numbers or writes to its arguments.
_OPERATIONS = _words("""
    __getitem__ getitem getattr unbind select index_select narrow chunk split gather take
    to cpu cuda type float double half bfloat16 long int short bool detach clone contiguous
    reshape view flatten unflatten squeeze unsqueeze expand expand_as repeat tile t transpose permute
    flip roll cat concat concatenate stack hstack vstack tril triu diag meshgrid outer
    sum prod mean any all max min amax amin argmax argmin cumsum cumprod numel sort argsort unique
    eq ne lt le gt ge equal where logical_and logical_or logical_not isnan is_nonzero
    add sub mul div true_divide divide multiply subtract floor_divide remainder fmod pow neg negative
    rsub abs sqrt rsqrt square exp exp2 log log2 log10 sin cos tan floor ceil round trunc sign
    reciprocal clamp minimum maximum pad
    floordiv truediv mod
""")
_PURE = frozenset((*_MAKERS, *_OPERATIONS, *(f"__{name}__" for name in _OPERATIONS)))
_LARGEST = 1000  # operations; a value that needs more is not computed


@dataclass(frozen=True, slots=True)
class KnownValue:
    """The value of a node, and the ``get_attr`` nodes of the constants that it was computed from."""

    value: Any
    constants: Sequence[fx.Node]


def find_value(
    node: fx.Node, constants: Mapping[str, Tensor], numbers: Mapping[fx.Node, Any]
) -> KnownValue | None:
    """The value of ``node``, computed on the CPU, if it depends only on constants and numbers; else None.

    Constants are tensors that are not parameters, buffers or inputs: plain attributes, and the results of
    ``torch.arange`` and similar functions. ``numbers`` are the sizes in this run; using one fixes it in the
    program. The result is also None if any of these tensors was written to.
    """
    order = _unwritten_ancestors(node, constants, numbers)
    if order is None:
        return None
    values: dict[fx.Node, Any] = {}
    with without_torch_function(), without_modes(), torch.device("cpu"):
        for source in order:
            values[source] = _compute(source, constants, numbers, values)
    return KnownValue(values[node], [source for source in order if source.name in constants])


def is_constant(
    node: fx.Node, constants: Mapping[str, Tensor], numbers: Mapping[fx.Node, Any]
) -> bool:
    """Would `find_value` find a value? This computes nothing."""
    return _unwritten_ancestors(node, constants, numbers) is not None


def _unwritten_ancestors(
    node: fx.Node, constants: Mapping[str, Tensor], numbers: Mapping[fx.Node, Any]
) -> list[fx.Node] | None:
    order = _ancestors(node, constants, numbers)
    return None if order is None or any(is_written(source) for source in order) else order


def _ancestors(
    node: fx.Node, constants: Mapping[str, Tensor], numbers: Mapping[fx.Node, Any]
) -> list[fx.Node] | None:
    """``node`` and all nodes that it is computed from, in topological order; None if not all are constant."""
    order: dict[fx.Node, None] = {}
    stack = [(node, False)]
    while stack:
        current, done = stack.pop()
        if done or current in order:
            order.setdefault(current)
            continue
        if current in numbers:
            order[current] = None
            continue
        if current.name in constants:
            value = constants[current.name]
            if value.device.type == "meta" or isinstance(value, FakeTensor):
                return None
            order[current] = None
            continue
        name = _name(current)
        sources = current.all_input_nodes
        if name not in _PURE or not (sources or name in _MAKERS) or len(order) > _LARGEST:
            return None
        stack.append((current, True))
        stack += [(source, False) for source in sources]
    return list(order)


def _compute(
    node: fx.Node,
    constants: Mapping[str, Tensor],
    numbers: Mapping[fx.Node, Any],
    values: Mapping[fx.Node, Any],
) -> Any:
    if node in numbers:
        return numbers[node]
    if node.name in constants:
        return constants[node.name].cpu()
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def copy_real(value: Tensor) -> Tensor:
    """A copy of ``value``, a real tensor, during a run on fake tensors."""
    with without_torch_function(), without_modes():
        return value.clone()


def tensor_from_numpy(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """The real tensor that ``func`` makes from a numpy array; None for any other call."""
    function = _FROM_DATA.get(func)
    if function is None or not any(isinstance(x, np.ndarray) for x in tree_iter((args, kwargs))):
        return None
    if function is torch.Tensor.new_tensor:
        like, *args = args
        function, kwargs = torch.tensor, {"dtype": like.dtype, **kwargs}
    kwargs = {key: value for key, value in kwargs.items() if key != "device"}
    with without_torch_function(), without_modes(), torch.device("cpu"):
        return function(*args, **kwargs).clone()


_FROM_DATA: dict[Any, Any] = {
    function: function
    for function in (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)
}


INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


def replace_numpy_indices(index: Any, make_constant: Callable[[Tensor], Tensor]) -> Any:
    """``index`` of a tensor with numpy arrays replaced by constant tensors.

    A boolean array becomes the positions where it is true, one tensor per dimension.
    """
    found: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        if not isinstance(part, np.ndarray):
            found.append(part)
            continue
        arrays = np.nonzero(part) if part.dtype == np.bool_ else (part,)
        with without_torch_function(), without_modes():
            tensors = [torch.tensor(array, device="cpu") for array in arrays]
        found += map(make_constant, tensors)
    return tuple(found) if isinstance(index, tuple) or len(found) != 1 else found[0]


def is_written(constant: fx.Node) -> bool:
    """Does a node write to ``constant``, or to a result computed only from it, which may be a view of it?"""
    views = [constant]
    for view in views:
        for user in view.users:
            if user.kwargs.get("out") is view or (_writes(user) and user.args[:1] == (view,)):
                return True
            if user.all_input_nodes == [view]:
                views.append(user)
    return False


def digest(value: Tensor) -> str:
    """A hash of the dtype, shape and values of ``value``: 16 hexadecimal digits."""
    with without_torch_function(), without_modes():
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    text = f"{value.dtype} {list(value.shape)}".encode()
    return hashlib.sha256(text + data).hexdigest()[:16]


def _name(node: fx.Node) -> str:
    if node.op not in ("call_method", "call_function"):
        return ""
    return str(getattr(node.target, "__name__", node.target)).removesuffix(".default")


def _writes(node: fx.Node) -> bool:
    name = _name(node)
    if name.endswith("__"):
        return name == "__setitem__" or name.startswith("__i")  # x += 1
    return name == "setitem" or name.endswith("_")
