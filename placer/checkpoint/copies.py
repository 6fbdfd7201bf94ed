"""Checks whether the copies of a parameter on several ranks are equal, before one of them is saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from placer.checkpoint.entries import Contents
from placer.errors import first_few

_MAX_ELEMENTS = 2**22  # summed at once, because the sum converts them to int64
_SHOWN = 4  # how many names a warning lists
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sum_copies(module: nn.Module, contents: Contents) -> dict[str, int]:
    """A checksum of each parameter of ``module``, by its first name.

    It is the sum of the parameter's elements as integers of the same width, which does not depend on the
    order of summation, and so not on the device. Different copies could have equal sums only by chance.
    """
    named = {contents.first_name[name]: tensor for name, tensor in module.named_parameters()}
    return {name: _sum_bits(tensor.detach()) for name, tensor in named.items()}


def _sum_bits(tensor: Tensor) -> int:
    size = 8 if tensor.is_complex() else tensor.element_size()
    bits = tensor.contiguous().view(-1).view(_INTEGERS[size])
    sums = [part.sum(dtype=torch.int64) for part in bits.split(_MAX_ELEMENTS)]
    return int(torch.stack(sums).sum().item()) if sums else 0


def describe_different_copies(ranks: Sequence[Mapping[str, int]]) -> str:
    """A warning about parameters whose copies differ, given each rank's `sum_copies`; "" if none do."""
    holders: dict[str, dict[int, list[int]]] = {}
    for rank, sums in enumerate(ranks):
        for name, number in sums.items():
            holders.setdefault(name, {}).setdefault(number, []).append(rank)
    different = {name: found for name, found in holders.items() if len(found) > 1}
    if not different:
        return ""
    lines = [
        f"{name}: ranks {' and '.join(str(alike[0]) for alike in found.values())}"
        for name, found in different.items()
    ]
    return (
        "placer.save: copies of one parameter differ between ranks ("
        + "; ".join(first_few(lines, _SHOWN))
        + "). The lowest rank's copy is saved. Change gradients and weights in the same way on all ranks, "
        "for example by placed.clip_grad_norm_(…) instead of torch.nn.utils.clip_grad_norm_"
    )
