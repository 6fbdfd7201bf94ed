"""Which operations can run on parts of their inputs, and how: a rule per kind of operation.

A rule gets a `Call` and returns a `Rule`, or a sentence that says why it cannot be cut. Its inputs are then
gathered, it runs on the whole, and what reads the result cuts it again: slower, and always right.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, fx, nn
from torch.nn import functional as F

from placer.program import is_torch_leaf, must_stay_whole
from placer.space.layout import Layout
from placer.space.nodes import InSpace, LossOfParts, NormalizeParts, RunInWindows, SumParts
from placer.space.norms import Groups
from placer.space.operators import FIRST, Convolution, Operator, Pool, Resize
from placer.space.windowed import Windows, needs_no_window


@dataclass(frozen=True)
class Call:
    """A node, by the ``name`` of what it calls.

    ``values`` has the whole value of every node on fake tensors. ``layouts`` are those of the inputs that are
    cut. ``parts_of`` has, for a concatenation that is not made, its tensors.
    """

    node: fx.Node
    name: str
    module: nn.Module | None
    values: Mapping[fx.Node, Any]
    layouts: Mapping[fx.Node, Layout]
    parts_of: Mapping[fx.Node, Sequence[fx.Node]]
    count: int  # chunks of planes in which windowed operators run

    @property
    def result(self) -> Any:
        """The whole result."""
        return self.values[self.node]

    @property
    def inputs(self) -> list[fx.Node]:
        """The nodes that it reads."""
        return self.node.all_input_nodes

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument; one of a node with a number is that number."""
        given = self.node.args[position] if len(self.node.args) > position else default
        found = self.node.kwargs.get(name, self.node.kwargs.get(_ALIASES.get(name, ""), given))
        known: Any = fx.node.map_arg(
            found, lambda x: x if isinstance(self.values[x], Tensor) else self.values[x]
        )
        return known


@dataclass(frozen=True)
class Local:
    """The operation runs on each part as it is; the result has its dimensions ``dims`` cut.

    Inputs that are not cut are cut like the result where they are as long, and copied where they are not.
    """

    dims: tuple[int, ...]


@dataclass(frozen=True)
class Replace:
    """``operation`` runs instead, called with the layer (if it takes it), ``parameters`` and ``inputs``."""

    operation: InSpace
    inputs: tuple[fx.Node, ...]
    parameters: tuple[Any, ...] = ()
    takes_layer: bool = False
    dims: tuple[int, ...] = ()  # of the result; none if it is whole
    # How inputs that are not cut are to be cut; the others are cut already.
    layouts: Mapping[fx.Node, Layout] = field(default_factory=dict)


Rule: TypeAlias = Local | Replace | str
_Maker: TypeAlias = Callable[[Call], Rule]


def find_rule(call: Call) -> Rule:
    """How ``call`` runs on parts, or why it does not."""
    if call.module is not None and (not is_torch_leaf(call.module) or must_stay_whole(call.module)):
        return "it has hooks, or is one operation of the graph"
    if "out" in call.node.kwargs:
        return "it writes to a tensor that is given"
    if len({len(layout.dims) for layout in call.layouts.values()}) > 1:
        return "its inputs are cut in different ways"
    maker = _RULES.get(call.name)
    return "placer has no rule for it" if maker is None else maker(call)


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


def _along(position: int, name: str, default: Any) -> _Maker:
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
        along = [d % rank for d in (given if isinstance(given, list | tuple) else (given,))]
        if set(along) & set(layout.dims):
            return "it computes along a dimension that is cut"
        return Local(layout.dims if call.result.dim() == rank else _without(along, layout.dims))

    return rule


def _without(gone: Sequence[int], dims: Sequence[int]) -> tuple[int, ...]:
    """The positions of ``dims`` after the dimensions ``gone`` are."""
    return tuple(dim - sum(other < dim for other in gone) for dim in dims)


def _last(count: Callable[[Call], int]) -> _Maker:
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


def _permuted(order: Callable[[Call, int], Sequence[int]]) -> _Maker:
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


def _item(call: Call) -> Rule:
    """An item of a tuple whose tensors are cut."""
    (layout,) = call.layouts.values()
    source = call.inputs[0]
    if isinstance(call.values[source], tuple | list):
        return Local(layout.dims)
    return "it takes a part by position"


def _reduce(call: Call) -> Rule:
    """A sum or mean over all dimensions that are cut, and perhaps others."""
    (layout,) = call.layouts.values()
    rank = len(layout.shape)
    given = call.argument(1, "dim", None)
    if given is None or (isinstance(given, list | tuple) and not given):
        given = list(range(rank))
    dims = sorted(d % rank for d in (given if isinstance(given, list | tuple) else (given,)))
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


def _loss(call: Call) -> Rule:
    """A loss that is a sum or a mean over elements, or over targets that are classes."""
    function = getattr(F, call.name if call.module is None else _LOSSES[call.name])
    names = list(inspect.signature(function).parameters)
    given = {name: call.argument(i, name) for i, name in enumerate(names)}
    if call.module is not None:
        own = (
            "reduction",
            "beta",
            "delta",
            "ignore_index",
            "label_smoothing",
            "weight",
            "pos_weight",
        )
        given |= {name: getattr(call.module, name, None) for name in own if name in names}
    source, target = given.pop(names[0]), given.pop(names[1])
    options = {name: value for name, value in given.items() if value is not None}
    reduction = options.pop("reduction", "mean")
    if reduction not in ("mean", "sum") or any(name in options for name in _UNKNOWN_OPTIONS):
        return "its reduction or its weights have no rule"
    if source not in call.layouts or not isinstance(call.values.get(target), Tensor):
        return "its input is not cut"
    layout, y = call.layouts[source], call.values[target]
    classes = function is F.cross_entropy and not y.is_floating_point()
    if function is F.cross_entropy and (not classes or options.get("label_smoothing")):
        return "its targets are no classes"
    if min(layout.dims) < FIRST:
        return "its rows or channels are cut"
    shape = (layout.shape[0], *layout.shape[FIRST:]) if classes else layout.shape
    if tuple(y.shape) != shape:
        return "its input and target have other shapes"
    dims = tuple(dim - 1 for dim in layout.dims) if classes else layout.dims
    wanted = Layout(layout.cuts, shape, dims)
    if target in call.layouts and call.layouts[target].dims != dims:
        return "its target is cut in other dimensions"
    ignored = options.get("ignore_index", -100) if classes else None
    operation = LossOfParts(
        layout, function, tuple(options.items()), is_mean=reduction == "mean", ignored=ignored
    )
    return Replace(operation, (source, target), layouts={target: wanted})


# -- operators in windows ---------------------------------------------------------------------------


def _windowed(
    call: Call,
    operator: Operator,
    inputs: Sequence[fx.Node],
    takes: str = "",
    parameters: tuple[Any, ...] = (),
) -> Rule:
    layouts = tuple(call.layouts[x] for x in inputs)
    dims = layouts[0].dims
    output = Layout(layouts[0].cuts, tuple(call.result.shape), dims)
    given = Windows(operator, layouts, output, call.count)
    borders = isinstance(operator, Convolution) and (any(operator.padding) or operator.transposed)
    if takes != "tensors" and not borders and call.count == 1 and needs_no_window(given):
        return Local(dims)
    return Replace(RunInWindows(given, takes), tuple(inputs), parameters, takes == "module", dims)


def _sizes(value: Any, count: int) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,) * count


def _is_spatial(layout: Layout, rank: int) -> bool:
    return len(layout.shape) == rank + FIRST and min(layout.dims) >= FIRST


def _convolution(call: Call) -> Rule:
    module: Any = call.module
    node = call.node
    if module is not None:
        padding, groups, mode = module.padding, module.groups, module.padding_mode
        kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
        extra = module.output_padding
        parameters: tuple[Any, ...] = ()
        source: Any = node.args[0] if len(node.args) == 1 and not node.kwargs else None
    else:
        transposed = "transpose" in call.name
        names = ["input", "weight", "bias", "stride", "padding"]
        names += ["output_padding", "groups", "dilation"] if transposed else ["dilation", "groups"]
        defaults = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}
        own = {n: call.argument(i, n, defaults.get(n)) for i, n in enumerate(names)}
        source, parameters, mode = own["input"], (own["weight"], own["bias"]), "zeros"
        if not isinstance(own["weight"], fx.Node) or own["weight"] in call.layouts:
            return "its weight is cut"
        kernel = tuple(call.values[own["weight"]].shape[FIRST:])
        padding, groups = own["padding"], own["groups"]
        stride, dilation = own["stride"], own["dilation"]
        extra = own.get("output_padding", 0)
    if not isinstance(source, fx.Node):
        return "it is called with a size"
    inputs = call.parts_of.get(source, (source,))
    layout = call.layouts.get(inputs[0])
    rank = len(kernel)
    if layout is None or not _is_spatial(layout, rank):
        return "it is called without rows"
    dilation = _sizes(dilation, rank)
    if isinstance(padding, str):
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        padding = (0,) * rank if padding == "valid" else tuple(r // 2 for r in reach)
        if any(r % 2 for r in reach) and any(padding):
            return "its two sides are padded differently"
    if mode != "zeros":
        return f"its padding is {mode}"
    return _windowed(
        call,
        Convolution(
            lengths=layout.shape[FIRST:],
            cut=tuple(FIRST + dim in layout.dims for dim in range(rank)),
            kernel=tuple(kernel),
            stride=_sizes(stride, rank),
            padding=_sizes(padding, rank),
            dilation=dilation,
            output_padding=_sizes(extra, rank),
            groups=groups,
            transposed="ranspose" in call.name,
        ),
        inputs,
        "tensors" if parameters else "module",
        parameters,
    )


def _pool(average: bool) -> _Maker:
    def rule(call: Call) -> Rule:
        names = ["kernel_size", "stride", "padding"]
        names += (
            ["ceil_mode", "count_include_pad", "divisor_override"]
            if average
            else ["dilation", "ceil_mode", "return_indices"]
        )
        defaults: dict[str, Any] = {
            "padding": 0,
            "dilation": 1,
            "ceil_mode": False,
            "count_include_pad": True,
        }
        given = {
            name: getattr(call.module, name, defaults.get(name))
            if call.module is not None
            else call.argument(i, name, defaults.get(name))
            for i, name in enumerate(names, start=1)
        }
        layout = call.layouts[call.inputs[0]]
        rank = int(call.name.removesuffix("_with_indices")[-2])
        if given.get("return_indices") or not isinstance(call.result, Tensor):
            return "it returns positions in the whole value"
        if not _is_spatial(layout, rank):
            return "it is called without rows"
        kernel = _sizes(given["kernel_size"], rank)
        stride = kernel if not given["stride"] else _sizes(given["stride"], rank)
        operator = Pool(
            lengths=layout.shape[FIRST:],
            kernel=kernel,
            stride=stride,
            padding=_sizes(given["padding"], rank),
            dilation=_sizes(given.get("dilation", 1), rank),
            average=average,
            include_pad=bool(given.get("count_include_pad", True)),
            divisor=given.get("divisor_override"),
        )
        found = _windowed(call, operator, (call.inputs[0],))
        partly = given["ceil_mode"] or any(operator.padding)
        if isinstance(found, Local) and partly:  # the operator itself must not see a border
            windows = Windows(
                operator, (layout,), Layout(layout.cuts, tuple(call.result.shape), layout.dims), 1
            )
            return Replace(RunInWindows(windows), (call.inputs[0],), dims=layout.dims)
        return found

    return rule


def _adaptive(call: Call) -> Rule:
    """Adaptive average pooling to one position, or to a divisor of the length."""
    layout = call.layouts[call.inputs[0]]
    rank = len(layout.shape) - FIRST
    if not _is_spatial(layout, rank) or str(rank) != call.name[-2]:
        return "it is called without rows"
    output = tuple(call.result.shape[FIRST:])
    spatial = layout.shape[FIRST:]
    if set(output) == {1} and {dim - FIRST for dim in layout.dims} <= set(range(rank)):
        dims = tuple(range(FIRST, rank + FIRST))
        total = SumParts(layout, dims, keepdim=True, kind=f"adaptive_avg_pool{rank}d")
        return Replace(total, (call.inputs[0],))
    if any(length % size for length, size in zip(spatial, output, strict=True)):
        return "its windows overlap"
    kernel = tuple(length // size for length, size in zip(spatial, output, strict=True))
    none = (0,) * rank
    result = Layout(layout.cuts, tuple(call.result.shape), layout.dims)
    operator = Pool(spatial, kernel, kernel, none, tuple(1 for _ in none), average=True)
    windows = Windows(operator, (layout,), result, call.count)
    # Never the layer itself on a part: that would make the size of the whole result.
    return Replace(RunInWindows(windows), (call.inputs[0],), dims=layout.dims)


def _resize(call: Call) -> Rule:
    layout = call.layouts[call.inputs[0]]
    rank = len(layout.shape) - FIRST
    names = ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor")
    if call.module is not None:
        given = {name: getattr(call.module, name, None) for name in names}
    else:
        given = {name: call.argument(i, name, None) for i, name in enumerate(names, start=1)}
        if call.argument(6, "antialias", False):
            return "it smooths over many positions"
    mode = given["mode"] or "nearest"
    if not _is_spatial(layout, rank):
        return "it is called without rows"
    if mode not in ("nearest", "linear", "bilinear", "trilinear"):
        return f"its mode is {mode}"
    spatial, output = layout.shape[FIRST:], tuple(call.result.shape[FIRST:])
    factors: tuple[float | None, ...] = (None,) * rank
    if given["scale_factor"] is not None and not given["recompute_scale_factor"]:
        factors = tuple(map(float, _sizes(given["scale_factor"], rank)))
    odd = any(size % length for length, size in zip(spatial, output, strict=True))
    odd = odd or any(f is not None and f != int(f) for f in factors)
    if odd and mode == "nearest":
        return "its factor is no integer"
    operator = Resize(
        lengths=spatial,
        outputs=output,
        cut=tuple(odd or FIRST + dim in layout.dims for dim in range(rank)),
        nearest=mode == "nearest",
        align_corners=bool(given["align_corners"]),
        factors=factors,
    )
    dims = layout.dims
    result = Layout(layout.cuts, tuple(call.result.shape), dims)
    windows = Windows(operator, (layout,), result, call.count)
    if mode == "nearest" and not odd and needs_no_window(windows) and _even(layout, windows):
        return Local(dims)
    return Replace(RunInWindows(windows), (call.inputs[0],), dims=dims)


def _even(layout: Layout, windows: Windows) -> bool:
    """Is every part of the output so many times as long as its input, in every dimension?"""
    lengths = zip(layout.shape[FIRST:], windows.output.shape[FIRST:], strict=True)
    ratios = [after // before for before, after in lengths]
    return all(
        (own[1] - own[0]) * ratio == out[1] - out[0]
        for box, result in zip(layout.boxes, windows.outputs, strict=True)
        for own, out, ratio in zip(box[FIRST:], result, ratios, strict=True)
    )


def _norm(call: Call) -> Rule:
    module: Any = call.module
    (layout,) = call.layouts.values()
    batch = isinstance(module, _BATCH_NORMS)
    if len(layout.shape) < FIRST + 1 or min(layout.dims) < FIRST:
        return "its rows or channels are cut"
    if isinstance(module, nn.SyncBatchNorm):
        return "it sums over processes itself"
    if batch and not module.training and module.running_mean is not None:
        return Local(layout.dims)
    if isinstance(module, _INSTANCE_NORMS):
        if module.track_running_stats:
            return "it has running statistics per row"
        if not _is_spatial(layout, int(call.name[-2])):
            return "it is called without rows"
    number = None if batch else getattr(module, "num_groups", layout.shape[1])
    operation = NormalizeParts(Groups(layout, number))
    return Replace(operation, (call.inputs[0],), takes_layer=True, dims=layout.dims)


_LOSSES = {
    "MSELoss": "mse_loss",
    "L1Loss": "l1_loss",
    "SmoothL1Loss": "smooth_l1_loss",
    "HuberLoss": "huber_loss",
    "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "CrossEntropyLoss": "cross_entropy",
}
_UNKNOWN_OPTIONS = ("weight", "pos_weight", "size_average", "reduce")
_ALIASES = {"dim": "axis", "keepdim": "keepdims", "dim0": "axis0", "dim1": "axis1"}
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
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
    *("nan_to_num", "isnan", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_not"),
    *("logical_or", "rsub", "sub_", "add_", "mul_", "div_", "relu_", "clamp_", "sigmoid_", "tanh_"),
    *("leaky_relu_", "hardswish_", "silu_", "iadd", "imul", "isub", "itruediv", "masked_fill"),
    *("multiply", "divide", "subtract", "xlogy", "zeros_like", "ones_like", "full_like"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__"),
)
_RULES: dict[str, _Maker] = {
    **dict.fromkeys((*_ACTIVATIONS, *_FUNCTIONS), _pointwise),
    "PReLU": _activation_per_channel,
    **dict.fromkeys(("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout"), _dropout),
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"), _dropout),
    **dict.fromkeys(("Softmax", "LogSoftmax", "softmax", "log_softmax"), _along(1, "dim", None)),
    **dict.fromkeys(("argmax", "argmin"), _along(1, "dim", None)),
    **dict.fromkeys(("Linear", "linear"), _last(lambda call: 1)),
    **dict.fromkeys(("LayerNorm", "layer_norm"), _last(_normalized)),
    **dict.fromkeys(("cat", "concat", "concatenate"), _concatenate),
    "permute": _permuted(_permutation),
    **dict.fromkeys(("transpose", "swapaxes"), _permuted(_transposition)),
    **dict.fromkeys(("chunk", "split"), _split),
    "getitem": _item,
    **dict.fromkeys(("sum", "mean"), _reduce),
    **dict.fromkeys((*_LOSSES, *_LOSSES.values()), _loss),
    **{
        f"{prefix}{n}{suffix}": _convolution
        for n in "123"
        for prefix, suffix in (
            ("Conv", "d"),
            ("ConvTranspose", "d"),
            ("conv", "d"),
            ("conv_transpose", "d"),
        )
    },
    **{f"{name}{n}d": _pool(False) for n in "123" for name in ("MaxPool", "max_pool")},
    **{f"{name}{n}d": _pool(True) for n in "123" for name in ("AvgPool", "avg_pool")},
    **{
        f"{name}{n}d": _adaptive for n in "123" for name in ("AdaptiveAvgPool", "adaptive_avg_pool")
    },
    **dict.fromkeys(("Upsample", "UpsamplingNearest2d", "UpsamplingBilinear2d"), _resize),
    "interpolate": _resize,
    **{f"BatchNorm{n}d": _norm for n in "123"},
    **{f"InstanceNorm{n}d": _norm for n in "123"},
    "GroupNorm": _norm,
    "SyncBatchNorm": _norm,
}
