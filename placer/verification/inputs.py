"""Copies of a call's arguments: as they are, with other values, and with another number of rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from placer.program import CallFormat, flatten_call, rebuild_call, rows_of
from placer.program.objects.paths import is_object, walk

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def fresh(arguments: Arguments) -> Arguments:
    """A copy whose tensors are leaves of autograd's graph. A tensor that is given twice stays one tensor.

    Functions, and objects that pytree does not flatten, are the caller's own, as calls of a placed model must
    give the same ones.
    """
    own = {id(x): x for x in tree_leaves(arguments) if is_object(x) or callable(x)}
    found = walk([((), arguments)], without=own)
    tensors = [x for _, x in found if isinstance(x, Tensor)]
    made: dict[int, Any] = own | {id(x): _leaf(x.detach().clone(), x) for x in tensors}
    try:
        return copy.deepcopy(arguments, dict(made))
    except Exception:  # an object that cannot be copied is shared
        args, kwargs = tree_map(lambda leaf: made.get(id(leaf), leaf), arguments)
        return args, kwargs


def other_values(arguments: Arguments) -> Iterator[Arguments]:
    """The arguments with other values, those that are most different first; every tensor is another one.

    Elements are shuffled, because integers may be indices and have to stay in their range, and numbers are
    made smaller. The last ones have distinct tensors, but the values of ``arguments``.
    """
    changes: Sequence[Callable[[Tensor], Tensor]] = (_shuffled, _smaller, torch.clone)
    for change in changes:

        def changed(leaf: Any, change: Callable[[Tensor], Tensor] = change) -> Any:
            return _leaf(change(leaf.detach()), leaf) if isinstance(leaf, Tensor) else leaf

        yield tree_map(changed, arguments)


def another_batch_size(call: CallFormat, arguments: Arguments) -> Iterator[Arguments]:
    """The arguments with one more row, and with two more; nothing if there is no batch."""
    leaves = flatten_call(call, *arguments)
    rows = rows_of(call.batch_dims, [x.shape for x in leaves])
    for more in (1, 2) if rows else ():
        index = torch.arange((rows or 0) + more) % (rows or 1)
        larger = [
            leaf
            if dim is None
            else _leaf(leaf.detach().index_select(dim, index.to(leaf.device)), leaf)
            for leaf, dim in zip(leaves, call.batch_dims, strict=True)
        ]
        args, kwargs = rebuild_call(call, larger)
        yield tuple(args), dict(kwargs)


def _leaf(made: Tensor, like: Tensor) -> Tensor:
    return made.requires_grad_(like.requires_grad)


def _shuffled(x: Tensor) -> Tensor:
    x = _smaller(x)
    if x.layout is not torch.strided or not x.numel():
        return x
    return x.flatten()[torch.randperm(x.numel(), device=x.device)].reshape(x.shape)


def _smaller(x: Tensor) -> Tensor:
    """Numbers between half of what they are and all of it; small ones in place of zeros, if all are zero."""
    if not (x.is_floating_point() or x.is_complex()) or x.layout is not torch.strided:
        return x.clone()
    if not x.any():
        return torch.randn_like(x) / 8
    return x * (torch.rand_like(x) / 2 + 0.5)
