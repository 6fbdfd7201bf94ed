"""Make ``torch.autocast("cpu")`` cast fake CPU tensors as ``torch.autocast("cuda")`` casts CUDA tensors.

The two differ for operators that have an autocast kernel only on the CPU or only on CUDA. Nearly all of
these are cast to fp32; this file lists the others. Source: torch 2.15,
``aten/src/ATen/autocast_mode.h`` and ``.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from placer._torch import autocast_operators, call_below_autocast, call_without_autocast

_LOWER = {  # cast to the autocast type
    "_convolution", "convolution", "cudnn_convolution", "cudnn_convolution_transpose",
    "addmv", "addr", "mv", "einsum", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell",
    "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "_cudnn_rnn",
    "_addmm_activation", "_native_multi_head_attention", "mkldnn_rnn_layer",
    "conv1d.padding", "conv2d.padding", "conv3d.padding",
}  # fmt: skip
_PROMOTE = {  # cast to the widest type among the arguments
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "index_put", "tensordot",
    "scatter_add", "cat", "stack", "index_copy",
}  # fmt: skip


def autocast_kernels(kind: Callable[[], str]) -> dict[Any, Callable[..., Any]]:
    """Operator -> autocast kernel, for all operators that autocast treats differently on CPU and CUDA.

    ``kind()`` gives the device type ("cpu" or "cuda") when an operator runs.
    """
    lists = {kind: autocast_operators(kind) for kind in ("cpu", "cuda")}
    return {
        op: _kernel(op, kind, [name for name, ops in lists.items() if op in ops])
        for op in sorted(lists["cpu"] ^ lists["cuda"], key=str)
    }


def _kernel(op: Any, kind: Callable[[], str], where: list[str]) -> Callable[..., Any]:
    name = op.name().removeprefix("aten::")
    takes_dtype = any(a.name == "dtype" for a in op._schema.arguments)

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if kind() not in where:
            return call_below_autocast(op, keyset, *args, **kwargs)
        dtypes = {x.dtype for x in tree_leaves((args, kwargs)) if _eligible(x)}
        if name in _LOWER:
            wanted = torch.get_autocast_dtype("cpu")
        elif name in _PROMOTE:
            wanted = max(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)
        else:
            wanted = torch.float32
            if takes_dtype and dtypes and _dtype_of(op, args, kwargs) is None:
                return call_without_autocast(op, *args, **{**kwargs, "dtype": wanted})
        cast = lambda x: x.to(wanted) if _eligible(x) else x  # noqa: E731
        args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
        return call_without_autocast(op, *args, **kwargs)

    return run


def _dtype_of(op: Any, args: Any, kwargs: Any) -> torch.dtype | None:
    names = [argument.name for argument in op._schema.arguments]
    found: torch.dtype | None = {**dict(zip(names, args, strict=False)), **kwargs}.get("dtype")
    return found


def _eligible(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
