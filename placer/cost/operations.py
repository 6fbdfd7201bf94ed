"""Classify operators to estimate their time: class, data type, FLOPs, bytes and width.

`placer.machine.rates` computes the seconds of an operation on a device from these.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from placer.operands import nbytes_of

_HALF = (torch.float16, torch.bfloat16)
_ALIGNMENT = 8  # elements; tensor cores need sizes in half precision to be multiples of it
_NO_KERNEL = (
    "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view",
    "_reshape_alias", "alias", "detach", "lift_fresh", "_local_scalar_dense", "resize_",
)  # fmt: skip
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear", "addbmm", "matmul",
             "_addmm_activation", "mkldnn_linear", "_scaled_mm")  # fmt: skip
# (part of an operator's name, class): the first match counts; "_backward" is appended to the class
# if it is in the name.
_NAMED = (
    ("attention", "attention"),
    ("batch_norm", "batch_norm"),
    ("group_norm", "group_norm"),
    ("layer_norm", "layer_norm"),
    ("rms_norm", "layer_norm"),
    ("softmax", "layer_norm"),
    ("pool", "pooling"),
    ("upsample", "upsampling"),
    ("grid_sampler", "upsampling"),
)
_RECURRENT = ("_cudnn_rnn", "mkldnn_rnn_layer", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell")
_COPIES = ("copy_", "_to_copy", "clone", "cat", "stack", "contiguous", "constant_pad_nd", "flip",
           "roll", "repeat", "col2im", "im2col", "pixel_shuffle", "fill_", "zero_", "zeros",
           "zeros_like", "new_zeros", "full", "ones_like", "slice_backward", "select_backward",
           "slice_scatter", "select_scatter", "split_with_sizes_copy")  # fmt: skip
_REDUCTIONS = ("sum", "mean", "amax", "amin", "max", "min", "var", "var_mean", "std", "norm",
               "linalg_vector_norm", "logsumexp", "argmax", "argmin", "cumsum", "prod", "any",
               "all", "sort", "topk")  # fmt: skip
_GATHERS = ("embedding", "gather", "index", "index_select", "take")
_SCATTERS = ("embedding_dense_backward", "index_put", "index_put_", "_index_put_impl_",
             "scatter_add", "scatter_add_", "scatter", "index_add", "index_add_")  # fmt: skip

# A fake kernel that is written in Python makes empty tensors, which cost nothing. It calls this operator to
# say what the real kernel is: its name, the tensors that it reads and writes, and its FLOPs.
_LIBRARY = torch.library.Library("placer", "FRAGMENT")
_LIBRARY.define("kernel(str name, Tensor[] operands, int flops) -> ()")
_LIBRARY.impl("kernel", lambda name, operands, flops: None, "CompositeExplicitAutograd")
note_kernel: Callable[[str, Sequence[Tensor], int], None] = torch.ops.placer.kernel.default


class Operation(NamedTuple):
    """The properties that determine the time of one operation."""

    name: str  # its class, one of `placer.machine.rates.CLASSES`
    dtype: str  # one of `placer.machine.rates.DTYPES`
    flops: int
    nbytes: int  # bytes read and written
    width: int  # columns of a matrix product, rows of a normalisation; 0 for other classes


def operations_of(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any,
    inputs: Sequence[Tensor], outputs: Sequence[Tensor],
) -> tuple[Operation, ...]:  # fmt: skip
    """The operations that ``op`` runs: none for a view, up to two for a convolution's backward.

    ``inputs`` and ``outputs`` are the tensors in its arguments and in ``result``.
    """
    if op is note_kernel:
        name, operands, flops = args
        return (Operation(_class_of(name), _dtype(operands, ()), flops, nbytes_of(*operands), 0),)
    name, count = _name_and_count(op)
    if not name:
        return ()
    flops = 0 if count is None else int(count(*args, **kwargs, out_val=result))
    dtype = _dtype(inputs, outputs)
    nbytes = nbytes_of(*inputs, *outputs)
    if name == "convolution_backward" or name == "mkldnn_convolution_backward":
        return _convolution_gradients(args, dtype)
    if "convolution" in name and inputs:
        kind, columns = _convolution(args)
        return (Operation(kind, dtype, flops, nbytes, columns),)
    kind = _class_of(name)
    if kind == "product":
        return (_product(inputs, outputs, flops, nbytes, dtype),)
    if name in _GATHERS:  # only the selected rows of the table are read
        nbytes = 2 * nbytes_of(*outputs) + nbytes_of(*inputs[1:])
    width = _WIDTHS[kind](args, inputs) if kind in _WIDTHS and inputs else 0
    return (Operation(kind, dtype, flops, nbytes, width),)


@functools.cache
def _name_and_count(op: Any) -> tuple[str, Callable[..., Any] | None]:
    """The operator's name ("" if it runs no kernel), and torch's function that counts its FLOPs, if any."""
    name = op._schema.name.partition("::")[2]
    if getattr(op, "is_view", False) or name in _NO_KERNEL:
        return "", None
    return name, _RNN_FLOPS.get(name) or flop_registry.get(op.overloadpacket)


def recurrent_flops(x: Tensor, params: Iterable[Tensor]) -> int:
    """FLOPs of a recurrent layer's forward: products of all steps' rows with its matrices of weights."""
    rows = x.numel() // x.size(-1)
    return 2 * rows * sum(p.numel() for p in params if p.dim() == 2)


# oneDNN's LSTM of one layer and direction, for which torch has no formulas. Operands are x, then weights.
_RNN_FLOPS: dict[str, Callable[..., int]] = {
    "mkldnn_rnn_layer": lambda *args, **_: recurrent_flops(args[0], args[1:3]),
    "mkldnn_rnn_layer_backward": lambda *args, **_: 2 * recurrent_flops(args[0], args[1:3]),
}


def _dtype(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> str:
    """The floating-point type of the largest tensor; float64 if any tensor but a scalar has it."""
    found, most = torch.float32, -1
    for x in (*inputs, *outputs):
        dtype = x.dtype
        if dtype.is_floating_point:
            count = x.numel()
            if dtype == torch.float64 and x.dim():
                return "float64"
            if count > most:
                found, most = dtype, count
    return "half" if found in _HALF else "float32"


@functools.cache
def _class_of(name: str) -> str:
    backward = "_backward" if "backward" in name else ""
    if name.rstrip("_").removesuffix("_backward") in _PRODUCTS or name in _PRODUCTS:
        return "product"
    if name.startswith(_RECURRENT):
        return "recurrent"
    for part, kind in _NAMED:
        if part in name and not (part == "pool" and "spool" in name):
            return kind + backward
    if name in _COPIES:
        return "copy"
    if name in _REDUCTIONS:
        return "reduction"
    return "gather" if name in (*_GATHERS, *_SCATTERS) else "pointwise"


def _convolution(args: Sequence[Any]) -> tuple[str, int]:
    """The class of a convolution, and its output channels per group (its columns as a matrix product)."""
    weight, transposed, groups = args[1], _transposed(args, 6), _groups(args, 8)
    if groups > 1 and groups == args[0].size(1):
        return "depthwise_convolution", 0
    if transposed:
        return "transposed_convolution", int(weight.size(1))
    return "convolution", int(weight.size(0)) // groups


def _transposed(args: Sequence[Any], at: int) -> bool:
    return len(args) > at and args[at] is True


def _groups(args: Sequence[Any], at: int) -> int:
    value = args[at] if len(args) > at else 1
    return value if isinstance(value, int) and not isinstance(value, bool) else 1


def _convolution_gradients(args: Sequence[Any], dtype: str) -> tuple[Operation, ...]:
    """One operation for each gradient (of input, of weight) that ``args`` ask for."""
    grad, x, weight = args[0], args[1], args[2]
    transposed, groups, mask = bool(args[7]), int(args[9]), args[10]
    wanted = [bool(wanted) for wanted in mask[:2]]
    kind = "transposed_convolution" if transposed else "convolution"
    columns = [x.size(1) // groups, grad.size(1) // groups]
    if groups > 1 and groups == x.size(1):
        kind, columns = "depthwise_convolution", [0, 0]
    # Each has the FLOPs of the forward. (Torch's count is too high for a grouped weight gradient.)
    rows = x if transposed else grad
    each = 2 * rows.size(0) * math.prod(rows.shape[2:]) * weight.numel()
    nbytes = nbytes_of(grad, x, weight)  # each reads two of the three, and makes the third
    found = []
    for part, width, asked in zip(("input", "weight"), columns, wanted, strict=True):
        if asked:
            name = kind if kind == "depthwise_convolution" else f"{kind}_{part}"
            found.append(Operation(name, dtype, each, nbytes, int(width)))
    return tuple(found)


def _product(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], flops: int, nbytes: int, dtype: str
) -> Operation:
    """A matrix product; its width is the number of columns of the result."""
    sizes = {n for x in inputs if x.dim() >= 2 for n in x.shape[-2:]}
    uneven = dtype == "half" and any(n % _ALIGNMENT for n in sizes)
    width = outputs[0].size(-1) if outputs and outputs[0].dim() else 1
    return Operation("unaligned_product" if uneven else "product", dtype, flops, nbytes, int(width))


def _channels(args: Sequence[Any], inputs: Sequence[Tensor]) -> int:
    x = inputs[0]
    return int(x.size(1)) if x.dim() > 1 else 1


def _groups_normalised(args: Sequence[Any], inputs: Sequence[Tensor]) -> int:
    rows, groups = [a for a in args if isinstance(a, int) and not isinstance(a, bool)][0::3][:2]
    return int(rows) * int(groups)


def _planes(args: Sequence[Any], inputs: Sequence[Tensor]) -> int:
    return math.prod(inputs[0].shape[:2])


_WIDTHS: dict[str, Callable[[Sequence[Any], Sequence[Tensor]], int]] = {
    "batch_norm": _channels,
    "batch_norm_backward": _channels,
    "group_norm": _groups_normalised,
    "group_norm_backward": _planes,
}
