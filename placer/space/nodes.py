"""What stands in the graph of a program whose values are cut: callables for `placer.space.rewrite`.

Every one is called with the arguments of a shard. Where a process runs several shards, the emitted code calls
``together`` with those of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from placer.errors import PlacerError
from placer.program import must_stay_whole
from placer.space.exchange import Exchange, current_exchange
from placer.space.layout import Layout
from placer.space.norms import Groups, Normalize, update_running
from placer.space.reductions import Extreme, Variance
from placer.space.whole import Cut, Gather, Spread, Total
from placer.space.windowed import RunWindowed, Windows

Arguments: TypeAlias = Sequence[Sequence[Any]]
"""The arguments of each local shard."""


class InSpace:
    """An operation over the shards of a stage.

    ``is_whole`` says whether the result is one value per process, not one part per shard. ``layout`` has the
    parts of its input or result.
    """

    is_whole = False
    layout: Layout

    def together(self, exchange: Exchange, arguments: Arguments) -> Sequence[Any]:
        """The results, one per local shard, or a single whole one."""
        raise NotImplementedError

    def __call__(self, *arguments: Any) -> Any:
        tensor = next((x for x in arguments if isinstance(x, Tensor)), None)
        exchange = current_exchange(self.layout.cuts.shards, self.likely, tensor)
        return self.together(exchange, [arguments])[0]

    @property
    def likely(self) -> int:
        """The shard that is run where only one is, on fake tensors: one in the middle of the grid."""
        return self.layout.cuts.middle

    @property
    def name(self) -> str:
        """The name of the operation in generated code."""
        return type(self).__name__.lower()

    def __getattr__(self, name: str) -> Any:
        if name in ("__name__", "__qualname__"):  # fx writes functions by it
            return self.name
        raise AttributeError(name)


@dataclass(frozen=True)
class CutWhole(InSpace):
    """Cuts a whole value into ``layout``; of an input, a process may be given its own part instead."""

    layout: Layout

    def together(self, exchange: Exchange, arguments: Arguments) -> Sequence[Any]:
        x: Tensor = arguments[0][0]
        whole = self.layout.shape_of(self.layout.whole, x.shape)
        if x.shape != whole:
            return [x]
        return Cut.apply(exchange, self.layout, arguments[0][0])  # type: ignore[no-any-return]


@dataclass(frozen=True)
class GatherParts(InSpace):
    """Puts the parts of a value together, because ``reader`` has no rule for parts: ``reason``.

    Both are empty for a result of the model.
    """

    layout: Layout
    reader: str = ""
    reason: str = ""
    is_whole = True

    def together(self, exchange: Exchange, arguments: Arguments) -> Sequence[Any]:
        return [Gather.apply(exchange, self.layout, *(x for (x,) in arguments))]


@dataclass(frozen=True)
class SpreadWhole(InSpace):
    """Copies a whole value to every shard's device; ``layout`` is that of what it is used with."""

    layout: Layout

    def together(self, exchange: Exchange, arguments: Arguments) -> Sequence[Any]:
        value = arguments[0][0]
        return [value] if len(exchange.local) == 1 else Spread.apply(exchange, value)


@dataclass(frozen=True)
class RunInWindows(InSpace):
    """An operator in windows. ``takes`` says what comes before its inputs.

    That is "module", the layer with its weight and bias, "tensors", these two themselves, or nothing, "".
    """

    windows: Windows
    takes: str = ""

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        return self.windows.output

    def together(self, exchange: Exchange, arguments: Arguments) -> Sequence[Any]:
        if exchange.shards == 1 and self.takes == "module" and must_stay_whole(arguments[0][0]):
            module, *inputs = arguments[0]
            return [module(torch.cat(inputs, 1))]  # its hooks came after it was placed
        rows = [self._row(own) for own in arguments]
        kind = rows[0][-1].device.type
        if not torch.is_autocast_enabled(kind) or not self.takes:
            return self._run(exchange, rows)
        dtype = torch.get_autocast_dtype(kind)  # cast here, so that what is sent and kept is cast
        cast = [[_cast(x, dtype) for x in row] for row in rows]
        with torch.autocast(kind, enabled=False):
            return self._run(exchange, cast)

    def _row(self, arguments: Sequence[Any]) -> list[Any]:
        if self.takes != "module":
            return list(arguments)
        module, *inputs = arguments
        _refuse_hooks(module)
        return [module.weight, module.bias, *inputs]

    def _run(self, exchange: Exchange, rows: Sequence[Sequence[Any]]) -> Sequence[Any]:
        parameters = len(rows[0]) - len(self.windows.inputs)
        flat = [x for row in rows for x in row]
        return RunWindowed.apply(exchange, self.windows, parameters, *flat)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class NormalizeParts(InSpace):
    """A batch, instance or group norm, called with the layer and a part of its input.

    With ``eps`` it is called with weight and bias instead of the layer, and has no running statistics.
    """

    groups: Groups
    is_group_norm: bool
    eps: float | None = None

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        return self.groups.layout

    def together(self, exchange: Exchange, arguments: Arguments) -> Sequence[Any]:
        flat = []
        for *layer, x in arguments:
            if self.eps is None:
                _refuse_hooks(layer[0])
                layer = [layer[0].weight, layer[0].bias]
            flat += [*layer, x]
        first = arguments[0][0]
        eps = first.eps if self.eps is None else self.eps
        kind = flat[2].device.type
        if self.is_group_norm and kind != "cpu" and torch.is_autocast_enabled(kind):
            flat = [_cast(x, torch.float32) for x in flat]  # as autocast does for this norm
        counts = self.groups.counts(flat[2].size(0))
        is_batch_norm = self.groups.number is None and self.eps is None
        if is_batch_norm:
            exchange, counts = exchange.of_batch_norms(counts)
        with torch.autocast(kind, enabled=False):
            mean, var, *results = Normalize.apply(exchange, self.groups, counts, eps, *flat)
        if is_batch_norm:
            update_running(first, mean, var, sum(counts))
        parts: Sequence[Any] = results
        return parts


@dataclass(frozen=True)
class SumParts(InSpace):
    """The sum, or the mean, of a value over ``dims``, all cut ones among them.

    ``kind`` is what forward calls: "sum", "mean", or an adaptive pool.
    """

    layout: Layout
    dims: tuple[int, ...]
    keepdim: bool
    kind: str
    is_whole = True

    def together(self, exchange: Exchange, arguments: Arguments) -> Sequence[Any]:
        first: Tensor = arguments[0][0]
        # Half precision overflows before a mean is one.
        wide = torch.promote_types(first.dtype, torch.float32)
        parts = [x.sum(self.dims, keepdim=self.keepdim, dtype=wide) for (x,) in arguments]
        total = Total.apply(exchange, *parts)
        shape = self.layout.shape_of(self.layout.whole, first.shape)
        count = math.prod(shape[dim] for dim in self.dims)
        found = total if self.kind == "sum" else total / count
        return [found.to(self._dtype(first))]

    def _dtype(self, x: Tensor) -> torch.dtype:
        """The data type of the result, which autocast may choose."""
        if not torch.is_autocast_enabled(x.device.type):
            return x.dtype
        one = x.detach().new_zeros((1,) * x.dim())
        if self.kind in ("sum", "mean"):
            return (one.sum(0) if self.kind == "sum" else one.mean(0)).dtype
        made: Tensor = getattr(F, self.kind)(one, 1)
        return made.dtype


@dataclass(frozen=True)
class ReduceParts(InSpace):
    """The "amax", "amin", "var" or "std" (``kind``) of a value over ``dims``, all cut ones among them."""

    layout: Layout
    dims: tuple[int, ...]
    keepdim: bool
    kind: str
    correction: float = 1
    is_whole = True

    def together(self, exchange: Exchange, arguments: Arguments) -> Sequence[Any]:
        parts = [x for (x,) in arguments]
        if self.kind in ("amax", "amin"):
            found = Extreme.apply(exchange, self.dims, self.kind, *parts)
        else:
            wide = torch.promote_types(parts[0].dtype, torch.float32)
            shapes = [self.layout.shape_of(box, parts[0].shape) for box in self.layout.boxes]
            counts = [math.prod(shape[d] for d in self.dims) for shape in shapes]
            of_wide = [x.to(wide) for x in parts]
            is_std = self.kind == "std"
            found = Variance.apply(exchange, self.dims, counts, self.correction, is_std, *of_wide)
            found = found.to(parts[0].dtype)
        return [found if self.keepdim else found.squeeze(self.dims)]


@dataclass(frozen=True)
class LossOfParts(InSpace):
    """A loss of torch.nn.functional, called with parts of its input, in ``layout``, and of its target.

    With the reduction "mean" the sum is divided by the number of elements of the input, or of the targets
    that are not ``ignored``, if these are classes.
    """

    layout: Layout
    function: Callable[..., Tensor]
    options: tuple[tuple[str, Any], ...]
    is_mean: bool
    ignored: int | None
    is_whole = True

    def together(self, exchange: Exchange, arguments: Arguments) -> Sequence[Any]:
        options: dict[str, Any] = {**dict(self.options), "reduction": "sum"}
        first: Tensor = arguments[0][0]
        wide = torch.promote_types(first.dtype, torch.float32)  # half precision would overflow
        sums = [self.function(x.to(wide), target, **options) for x, target in arguments]
        total = Total.apply(exchange, *sums)
        if self.is_mean and self.ignored is None:
            shape = self.layout.shape_of(self.layout.whole, first.shape)
            total = total / math.prod(shape)
        elif self.is_mean:
            counts = [(target != self.ignored).sum() for _, target in arguments]
            total = total / exchange.sum(counts)[0]
        # Autocast computes losses in float32.
        return [total if torch.is_autocast_enabled(first.device.type) else total.to(first.dtype)]


@dataclass(frozen=True)
class WholeShape(InSpace):
    """The shape of a whole value, of whose parts each shard has one."""

    layout: Layout
    is_whole = True

    def together(self, exchange: Exchange, arguments: Arguments) -> Sequence[Any]:
        shape = arguments[0][0].shape
        return [torch.Size(self.layout.shape_of(self.layout.whole, shape))]


def _refuse_hooks(module: Any) -> None:
    if must_stay_whole(module):
        raise PlacerError(
            f"layer {type(module).__name__}({module.extra_repr()})",
            "has hooks or parametrizations that were added after it was placed, and runs in parts",
            "add them before placer.compile, which then keeps the layer whole",
        )


def _cast(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """``x`` as autocast to ``dtype`` makes it, which leaves float64 alone."""
    return x if x is None or x.dtype == torch.float64 else x.to(dtype)
