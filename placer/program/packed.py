"""Packed sequences on tensors without data: each is taken to be as long as it can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def pack(data: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, list[int]]:
    """What ``_pack_padded_sequence`` gives: all steps, and the size of each step's batch."""
    batch, steps = data.shape[:2] if batch_first else data.shape[1::-1]
    by_step = data.transpose(0, 1) if batch_first else data
    return by_step.reshape(steps * batch, *data.shape[2:]), [batch] * steps


def pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, value: complex, total_length: int
) -> tuple[Tensor, list[int]]:
    """What ``_pad_packed_sequence`` gives: the sequences, and the length of each."""
    steps = batch_sizes.numel()
    by_step = data.unflatten(0, (steps, -1))
    batch, missing = by_step.size(1), max(0, total_length - steps)
    padded = torch.cat([by_step, by_step.new_full((missing, *by_step.shape[1:]), value)])
    return padded.transpose(0, 1) if batch_first else padded, [steps] * batch


def run_recurrent(
    function: Callable[..., Any], data: Tensor, batch_sizes: Tensor, state: Any, *options: Any
) -> tuple[Tensor, ...]:
    """A recurrent layer's ``function``, called with packed sequences that have the same length."""
    steps = batch_sizes.numel()
    result, *states = function(data.unflatten(0, (steps, -1)), state, *options, False)
    return result.flatten(0, 1), *states


PACKING: dict[str, Callable[..., tuple[Tensor, list[int]]]] = {
    "_pack_padded_sequence": pack,
    "_pad_packed_sequence": pad,
}
