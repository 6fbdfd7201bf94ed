"""Packed sequences of fake tensors: every sequence is assumed to have the full length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def pack(data: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, list[int]]:
    """The result of ``_pack_padded_sequence``: (steps * batch, ...), and the batch size of each step."""
    batch, steps = data.shape[:2] if batch_first else data.shape[1::-1]
    by_step = data.transpose(0, 1) if batch_first else data
    return by_step.reshape(steps * batch, *data.shape[2:]), [batch] * steps


def pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, value: complex, total_length: int
) -> tuple[Tensor, list[int]]:
    """The result of ``_pad_packed_sequence``: the padded sequences, and the length of each."""
    steps = batch_sizes.numel()
    by_step = data.unflatten(0, (steps, -1))
    batch, missing = by_step.size(1), max(0, total_length - steps)
    padded = torch.cat([by_step, by_step.new_full((missing, *by_step.shape[1:]), value)])
    return padded.transpose(0, 1) if batch_first else padded, [steps] * batch


def run_recurrent(
    function: Callable[..., Any], data: Tensor, batch_sizes: Tensor, state: Any, *options: Any
) -> tuple[Tensor, ...]:
    """Call a recurrent layer's ``function`` on packed sequences that all have the same length."""
    steps = batch_sizes.numel()
    result, *states = function(data.unflatten(0, (steps, -1)), state, *options, False)
    return result.flatten(0, 1), *states


PACKING: dict[str, Callable[..., tuple[Tensor, list[int]]]] = {
    "_pack_padded_sequence": pack,
    "_pad_packed_sequence": pad,
}
