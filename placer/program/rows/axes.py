"""Which dimensions of its inputs a function computes along."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

# Functions that compute along one dimension, or several: the position of that argument, and its default.
_ALONG: Mapping[str, tuple[int, Any]] = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "cumprod", "logcumsumexp"), (1, ())),
    **dict.fromkeys(("cummax", "cummin", "_fft_r2c", "_fft_c2c", "_fft_c2r"), (1, ())),
    **dict.fromkeys(("cumsum", "flip"), (1, None)),
    **dict.fromkeys(("sort", "argsort"), (1, -1)),
    **dict.fromkeys(("topk", "diff", "fft_fft", "fft_ifft", "fft_rfft", "fft_irfft"), (2, -1)),
    **dict.fromkeys(("fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2"), (2, (-2, -1))),
    **dict.fromkeys(("roll", "fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn"), (2, None)),
    "normalize": (2, 1),
    "renorm": (2, ()),
    "gumbel_softmax": (4, -1),
}
# Functions of the last two dimensions
_MATRICES = (
    "tril", "triu", "fill_diagonal_", "inverse", "cholesky", "matrix_exp", "linalg_inv", "linalg_solve",
    "linalg_qr", "linalg_svd", "linalg_eigh", "linalg_cholesky", "linalg_pinv", "linalg_matrix_exp",
)  # fmt: skip
_PRODUCTS = ("matmul", "__matmul__", "mm", "bmm")


def computes_along(
    node: fx.Node, module: nn.Module | None, name: str, rows: Mapping[fx.Node, tuple[int, int]]
) -> bool:
    """Does ``node`` compute along a dimension that has the rows of the batch?

    ``name`` is that of its function, or of the function or class of ``module``, which it calls. ``rows`` has
    for each input with rows their dimension, and the number of dimensions.
    """
    if name in _PRODUCTS or name == "einsum":
        return _contracts(node, name, rows)
    first = next((x for x in (*node.args[:1], node.kwargs.get("input")) if x in rows), None)
    if not isinstance(first, fx.Node):
        return False
    dim, rank = rows[first]
    if name in _ALONG:
        position, default = _ALONG[name]
        if name == "flip":
            given = node.kwargs.get("dims", node.args[1:])
        elif module is not None:
            given = getattr(module, "dim", None)
        else:
            several = argument(node, "dims", default, position=position)
            given = argument(node, "dim", several)
        return given is None or dim in [x % rank for x in flat(given) if isinstance(x, int)]
    return dim >= rank - _trailing(node, module, name, dim, rank)


def _trailing(node: fx.Node, module: nn.Module | None, name: str, dim: int, rank: int) -> int:
    """Along how many of its last dimensions a function computes."""
    if name in _MATRICES:
        return 2
    if found := re.fullmatch(r".*pool(\d)d.*", name, re.IGNORECASE):
        return int(found[1])
    if name in ("interpolate", "Upsample") or name.startswith("upsample_"):
        return rank - 2
    if name in ("layer_norm", "native_layer_norm", "rms_norm", "LayerNorm", "RMSNorm"):
        own = getattr(module, "normalized_shape", ())
        return len(
            flat(argument(node, "normalized_shape", own, position=1 if module is None else None))
        )
    if name in ("group_norm", "native_group_norm", "GroupNorm"):
        groups = argument(node, "num_groups", 1, position=1) if module is None else 1
        return rank - 2 if _is_per_row(groups, dim) else rank - 1
    if found := re.fullmatch(r"(?:conv|conv_transpose|Conv|ConvTranspose)(\d)d", name):
        own = int(found[1])
        groups = 1 if module is not None else argument(node, "groups", 1, position=6)
        return own if _is_per_row(groups, dim) else own + 1
    return 0


def _is_per_row(groups: Any, dim: int) -> bool:
    """Are channels of several rows in groups of their own, of which there are as many as the batch says?"""
    return dim == 1 and isinstance(groups, fx.Node)


def _contracts(node: fx.Node, name: str, rows: Mapping[fx.Node, tuple[int, int]]) -> bool:
    """Does a product sum over the rows?"""
    if name == "einsum":
        if not isinstance(node.args[0], str) or "..." in node.args[0]:
            return False
        terms, _, result = node.args[0].replace(" ", "").partition("->")
        factors = flat(node.args[1:])
        return any(
            x in rows and term[rows[x][0]] not in result
            for term, x in zip(terms.split(","), factors, strict=False)
            if result
        )
    left, right = ((rows.get(x) if isinstance(x, fx.Node) else None) for x in node.args[:2])
    if left is not None and left[0] == left[1] - 1:
        return True
    return right is not None and right[0] == max(right[1] - 2, 0)


def argument(node: fx.Node, name: str, default: Any, *, position: int | None = None) -> Any:
    """The argument ``name`` of the call ``node``, which may be given at ``position``."""
    for given in (name, "axis") if name == "dim" else (name,):  # torch takes numpy's name, too
        if given in node.kwargs:
            return node.kwargs[given]
    if position is not None and len(node.args) > position:
        return node.args[position]
    return default


def flat(value: Any) -> list[Any]:
    """The items of lists and tuples in ``value``, however deep."""
    if isinstance(value, tuple | list):
        return [item for part in value for item in flat(part)]
    return [value]
