"""`GradientPiece`, the ``.grad`` of a parameter of whose gradient every rank has a piece."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from placer._torch import make_wrapper
from placer.errors import PlacerError
from placer.executor.distributed.reduction.summing import SummingGroup, gather_pieces
from placer.state_layout import piece_of

# These compute each element by itself too, but have no tag that says so.
_ELEMENTWISE = frozenset(
    f"aten::{name}"
    for name in (
        "zero_", "detach", "_to_copy", "_foreach_zero_", "_foreach_mul_", "_foreach_div_",
        "_foreach_clamp_min_", "_foreach_clamp_max_", "_amp_foreach_non_finite_check_and_unscale_",
    )
)  # fmt: skip


class GradientPiece(Tensor):
    """A gradient of the given shape, of which this rank has only the elements ``own``, in row-major order.

    Operations that compute each element by itself, such as ``g.mul_(2)``, ``g.clamp(-1, 1)`` and
    ``g + weight``, compute those of the piece, and give a piece. All others raise ``PlacerError``, because
    they need the elements of other ranks.
    """

    parameter_name: str
    piece: Tensor  # one-dimensional
    own: slice
    group: SummingGroup  # the ranks that have the pieces

    @staticmethod
    def __new__(
        cls, piece: Tensor, *, shape: torch.Size, name: str, group: SummingGroup
    ) -> GradientPiece:
        made: GradientPiece = make_wrapper(cls, piece, shape)
        made.own = piece_of(shape.numel(), group.rank, group.size)
        made.piece = piece[: made.own.stop - made.own.start]
        made.parameter_name, made.group = name, group
        return made

    def full_tensor(self) -> Tensor:
        """The whole gradient; all ranks that have the parameter call this together."""
        return gather_pieces(self.piece, self.shape, self.group)

    def __repr__(self) -> str:  # type: ignore[override]
        elements = f"{self.own.start} to {self.own.stop} of {self.numel()}"
        return f"GradientPiece(elements {elements}, {self.piece})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        like = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, GradientPiece))
        _check(func, args, kwargs or {}, like)

        def cut(value: Tensor) -> Tensor:
            if isinstance(value, GradientPiece):
                return value.piece
            return value.reshape(-1)[like.own] if value.dim() else value

        def wrap(made: Tensor) -> Tensor:
            return GradientPiece(made, shape=like.shape, name=like.parameter_name, group=like.group)

        is_list = any(isinstance(value, list) for value in args)
        own = tree_map_only(GradientPiece if is_list else Tensor, cut, args)
        result = func(*own, **(kwargs or {}))
        if result is not None and func._schema.is_mutable:
            return args[0]
        return tree_map_only(Tensor, wrap, result)


def piece_of_gradient(gradient: Tensor, own: slice) -> Tensor:
    """The elements ``own`` of a whole gradient, or of a `GradientPiece`, which has no others."""
    return gradient.piece if isinstance(gradient, GradientPiece) else gradient.reshape(-1)[own]


def _check(func: Any, args: Sequence[Any], options: Mapping[str, Any], like: GradientPiece) -> None:
    """Raise ``PlacerError`` unless ``func`` computes each element by itself and changes pieces only."""
    is_elementwise = torch.Tag.pointwise in func.tags or func._schema.name in _ELEMENTWISE
    is_tensor = torch.Tag.data_dependent_output not in func.tags  # not a number
    tensors = [value for value in args if isinstance(value, Tensor)]
    if args and isinstance(args[0], list):  # of gradients; the others are numbers
        tensors = []
    is_like = all(tensor.shape in (like.shape, torch.Size()) for tensor in tensors)
    is_like &= not any(isinstance(value, Tensor) for value in options.values())  # such as ``out``
    changes_whole = func._schema.is_mutable and tensors and type(tensors[0]) is not GradientPiece
    if is_elementwise and is_tensor and is_like and not changes_whole:
        return
    name = func._schema.name.removeprefix("aten::")
    raise PlacerError(
        f"{like.parameter_name}.grad",
        f"is divided over ranks (\"shard_state\": 'gradients'), and {name} needs all of it",
        "to clip, call placed.clip_grad_norm_(max_norm) on every rank; to read it, call "
        ".grad.full_tensor() on all ranks that have the parameter",
    )
