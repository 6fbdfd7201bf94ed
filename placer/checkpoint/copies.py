"""Whether the copies of a parameter on several ranks are still the same, before one of them is saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from placer.checkpoint.entries import Contents

_MOST_AT_ONCE = 2**22  # elements: sums are taken in int64, of a copy of them
_SHOWN = 4  # names in a warning
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sum_copies(module: nn.Module, contents: Contents) -> dict[str, int]:
    """A number for the bits of each parameter of ``module``, by its first name.

    It is their sum as integers, which is the same in any order and so on any device. Copies that were
    trained apart have the same number by chance only.
    """
    named = {contents.first_name[name]: tensor for name, tensor in module.named_parameters()}
    return {name: _sum_bits(tensor.detach()) for name, tensor in named.items()}


def _sum_bits(tensor: Tensor) -> int:
    size = 8 if tensor.is_complex() else tensor.element_size()
    bits = tensor.contiguous().view(-1).view(_INTEGERS[size])
    sums = [part.sum(dtype=torch.int64) for part in bits.split(_MOST_AT_ONCE)]
    return int(torch.stack(sums).sum().item()) if sums else 0


def describe_different_copies(ranks: Sequence[Mapping[str, int]]) -> str:
    """What is to be told of parameters whose copies differ, from each rank's `sum_copies`; or ""."""
    holders: dict[str, dict[int, list[int]]] = {}
    for rank, sums in enumerate(ranks):
        for name, number in sums.items():
            holders.setdefault(name, {}).setdefault(number, []).append(rank)
    different = {name: found for name, found in holders.items() if len(found) > 1}
    if not different:
        return ""
    lines = [
        f"{name}: that of rank {' and of rank '.join(str(alike[0]) for alike in found.values())}"
        for name, found in list(different.items())[:_SHOWN]
    ]
    more = len(different) - len(lines)
    lines += [f"and {more} more"] * (more > 0)
    return (
        "placer.save: copies of one parameter differ between ranks ("
        + "; ".join(lines)
        + "). The lowest rank's are saved. Each rank has changed its own: change gradients and weights "
        "alike on all ranks, for example by placed.clip_grad_norm_(…) in place of "
        "torch.nn.utils.clip_grad_norm_"
    )
