"""What kernels of a CPU return in addition to torch's fake kernels: results that are kept for backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

aten = torch.ops.aten
_FLOAT_NBYTES = 4
_PAGE = 4096  # oneDNN rounds every part of a workspace up to a page
_LINE = 64  # bytes; oneDNN pads rows to cache lines


def cpu_result(op: Any, args: Sequence[Any], result: Any) -> Any:
    """Correct the ``result`` of ``op`` where torch's fake kernel differs from the CPU's kernel.

    In fake kernels, the workspace that an LSTM keeps for backward has 0 bytes, and a group norm in half
    precision with weights in fp32 returns gradients in fp32. Real results are returned unchanged.
    """
    if op is aten.mkldnn_rnn_layer.default and isinstance(result[3], FakeTensor):
        x, hidden_size, train = args[0], args[10], args[15]
        workspace = result[3].new_empty(lstm_workspace_nbytes(x, hidden_size) if train else 0)
        return (*result[:3], workspace)
    if op is aten.native_group_norm_backward.default and isinstance(result[0], FakeTensor):
        return (result[0].to(args[1].dtype), *result[1:])
    return result


def lstm_workspace_nbytes(x: Tensor, hidden_size: int) -> int:
    """Bytes that one layer of oneDNN's LSTM, in one direction, keeps for the backward of ``x``.

    ``x`` is (steps, rows, features). Source: ``set_workspace_sizes`` in oneDNN's
    ``src/cpu/rnn/rnn_utils.hpp``: states, cell states and their gradients of the layer and its input at
    every step, gates and outputs. Checked with oneDNN 3 on AVX-512, in fp32 and bf16.
    """
    steps, rows, features = x.shape
    size, widest = x.element_size(), max(features, hidden_size)

    def array(num_layers: int, num_steps: int, row_nbytes: int) -> int:
        nbytes = num_layers * num_steps * rows * row_nbytes
        return -(-nbytes // _PAGE) * _PAGE

    return (
        array(2, steps + 1, _padded_row(widest, size))
        + array(2, steps + 1, hidden_size * size)
        + 2 * array(2, steps + 1, _padded_row(widest, _FLOAT_NBYTES))
        + array(2, steps + 1, hidden_size * _FLOAT_NBYTES)
        + array(1, steps, _padded_row(4 * hidden_size, size))
        + array(1, steps, _padded_row(hidden_size, size))
    )


def _padded_row(elements: int, size: int) -> int:
    """Bytes of a row (``get_good_ld``): whole cache lines, and not a multiple of 256 elements."""
    padded = -(-elements * size // _LINE) * _LINE
    return padded + _LINE if padded // size % 256 == 0 else padded
