"""Packed sequences of fake tensors: how long the sequences are is assumed, because it is not known.

Sequences that forward packs are assumed to have the full length, and those that a caller gives to be as
equally long as the sizes allow. Torch wants their lengths, or the sizes of their steps, in CPU memory, while
a stage has all its values on its own device. So they are brought back where torch reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from placer._torch import without_modes

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def pack(
    data: Tensor, lengths: Tensor, batch_first: bool, *, shorter: int = 0
) -> tuple[Tensor, list[int]]:
    """The result of ``_pack_padded_sequence``: (steps * batch, ...), and the batch size of each step.

    All sequences are assumed to end ``shorter`` steps before the end of ``data``.
    """
    batch, steps = data.shape[:2] if batch_first else data.shape[1::-1]
    if lengths.numel() != batch:
        raise RuntimeError(f"{lengths.numel()} lengths are given for a batch of {batch} sequences")
    by_step = data.transpose(0, 1) if batch_first else data
    steps = max(1, steps - shorter)
    return by_step[:steps].reshape(steps * batch, *data.shape[2:]), [batch] * steps


def pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, value: complex, total_length: int
) -> tuple[Tensor, list[int]]:
    """The result of ``_pad_packed_sequence``: the padded sequences, and the length of each."""
    by_step = _by_step(data, batch_sizes.numel(), None)
    steps, batch = by_step.shape[:2]
    missing = max(0, total_length - steps)
    padded = torch.cat([by_step, by_step.new_full((missing, *by_step.shape[1:]), value)])
    return padded.transpose(0, 1) if batch_first else padded, [steps] * batch


def run_recurrent(
    function: Callable[..., Any], data: Tensor, batch_sizes: Tensor, state: Any, *options: Any
) -> tuple[Tensor, ...]:
    """Call a recurrent layer's ``function`` on packed sequences, as if they were padded."""
    batch = (state if isinstance(state, Tensor) else state[0]).size(1)
    by_step = _by_step(data, batch_sizes.numel(), batch)
    result, *states = function(by_step, state, *options, False)
    return result.flatten(0, 1)[: data.size(0)], *states


def _by_step(data: Tensor, steps: int, batch: int | None) -> Tensor:
    """Packed ``data`` as (steps, batch, ...), with more rows where they are not enough for that."""
    batch = batch or -(-data.size(0) // steps)
    missing = steps * batch - data.size(0)
    if missing:
        data = pad_tensor(data, (*[0, 0] * (data.dim() - 1), 0, missing))
    by_step: Tensor = data.unflatten(0, (steps, batch))
    return by_step


PACKING: dict[str, Callable[..., tuple[Tensor, list[int]]]] = {
    "_pack_padded_sequence": pack,
    "_pad_packed_sequence": pad,
}


class WithLengths:
    """Calls a torch function that packs or pads sequences, with their lengths in CPU memory."""

    def __init__(self, function: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = function.__name__
        self.__module__ = __name__

    def __call__(self, data: Tensor, lengths: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        return self.function(data, lengths.cpu(), *options)

    def __repr__(self) -> str:
        return f"WithLengths({self.__name__})"


def packed_sequences(tree: Any) -> Iterator[PackedSequence]:
    """All packed sequences in ``tree``."""
    leaves = tree_leaves(tree, is_leaf=lambda x: isinstance(x, PackedSequence))
    return (leaf for leaf in leaves if isinstance(leaf, PackedSequence))


def assume_sizes(packed: PackedSequence) -> None:
    """Let code that reads the batch sizes of ``packed``, of fake tensors, find such as are possible."""
    guess = getattr(getattr(packed.batch_sizes, "fake_mode", None), "guess", None)
    if guess is None:
        return
    steps, rows = packed.batch_sizes.numel(), packed.data.size(0)
    order = packed.sorted_indices
    first = -(-rows // steps) if order is None else order.numel()
    later, more = divmod(rows - first, max(1, steps - 1))
    with without_modes():
        sizes = torch.tensor([first, *[later + 1] * more, *[later] * (steps - 1 - more)])
    guess.know(packed.batch_sizes, sizes)


def unflatten(leaves: Iterable[Any], spec: TreeSpec) -> Any:
    """``tree_unflatten``, where the batch sizes of packed sequences may be on any device, also ``meta``.

    The constructor of a packed sequence wants them in CPU memory.
    """
    given, places = list(leaves), list(packed_places(spec))
    for place in places:
        sizes = given[place + 1]
        given[place + 1] = torch.empty_like(sizes, device="cpu") if sizes.is_meta else sizes.cpu()
    tree = tree_unflatten(given, spec)
    if places:
        for packed in packed_sequences(tree):
            assume_sizes(packed)
    return tree


def packed_places(spec: TreeSpec, first: int = 0) -> Iterator[int]:
    """Where the leaves of a packed sequence begin, for each; ``first`` is the number of the first leaf."""
    if spec.context is PackedSequence:
        yield first
        return
    for child in spec.children():
        yield from packed_places(child, first)
        first += child.num_leaves
