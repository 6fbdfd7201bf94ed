"""Rules for operators in windows, norms and losses: they run as operations over the shards of a stage."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.nn import functional as F

from placer.space.call import Call, Local, Replace, Rule, RuleMaker
from placer.space.layout import Layout
from placer.space.nodes import LossOfParts, NormalizeParts, RunInWindows, SumParts
from placer.space.norms import Groups
from placer.space.operators import FIRST, Convolution, Operator, Pool, Resize
from placer.space.taking import padded
from placer.space.windowed import Windows, needs_no_window

LOSSES = {
    "MSELoss": "mse_loss",
    "L1Loss": "l1_loss",
    "SmoothL1Loss": "smooth_l1_loss",
    "HuberLoss": "huber_loss",
    "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "CrossEntropyLoss": "cross_entropy",
}
_UNKNOWN_OPTIONS = ("weight", "pos_weight", "size_average", "reduce")
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def _windowed(
    call: Call,
    operator: Operator,
    inputs: Sequence[fx.Node],
    takes: str = "",
    parameters: tuple[Any, ...] = (),
    before: Sequence[RunInWindows] = (),
) -> Rule:
    layouts = tuple(x.layout for x in before) or tuple(call.layouts[x] for x in inputs)
    dims = layouts[0].dims
    output = Layout(layouts[0].cuts, tuple(call.result.shape), dims)
    given = Windows(operator, layouts, output, call.count)
    borders = isinstance(operator, Convolution) and (any(operator.padding) or operator.transposed)
    if (
        takes != "tensors"
        and not borders
        and not before
        and call.count == 1
        and needs_no_window(given)
    ):
        return Local(dims)
    return Replace(
        *(RunInWindows(given, takes), tuple(inputs), parameters, takes == "module", dims),
        before=tuple(before),
    )


def _sizes(value: Any, count: int) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,) * count


def _is_spatial(layout: Layout, rank: int) -> bool:
    return len(layout.shape) == rank + FIRST and min(layout.dims) >= FIRST


def convolution(call: Call) -> Rule:
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
        same = padding == "same"
        reach = [same * d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        sides = [(r // 2, r - r // 2) for r in reach]
    else:
        sides = [(n, n) for n in _sizes(padding, rank)]
    padding, lengths, before = tuple(n for n, _ in sides), layout.shape[FIRST:], []
    if any(a != b for a, b in sides) or (mode != "zeros" and any(padding)):
        # Each input is padded first, and then read without padding.
        kind = "constant" if mode == "zeros" else mode
        for x in inputs:
            made = padded(call.layouts[x], [(0, 0), (0, 0), *sides], kind, call.count)
            if isinstance(made, str):
                return made
            before.append(RunInWindows(made))
        lengths, padding = before[0].layout.shape[FIRST:], (0,) * rank
    operator = Convolution(
        lengths=lengths,
        cut=tuple(FIRST + dim in layout.dims for dim in range(rank)),
        kernel=tuple(kernel),
        stride=_sizes(stride, rank),
        padding=padding,
        dilation=dilation,
        output_padding=_sizes(extra, rank),
        groups=groups,
        transposed="ranspose" in call.name,
    )
    return _windowed(
        call, operator, inputs, "tensors" if parameters else "module", parameters, before
    )


def pool(average: bool) -> RuleMaker:
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


def adaptive_pool(call: Call) -> Rule:
    """Adaptive pooling to a divisor of the length; of averages also to one position."""
    average = "avg" in call.name.lower()
    if not isinstance(call.result, Tensor):
        return "it returns positions in the whole value"
    layout = call.layouts[call.inputs[0]]
    rank = len(layout.shape) - FIRST
    if not _is_spatial(layout, rank) or str(rank) != call.name[-2]:
        return "it is called without rows"
    output = tuple(call.result.shape[FIRST:])
    spatial = layout.shape[FIRST:]
    if average and set(output) == {1} and {dim - FIRST for dim in layout.dims} <= set(range(rank)):
        dims = tuple(range(FIRST, rank + FIRST))
        total = SumParts(layout, dims, keepdim=True, kind=f"adaptive_avg_pool{rank}d")
        return Replace(total, (call.inputs[0],))
    if any(length % size for length, size in zip(spatial, output, strict=True)):
        return "its windows overlap"
    kernel = tuple(length // size for length, size in zip(spatial, output, strict=True))
    none = (0,) * rank
    result = Layout(layout.cuts, tuple(call.result.shape), layout.dims)
    if not average and not result.can_be_cut:
        return "its result has fewer positions than there are parts"
    operator = Pool(spatial, kernel, kernel, none, tuple(1 for _ in none), average=average)
    windows = Windows(operator, (layout,), result, call.count)
    # Never the layer itself on a part: that would make the size of the whole result.
    return Replace(RunInWindows(windows), (call.inputs[0],), dims=layout.dims)


def resize(call: Call) -> Rule:
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
    by_factor = given["size"] is None  # a size is that of the whole
    if mode == "nearest" and by_factor and needs_no_window(windows) and _even(layout, windows):
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


def functional_norm(call: Call) -> Rule:
    """The functions of batch, instance and group norm."""
    names = list(inspect.signature(getattr(F, call.name)).parameters)
    defaults = {"eps": 1e-5, "training": False, "use_input_stats": True}
    own = {name: call.argument(i, name, defaults.get(name)) for i, name in enumerate(names)}
    layout = call.layouts.get(own["input"])
    if layout is None or len(call.layouts) > 1:
        return "its weight or its statistics are cut"
    if min(layout.dims) < FIRST:
        return "its rows or channels are cut"
    if not own.get("training", True):
        return Local(layout.dims)
    if own.get("running_mean") is not None or not own.get("use_input_stats", True):
        return "it has running statistics"
    channels = None if call.name == "batch_norm" else layout.shape[1]
    groups = Groups(layout, own.get("num_groups", channels))
    return Replace(
        NormalizeParts(groups, call.name == "group_norm", own["eps"]),
        (own["input"],),
        (own["weight"], own["bias"]),
        dims=layout.dims,
    )


def norm(call: Call) -> Rule:
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
    operation = NormalizeParts(Groups(layout, number), isinstance(module, nn.GroupNorm))
    return Replace(operation, (call.inputs[0],), takes_layer=True, dims=layout.dims)


def loss(call: Call) -> Rule:
    """A loss that is a sum or a mean over elements, or over targets that are classes."""
    function = getattr(F, call.name if call.module is None else LOSSES[call.name])
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
