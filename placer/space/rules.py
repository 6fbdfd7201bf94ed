"""Which operations can run on parts of their inputs, and how: a rule per kind of operation.

A rule gets a `Call` and returns a `Rule`, or a sentence that says why it cannot be cut. Its inputs are then
gathered, it runs on the whole, and what reads the result cuts it again: slower, and always right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from placer.program import is_torch_leaf, must_stay_whole
from placer.space import taking, window_rules
from placer.space.call import Call, Local, Replace, Rule, RuleMaker
from placer.space.nodes import ReduceParts, SumParts


def find_rule(call: Call) -> Rule:
    """How ``call`` runs on parts, or why it does not."""
    if call.module is not None and (not is_torch_leaf(call.module) or must_stay_whole(call.module)):
        return "it has hooks, or is one operation of the graph"
    if "out" in call.node.kwargs:
        return "it writes to a tensor that is given"
    if len({len(layout.dims) for layout in call.layouts.values()}) > 1:
        return "its inputs are cut in different ways"
    maker = _RULES.get(call.name)
    if maker is None:
        return "placer has no rule for it"
    numbers = [x for x in call.inputs if isinstance(call.values[x], int | float | torch.Size)]
    if maker is not _pointwise and not all(map(call.is_of_sizes, numbers)):
        return "a number that it is called with may be another one in the next call"
    return maker(call)


def _pointwise(call: Call) -> Rule:
    """Every output element depends on the input elements at its own position, by broadcasting."""
    result = call.result
    if not isinstance(result, Tensor):
        return "its result is no tensor"
    found = {
        tuple(dim + result.dim() - len(layout.shape) for dim in layout.dims)
        for layout in call.layouts.values()
    }
    if len(found) != 1:
        return "its inputs are cut in different dimensions"
    (dims,) = found
    if (call.name.endswith("_") or call.name in _INPLACE) and call.inputs[0] not in call.layouts:
        return "it writes to a value that is not cut"
    for node, layout in call.layouts.items():
        shift = result.dim() - len(layout.shape)
        if any(layout.shape[dim - shift] != result.shape[dim] for dim in dims):
            return f"{node.name} is broadcast along a dimension that is cut"
    for node in call.inputs:
        if node not in call.layouts and _is_cut_in_some(call.values[node], result, dims):
            return f"{node.name} has only some of the dimensions that are cut"
    return Local(dims)


def _is_cut_in_some(value: Any, result: Tensor, dims: Sequence[int]) -> bool:
    """Would an operand have to be cut in some of ``dims``, and broadcast in others?"""
    if not isinstance(value, Tensor):
        return False
    shift = result.dim() - value.dim()
    along = [d for d in dims if d >= shift and value.shape[d - shift] > 1]
    return 0 < len(along) < len(dims)


def _activation_per_channel(call: Call) -> Rule:
    """PReLU, whose weights are per channel, the dimension 1."""
    module: Any = call.module
    if module.num_parameters > 1 and any(1 in layout.dims for layout in call.layouts.values()):
        return "its rows or channels are cut"
    return _pointwise(call)


def _dropout(call: Call) -> Rule:
    if call.module is not None:
        probability, training = call.module.p, call.module.training
    else:
        probability, training = call.argument(1, "p", 0.5), call.argument(2, "training", True)
    if probability and training:
        return "its mask is drawn for the whole value"
    return _pointwise(call)


def _along(position: int, name: str, default: Any) -> RuleMaker:
    """A rule for what computes along dimensions: they must not be cut."""

    def rule(call: Call) -> Rule:
        if call.module is not None:
            given = getattr(call.module, name, default)
        else:
            given = call.argument(position, name, default)
        (layout,) = call.layouts.values()
        if given is None:
            return "it computes along a dimension that is not given"
        rank = len(layout.shape)
        along = _dims(given, rank)
        if set(along) & set(layout.dims):
            return "it computes along a dimension that is cut"
        return Local(layout.dims if call.result.dim() == rank else _without(along, layout.dims))

    return rule


def _dims(given: Any, rank: int) -> list[int]:
    """The dimensions that an argument names, from 0 up; all of them without one."""
    if given is None or given in ([], ()):
        return list(range(rank))
    return sorted(d % rank for d in (given if isinstance(given, list | tuple) else (given,)))


def _without(gone: Sequence[int], dims: Sequence[int]) -> tuple[int, ...]:
    """The positions of ``dims`` after the dimensions ``gone`` are."""
    return tuple(dim - sum(other < dim for other in gone) for dim in dims)


def _last(count: Callable[[Call], int]) -> RuleMaker:
    """A rule for what computes along the last ``count`` dimensions."""

    def rule(call: Call) -> Rule:
        (first, *others) = call.layouts
        layout = call.layouts[first]
        if others or call.inputs[0] is not first:
            return "an input besides the first one is cut"
        rank = len(layout.shape)
        if max(layout.dims) >= rank - count(call):
            return "it computes along a dimension that is cut"
        ranks = [x.dim() for n in call.inputs[1:] if isinstance(x := call.values[n], Tensor)]
        if any(max(layout.dims) >= rank - other for other in ranks):  # it would be cut too
            return "its weight has as many dimensions as are after one that is cut"
        return Local(layout.dims)

    return rule


def _normalized(call: Call) -> int:
    if call.module is not None:
        return len(call.module.normalized_shape)  # type: ignore[arg-type]
    return len(call.argument(1, "normalized_shape"))


def _concatenate(call: Call) -> Rule:
    result = call.result
    dim = call.argument(1, "dim", 0) % result.dim()
    dims = {layout.dims for layout in call.layouts.values()}
    if len(dims) != 1 or dim in next(iter(dims)):
        return "it joins values along a dimension that is cut"
    if len(call.layouts) < len(call.inputs) and any(result.shape[d] == 1 for d in next(iter(dims))):
        return "it joins a single plane with what is not cut"
    return Local(next(iter(dims)))


def _permuted(order: Callable[[Call, int], Sequence[int]]) -> RuleMaker:
    """A rule for views that put dimensions into another order: ``order(call, rank)``."""

    def rule(call: Call) -> Rule:
        (layout,) = call.layouts.values()
        placed = [d % len(layout.shape) for d in order(call, len(layout.shape))]
        return Local(tuple(placed.index(dim) for dim in layout.dims))

    return rule


def _permutation(call: Call, rank: int) -> Sequence[int]:
    given = call.argument(1, "dims")
    if isinstance(given, int):
        given = [x for x in call.node.args[1:] if isinstance(x, int)]
    return list(given)


def _transposition(call: Call, rank: int) -> Sequence[int]:
    order = list(range(rank))
    first, second = (call.argument(i + 1, f"dim{i}") % rank for i in range(2))
    order[first], order[second] = order[second], order[first]
    return order


def _split(call: Call) -> Rule:
    """``chunk`` and ``split`` along a dimension that is not cut; the result is a tuple."""
    (layout,) = call.layouts.values()
    if call.argument(2, "dim", 0) % len(layout.shape) in layout.dims:
        return "it splits a dimension that is cut"
    return Local(layout.dims)


def _reduce(call: Call) -> Rule:
    """A sum or mean over all dimensions that are cut, and perhaps others."""
    (layout,) = call.layouts.values()
    rank = len(layout.shape)
    dims = _dims(call.argument(1, "dim"), rank)
    if call.argument(3, "dtype") is not None:
        return "it computes in another type"
    if not set(dims) & set(layout.dims):
        keep = call.argument(2, "keepdim", False)
        return Local(layout.dims if keep else _without(dims, layout.dims))
    if not set(layout.dims) <= set(dims) or not call.values[call.inputs[0]].is_floating_point():
        return "it reduces some of the dimensions that are cut"
    keepdim = bool(call.argument(2, "keepdim", False))
    total = SumParts(layout, tuple(dims), keepdim, call.name)
    return Replace(total, (call.inputs[0],))


def _extreme(call: Call) -> Rule:
    """The largest or smallest element, or the variance, over all dimensions that are cut, or over none."""
    (layout, *others) = call.layouts.values()
    rank = len(layout.shape)
    given = call.argument(1, "dim")
    if others or isinstance(given, bool | fx.Node):
        return "its second argument is no dimension"
    dims = _dims(given, rank)
    result = call.result if isinstance(call.result, Tensor) else call.result[0]
    keepdim = result.dim() == rank
    if not set(dims) & set(layout.dims):
        return Local(layout.dims if keepdim else _without(dims, layout.dims))
    if not isinstance(call.result, Tensor):
        return "it returns positions in the whole value"
    if not set(layout.dims) <= set(dims) or not result.is_floating_point():
        return "it reduces some of the dimensions that are cut"
    unbiased = call.argument(2, "unbiased", True) if call.name in ("std", "var") else True
    given = call.argument(4, "correction")
    correction = int(bool(unbiased)) if given is None else given
    kind = {"max": "amax", "min": "amin"}.get(call.name, call.name)
    total = ReduceParts(layout, tuple(dims), keepdim, kind, correction)
    return Replace(total, (call.inputs[0],))


_INPLACE = ("iadd", "isub", "imul", "itruediv")
_ACTIVATIONS = (
    *("ReLU", "ReLU6", "LeakyReLU", "ELU", "SELU", "CELU", "GELU", "SiLU"),
    *("Sigmoid", "Tanh", "Softplus", "Softsign", "Mish", "Hardswish", "Hardsigmoid", "Hardtanh"),
    *("Identity", "LogSigmoid", "Threshold", "Tanhshrink", "Softshrink", "Hardshrink"),
)
_FUNCTIONS = (
    *("add", "sub", "mul", "div", "truediv", "true_divide", "pow", "neg", "abs", "exp", "log"),
    *("sqrt", "rsqrt", "square", "sin", "cos", "tanh", "sigmoid", "erf", "relu", "leaky_relu"),
    *("gelu", "silu", "elu", "selu", "celu", "mish", "softplus", "hardswish", "hardsigmoid"),
    *("hardtanh", "relu6", "logsigmoid", "clamp", "clip", "minimum", "maximum", "where", "lerp"),
    *("addcmul", "addcdiv", "reciprocal", "log1p", "expm1", "sign", "floor", "ceil", "round"),
    *("clone", "contiguous", "detach", "float", "double", "half", "bfloat16", "to", "type_as"),
    *("as_tensor",),
    *("nan_to_num", "isnan", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_not"),
    *("logical_or", "rsub", "sub_", "add_", "mul_", "div_", "relu_", "clamp_", "sigmoid_", "tanh_"),
    *("leaky_relu_", "hardswish_", "silu_", "iadd", "imul", "isub", "itruediv", "masked_fill"),
    *("multiply", "divide", "subtract", "xlogy", "zeros_like", "ones_like", "full_like"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__"),
)
_RULES: dict[str, RuleMaker] = {
    **dict.fromkeys((*_ACTIVATIONS, *_FUNCTIONS), _pointwise),
    "PReLU": _activation_per_channel,
    **dict.fromkeys(("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout"), _dropout),
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"), _dropout),
    **dict.fromkeys(("Softmax", "LogSoftmax", "softmax", "log_softmax"), _along(1, "dim", None)),
    **dict.fromkeys(("argmax", "argmin"), _along(1, "dim", None)),
    **dict.fromkeys(("GLU", "glu"), _along(1, "dim", -1)),
    **dict.fromkeys(("Linear", "linear"), _last(lambda call: 1)),
    **dict.fromkeys(("LayerNorm", "layer_norm", "RMSNorm", "rms_norm"), _last(_normalized)),
    **dict.fromkeys(("cat", "concat", "concatenate"), _concatenate),
    "permute": _permuted(_permutation),
    **dict.fromkeys(("transpose", "swapaxes"), _permuted(_transposition)),
    **dict.fromkeys(("chunk", "split"), _split),
    **dict.fromkeys(("getitem", "__getitem__"), taking.item),
    "narrow": taking.narrow,
    "select": taking.select,
    "squeeze": taking.squeeze,
    "unsqueeze": taking.unsqueeze,
    "stack": taking.stack,
    "pad": taking.pad,
    **{
        f"{kind}Pad{n}d": taking.pad
        for n in "123"
        for kind in ("Constant", "Zero", "Reflection", "Replication", "Circular")
    },
    **dict.fromkeys(("sum", "mean"), _reduce),
    **dict.fromkeys(("amax", "amin", "max", "min", "var", "std"), _extreme),
    **dict.fromkeys((*window_rules.LOSSES, *window_rules.LOSSES.values()), window_rules.loss),
    **{
        f"{name}{n}d": window_rules.convolution
        for n in "123"
        for name in ("Conv", "ConvTranspose", "conv", "conv_transpose")
    },
    **{f"{name}{n}d": window_rules.pool(False) for n in "123" for name in ("MaxPool", "max_pool")},
    **{f"{name}{n}d": window_rules.pool(True) for n in "123" for name in ("AvgPool", "avg_pool")},
    **{
        f"{name}{n}d": window_rules.adaptive_pool
        for n in "123"
        for name in (
            *("AdaptiveAvgPool", "adaptive_avg_pool"),
            *("AdaptiveMaxPool", "adaptive_max_pool"),
        )
    },
    **dict.fromkeys(
        ("Upsample", "UpsamplingNearest2d", "UpsamplingBilinear2d"), window_rules.resize
    ),
    "interpolate": window_rules.resize,
    **{f"BatchNorm{n}d": window_rules.norm for n in "123"},
    **{f"InstanceNorm{n}d": window_rules.norm for n in "123"},
    "GroupNorm": window_rules.norm,
    **dict.fromkeys(("batch_norm", "instance_norm", "group_norm"), window_rules.functional_norm),
    "SyncBatchNorm": window_rules.norm,
}
