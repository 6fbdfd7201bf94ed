"""Rules for what takes a part of a value by position, and for padding."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any

from torch import Tensor, fx

from placer._torch import storage_key
from placer.space.call import Call, Local, Replace, Rule
from placer.space.layout import Layout, is_empty
from placer.space.nodes import RunInWindows
from placer.space.operators import FIRST, Take
from placer.space.windowed import Windows

_MODES = {"Reflection": "reflect", "Replication": "replicate", "Circular": "circular"}
_CUT = "it takes a part of a dimension that is cut, by what is not fixed"


def item(call: Call) -> Rule:
    """An item of a tuple whose tensors are cut, or a part of a tensor: slices and positions."""
    source, given = call.node.args[:2]
    layout = call.layouts.get(source)  # type: ignore[arg-type]
    if layout is None:
        return "what it takes from is not cut"
    if isinstance(call.values[source], tuple | list):  # type: ignore[index]
        return Local(layout.dims)
    rank = len(layout.shape)
    index: list[Any] = list(given) if isinstance(given, tuple) else [given]
    if not all(_is_plain(call, each) for each in index):
        return "it takes elements by a tensor or a list"
    if Ellipsis not in index:
        index.append(Ellipsis)
    at = index.index(Ellipsis)
    full = slice(None)
    index[at : at + 1] = [full] * (rank - sum(x is not None for x in index) + 1)
    dims, dim, made, spans = [], 0, 0, []
    for each in index:
        if each is not None:
            if isinstance(each, slice):
                if dim in layout.dims:
                    dims.append(made)
                spans.append(each)
            elif dim in layout.dims:
                return "it takes one position of a dimension that is cut"
            dim += 1
        made += each is None or isinstance(each, slice)
    if len(spans) == len(index) == rank:
        return _slices(call, layout, spans)
    kept = [
        d for d, each in enumerate(x for x in index if x is not None) if isinstance(each, slice)
    ]
    of_dim = dict(zip(kept, spans, strict=True))
    if not all(
        _span(call, of_dim[d], layout.shape[d]) == (0, layout.shape[d], 1) for d in layout.dims
    ):
        return "it also adds or removes dimensions"
    return Local(tuple(dims))


def _is_plain(call: Call, each: Any) -> bool:
    if isinstance(each, fx.Node):
        each = call.values[each]
    return each is None or type(each) in (int, slice, EllipsisType)


def _span(call: Call, given: slice, length: int) -> tuple[int, int, int] | None:
    """First position, end and step of a slice; None if they are not the same in every call."""
    bounds = (given.start, given.stop, given.step)
    if not call.is_fixed(bounds):
        return None
    return slice(*(call.values[x] if isinstance(x, fx.Node) else x for x in bounds)).indices(length)


def _slices(call: Call, layout: Layout, spans: list[slice]) -> Rule:
    """One slice per dimension."""
    known = [_span(call, each, n) for each, n in zip(spans, layout.shape, strict=True)]
    full = [(0, n, 1) == own for n, own in zip(layout.shape, known, strict=True)]
    if all(full[dim] for dim in layout.dims):
        return Local(layout.dims)
    if not all(full[:FIRST]):
        return "it also takes some rows or channels"
    found = [own for own in known if own is not None]
    if len(found) < len(known):
        return _CUT
    return _take(call, layout, [own[0] for own in found], [own[2] for own in found])


def narrow(call: Call) -> Rule:
    (layout,) = call.layouts.values()
    dim = call.argument(1, "dim") % len(layout.shape)
    if dim not in layout.dims:
        return Local(layout.dims)
    start = call.argument(2, "start")
    if not call.is_fixed([x for x in call.inputs if x not in call.layouts]):
        return _CUT
    first = [0] * len(layout.shape)
    first[dim] = start % layout.shape[dim] if start < 0 else start
    return _take(call, layout, first, [1] * len(first))


def pad(call: Call) -> Rule:
    """`torch.nn.functional.pad`, and its layers."""
    (layout,) = call.layouts.values()
    rank = len(layout.shape)
    if call.module is not None:
        own: Any = call.module
        given, value = own.padding, getattr(own, "value", 0.0)
        mode = _MODES.get(call.name.partition("Pad")[0], "constant")
    else:
        given, value = call.argument(1, "pad"), call.argument(3, "value") or 0.0
        mode = call.argument(2, "mode", "constant")
        if not call.is_fixed([x for x in call.inputs if x not in call.layouts]):
            return "its padding is not fixed"
    amounts = [(0, 0)] * (rank - len(given) // 2)
    amounts += [(given[i], given[i + 1]) for i in range(len(given) - 2, -1, -2)]
    if not any(any(amounts[dim]) for dim in layout.dims):
        if mode == "constant" or not any(map(is_empty, layout.boxes)):
            return Local(layout.dims)
        return "some parts are empty"
    if any(map(any, amounts[:FIRST])):
        return "it also pads rows or channels"
    if mode != "constant" and min(map(min, amounts)) < 0:
        return "it also takes positions away"
    return _taken(call, padded(layout, amounts, mode, call.count, value))


def padded(
    layout: Layout, amounts: Sequence[tuple[int, int]], mode: str, count: int, value: float = 0.0
) -> Windows | str:
    """Windows that pad every dimension before and after, or why there are none."""
    wraps = layout.dims if mode == "circular" else ()
    lengths = tuple(
        length + before + after
        for length, (before, after) in zip(layout.shape, amounts, strict=True)
    )
    first = [-before for before, _ in amounts]
    return _windows(
        layout, lengths, first, [1] * len(lengths), count, mode=mode, fill=value, wraps=wraps
    )


def _windows(
    layout: Layout,
    shape: tuple[int, ...],
    first: Sequence[int],
    step: Sequence[int],
    count: int,
    **options: Any,
) -> Windows | str:
    if min(layout.dims) < FIRST:
        return "its rows or channels are cut"
    lengths = layout.shape[FIRST:]
    operator = Take(lengths, tuple(first[FIRST:]), tuple(step[FIRST:]), **options)
    windows = Windows(operator, (layout,), Layout(layout.cuts, shape, layout.dims), count)
    if not windows.windows[0].is_simple:
        return "parts are thinner than what its padding takes of the other end"
    return windows


def _take(call: Call, layout: Layout, first: list[int], step: list[int]) -> Rule:
    return _taken(call, _windows(layout, tuple(call.result.shape), first, step, call.count))


def _taken(call: Call, windows: Windows | str) -> Rule:
    if isinstance(windows, str):
        return windows
    source = next(node for node in call.inputs if node in call.layouts)
    is_view = storage_key(call.result) == storage_key(call.values[source])
    if call.is_shared and is_view:  # in parts it is a copy
        return "it shares memory that is written"
    return Replace(RunInWindows(windows), (source,), dims=windows.output.dims)


def select(call: Call) -> Rule:
    """One position of a dimension that is not cut; the dimension is gone."""
    (layout,) = call.layouts.values()
    dim = call.argument(1, "dim") % len(layout.shape)
    if dim in layout.dims:
        return "it takes one position of a dimension that is cut"
    return Local(tuple(d - (d > dim) for d in layout.dims))


def squeeze(call: Call) -> Rule:
    (layout,) = call.layouts.values()
    dim = call.argument(1, "dim")
    if not isinstance(dim, int):
        return "its dimension is not given"
    if call.result.dim() == len(layout.shape):
        return Local(layout.dims)
    return select(call)


def unsqueeze(call: Call) -> Rule:
    (layout,) = call.layouts.values()
    dim = call.argument(1, "dim") % (len(layout.shape) + 1)
    return Local(tuple(d + (d >= dim) for d in layout.dims))


def stack(call: Call) -> Rule:
    """Tensors that are all cut alike."""
    result = call.result
    dims = {layout.dims for layout in call.layouts.values()}
    if len(dims) != 1 or len(call.layouts) < len(call.inputs) or not isinstance(result, Tensor):
        return "its inputs are cut in different ways"
    dim = call.argument(1, "dim", 0) % result.dim()
    return Local(tuple(d + (d >= dim) for d in next(iter(dims))))
