"""Run the operators of a CUDA device on fake CPU tensors, so that the same tensors are saved for backward.

An operator with its own derivative saves the same tensors on every device. But devices differ in the
operators that a composite operator calls, and in those that autocast casts:

    dropout                       CPU: a float mask       CUDA: a boolean one, `native_dropout`
    scaled_dot_product_attention  CPU: flash, or math     CUDA: flash (half), efficient, or math
    batch_norm                    CPU: native_batch_norm  CUDA: `cudnn_batch_norm`
    lstm, gru, rnn_tanh, rnn_relu CPU: step by step       CUDA: `_cudnn_rnn` and its reserve
    lstm_cell, gru_cell           CPU: gate by gate       CUDA: fused, with a workspace
    rms_norm                      CPU: step by step       CUDA: `_fused_rms_norm`
    softmax of fp16 in fp32       CPU: of a copy in fp32  CUDA: within the kernel

These CUDA operators have fake kernels and derivative formulas, so forward and backward run on fake CPU
tensors. (Fake CUDA tensors could run a forward without a GPU, but torch's engine refuses their
backward there.) While `device_kernels` is entered, the dispatcher calls this file's functions first.

A run on fake tensors cannot show the workspaces of cuDNN and cuBLAS, or sizes that cuDNN chooses.
Workspaces are in `placer.cost.cuda_workspaces`. cuDNN's reserve of a batch norm counts as 0 bytes, as
in torch's fake kernel. The reserve of an RNN is bounded by what its derivative needs (`_RNN_KEPT`, from the
formulas, not measured). Which attention kernel runs depends on the GPU: this file follows torch's choice for
sm80 and later, except cuDNN's attention, which saves as much as flash attention does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves

from placer._torch import call_composite
from placer._torch_patches import override_operators
from placer.cost.autocast import autocast_kernels
from placer.cost.operations import note_kernel, recurrent_flops

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_FLASH_HEAD_DIM = 256  # the largest that flash attention supports
_MASK_ALIGNMENT = 16  # elements; efficient attention pads a mask's rows to multiples of it
# Values kept per step and unit: gates, cell state and its tanh, inputs
_RNN_KEPT = {"rnn_relu": 2, "rnn_tanh": 2, "lstm": 7, "gru": 6}


@contextmanager
def device_kernels(kind: Callable[[], str], *, half: bool) -> Iterator[None]:
    """In this block, operations on fake CPU tensors run the operators of the device type ``kind()``.

    ``kind`` returns "cpu" or "cuda" and is called at every operation. With ``half``, autocast also casts as
    on that device. Real tensors are not affected. The block affects the whole process.
    """

    def chosen(op: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            fake = any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs)))
            if fake and kind() == "cuda":
                return kernel(*args, **kwargs)
            return call_composite(op, *args, **kwargs)

        return run

    kernels = {op: chosen(op, kernel) for op, kernel in _KERNELS.items()}
    with override_operators("AutogradCPU", kernels):
        if not half:
            yield
            return
        with override_operators("AutocastCPU", autocast_kernels(kind), with_keyset=True):
            yield


def _dropout(x: Tensor, p: float, train: bool) -> Any:
    if not train or not 0 < p < 1 or not x.numel():
        return call_composite(aten.dropout.default, x, p, train)
    return torch.native_dropout(x, p, train)[0]


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """cuDNN's batch norm, under the conditions of torch's ``_select_batch_norm_backend``.

    For inputs in half precision, fake kernels save the statistics in half precision, but CUDA's kernels in
    fp32, so 4 bytes per channel are missing here.
    """
    cudnn = (
        weight is not None
        and bias is not None
        and torch.bfloat16 not in (weight.dtype, x.dtype)
        and (x.dtype != torch.float16 or weight.dtype == torch.float32)
        and (running_mean is None) == (running_var is None)
        and (running_mean is not None or training)
        and x.dim() >= 3
        and x.size(0) <= (880801 if training else 65535)
        and eps >= 1e-5
        and cudnn_enabled
    )
    if not cudnn:
        return call_composite(
            aten.batch_norm.default,
            x, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled,
        )  # fmt: skip
    assert weight is not None and bias is not None
    return torch.cudnn_batch_norm(
        x.contiguous(), weight.contiguous(), bias.contiguous(),
        running_mean, running_var, training, momentum, eps,
    )[0]  # fmt: skip


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """The attention that torch's ``sdp_utils.cpp`` and ``attention.cpp`` choose for sm80 and later."""
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -1e4)
    four = all(x.dim() == 4 and x.numel() for x in (query, key, value))
    dim = query.size(-1)
    if (
        four
        and torch.backends.cuda.flash_sdp_enabled()
        and mask is None
        and query.dtype in _HALF
        and dim == key.size(-1) == value.size(-1)
        and dim <= _FLASH_HEAD_DIM
    ):
        padded = [_pad_last(x, 8) for x in (query, key, value)]
        out = aten._scaled_dot_product_flash_attention.default(
            *padded, dropout_p, is_causal, False, scale=dim**-0.5 if scale is None else scale
        )[0]
        return out[..., :dim] if out.size(-1) != dim else out
    aligned = 8 if query.dtype in _HALF else 4
    if (
        four
        and torch.backends.cuda.mem_efficient_sdp_enabled()
        and not enable_gqa
        and query.dtype in (*_HALF, torch.float32)
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
        and dim % aligned == value.size(-1) % aligned == 0
    ):
        if mask is not None:
            rows = (*query.shape[:2], query.size(2), key.size(2))
            mask = _pad_last(mask, _MASK_ALIGNMENT)[..., : key.size(2)].expand(rows)
        grads = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        return aten._scaled_dot_product_efficient_attention.default(
            query, key, value, mask, grads, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math.default(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _pad_last(x: Tensor, alignment: int) -> Tensor:
    missing = -x.size(-1) % alignment
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    if x.dtype == torch.float16 and dtype == torch.float32:
        return aten._softmax.default(x, dim, True)
    return call_composite(aten.softmax.int, x, dim, dtype)


def _log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    if x.dtype == torch.float16 and dtype == torch.float32:
        return aten._log_softmax.default(x, dim, True)
    return call_composite(aten.log_softmax.int, x, dim, dtype)


def _lstm_cell(
    x: Tensor,
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    gates = x.matmul(w_ih.t()), hx[0].matmul(w_hh.t())
    h, c, _ = aten._thnn_fused_lstm_cell.default(*gates, hx[1], b_ih, b_hh)
    return h, c


def _gru_cell(
    x: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    return _FusedGruCell.apply(x.matmul(w_ih.t()), hx.matmul(w_hh.t()), hx, b_ih, b_hh)


class _FusedGruCell(torch.autograd.Function):
    """A fake `_thnn_fused_gru_cell`, which has no fake kernel before torch 2.15.

    Gates are rows x 3 units, the state is rows x units, the workspace rows x 5 units (ATen's
    ``native/cuda/RNN.cu``). All inputs are saved, because the backward can be differentiated itself
    (``derivatives.yaml``).
    """

    @staticmethod
    def forward(
        ctx: Any,
        input_gates: Tensor,
        hidden_gates: Tensor,
        hx: Tensor,
        b_ih: Tensor | None,
        b_hh: Tensor | None,
    ) -> Tensor:
        rows, units = hx.shape
        workspace = hx.new_empty(rows, 5 * units)
        ctx.save_for_backward(input_gates, hidden_gates, hx, b_ih, b_hh, workspace)
        note_kernel("_thnn_fused_gru_cell", [input_gates, hidden_gates, hx, hx, workspace], 0)
        return torch.empty_like(hx, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # in a variable, so that all stay alive until the kernel is done
        input_gates, hidden_gates, _, b_ih, _, workspace = saved
        gates = [torch.empty_like(g) for g in (input_gates, hidden_gates)]
        note_kernel("_thnn_fused_gru_cell_backward", [grads[0], grads[0], workspace, *gates], 0)
        biases = [None if b_ih is None else gate.sum(0) for gate in gates]
        return *gates, torch.empty_like(grads[0]), *biases


def _lstm(x: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], *options: Any) -> Any:
    output, hy, cy = _cudnn_rnn("lstm", x, hx[0], hx[1], params, *options)
    return output, hy, cy


def _rnn(mode: str) -> Callable[..., Any]:
    def run(x: Tensor, hx: Tensor, params: Sequence[Tensor], *options: Any) -> Any:
        output, hy, _ = _cudnn_rnn(mode, x, hx, None, params, *options)
        return output, hy

    return run


def _cudnn_rnn(
    mode: str,
    x: Tensor,
    hx: Tensor,
    cx: Tensor | None,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A recurrent layer of cuDNN, whose weights are copied to one buffer, as in a placed model."""
    if torch.is_autocast_enabled("cpu"):
        half = torch.get_autocast_dtype("cpu")
        x, hx, cx = x.to(half), hx.to(half), None if cx is None else cx.to(half)
        params = [p.to(half) for p in params]
        buffer = x.new_empty(0)  # autocast has already copied them into one buffer
    else:
        buffer = x.new_empty(sum(p.numel() for p in params))
    output = x.new_empty(*x.shape[:-1], hx.size(2) * (1 + bidirectional))
    units = hx.size(2) if cx is None else cx.size(2)
    cells = x.numel() // x.size(-1) * units * (1 + bidirectional)
    nbytes = _RNN_KEPT[mode] * cells * num_layers * x.element_size()
    nbytes += cells * (num_layers - 1) * (dropout > 0)  # masks between the layers
    reserve = x.new_empty(nbytes if train else 0, dtype=torch.uint8)
    made = _CudnnRnn.apply(output, buffer, reserve, x, hx, cx, *params)
    return made[0], made[1], made[2] if cx is not None else None


class _CudnnRnn(torch.autograd.Function):
    """A fake `_cudnn_rnn` with a backward, for which torch has no fake kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        buffer: Tensor,
        reserve: Tensor,
        x: Tensor,
        hx: Tensor,
        cx: Tensor | None,
        *params: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, hx, cx, output, buffer, reserve, *params)
        note_kernel("_cudnn_rnn", [x, output, *params], recurrent_flops(x, params))
        hy, cy = torch.empty_like(hx), torch.empty_like(hx if cx is None else cx)
        return output, hy, cy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # in a variable, so that all stay alive until the kernel is done
        x, hx, cx, output, _, reserve, *params = saved
        read = [x, output, grads[0], reserve, *params]
        note_kernel("_cudnn_rnn_backward", [*read, *params], 2 * recurrent_flops(x, params))
        flat = x.new_empty(sum(p.numel() for p in params))  # cuDNN's gradients are in one buffer
        pieces = flat.split([p.numel() for p in params])
        views = [v.view_as(p) for v, p in zip(pieces, params, strict=True)]
        states = [None if s is None else torch.empty_like(s) for s in (hx, cx)]
        return None, None, None, torch.empty_like(x), *states, *views


class _FusedRmsNorm(torch.autograd.Function):
    """A fake `_fused_rms_norm` with a backward, which torch has for CUDA only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Any:
        outer = x.shape[: x.dim() - dims]
        accumulated = torch.float32 if x.dtype in _HALF else x.dtype
        rstd = x.new_empty(*outer, *[1] * dims, dtype=accumulated)
        ctx.save_for_backward(x, weight, rstd)
        note_kernel("_fused_rms_norm", [x, x], 0)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        x, weight, _ = saved
        note_kernel("_fused_rms_norm_backward", [x, grad, x], 0)
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    normed: Tensor = _FusedRmsNorm.apply(x, weight, len(shape))
    return normed


_KERNELS: dict[Any, Callable[..., Any]] = {
    aten.dropout.default: _dropout,
    aten.batch_norm.default: _batch_norm,
    aten.scaled_dot_product_attention.default: _attention,
    aten.softmax.int: _softmax,
    aten.log_softmax.int: _log_softmax,
    aten.rms_norm.default: _rms_norm,
    aten.lstm_cell.default: _lstm_cell,
    aten.gru_cell.default: _gru_cell,
    aten.lstm.input: _lstm,
    aten.gru.input: _rnn("gru"),
    aten.rnn_tanh.input: _rnn("rnn_tanh"),
    aten.rnn_relu.input: _rnn("rnn_relu"),
}
