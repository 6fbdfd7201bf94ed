"""Runs an operator that looks at neighbours, on the parts of the shards that this process has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from placer._torch import is_view, storage_key
from placer.space.exchange import Exchange, Pieces
from placer.space.layout import Box, Layout, Window, is_empty, meet, sizes
from placer.space.once import once_differentiable
from placer.space.operators import FIRST, Operator, chunks


@dataclass(frozen=True)
class Windows:
    """The parts in which an operator runs.

    ``inputs`` are the layouts of the tensors that are side by side along their channels, most often one;
    ``output`` is that of the result. Every part of the output is made in up to ``count`` chunks of planes,
    whose dimension is cut too.
    """

    operator: Operator
    inputs: tuple[Layout, ...]
    output: Layout
    count: int

    @cached_property
    def outputs(self) -> tuple[Box, ...]:
        """The spatial part of each shard's box of the output."""
        return tuple(box[FIRST:] for box in self.output.boxes)

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        """The window of each input."""
        wraps = self.operator.wraps
        return tuple(Window(layout, self._needed(layout), wraps) for layout in self.inputs)

    def _needed(self, layout: Layout) -> tuple[Box, ...]:
        front = layout.whole[:FIRST]
        return tuple(
            own if is_empty(out) else (*front, *self.operator.source(out))
            for own, out in zip(layout.boxes, self.outputs, strict=True)
        )

    def chunks(self, shard: int) -> list[Box]:
        """The chunks of a shard's part of the output; none if that is empty."""
        out = self.outputs[shard]
        dim = min(self.output.dims) - FIRST
        return [] if is_empty(out) else chunks(out, dim, self.count)


class RunWindowed(torch.autograd.Function):
    """An operator on the local shards. For backward it keeps their parts and the thin pieces of others.

    Only a chunk is padded at a time, in forward and in backward, and several inputs are only concatenated
    for a chunk. The tensors are, for each local shard, the parameters and then the inputs.
    """

    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, given: Windows, parameters: int, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        run = _Run(exchange, given, parameters, tensors)
        run.pieces = [run.fetch(window, k) for k, window in enumerate(given.windows)]
        ctx.exchange, ctx.given, ctx.parameters = exchange, given, parameters
        ctx.keys = [list(pieces) for pieces in run.pieces]
        kept = [piece for pieces in run.pieces for piece in pieces.values()]
        ctx.save_for_backward(*run.saved(kept))
        results = []
        for at, shard in enumerate(exchange.local):
            with exchange.at(shard):
                results.append(run.result(at))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        keys: list[list[tuple[int, int]]] = ctx.keys
        saved = list(ctx.saved_tensors)
        count = len(saved) - sum(map(len, keys))
        run = _Run(ctx.exchange, ctx.given, ctx.parameters, saved[:count])
        kept = iter(saved[count:])
        run.pieces = [{key: next(kept) for key in own} for own in keys]
        del saved, kept
        return None, None, None, *run.gradients(gradients, ctx.needs_input_grad[3:])


class _Run:
    """One run: the tensors of the local shards, and the pieces that they have of others, per input."""

    def __init__(
        self, exchange: Exchange, given: Windows, parameters: int, tensors: Sequence[Tensor | None]
    ) -> None:
        self.exchange, self.given = exchange, given
        width = parameters + len(given.inputs)
        rows = [tensors[i : i + width] for i in range(0, len(tensors), width)]
        self.parameters = [row[:parameters] for row in rows]
        self.inputs: list[list[Tensor]] = [list(row[parameters:]) for row in rows]  # type: ignore[arg-type]
        self.pieces: list[Pieces] = []

    def saved(self, pieces: Sequence[Tensor]) -> list[Tensor | None]:
        """What backward needs: all tensors, or their shapes, where the operator is linear in its input."""
        rows = zip(self.parameters, self.inputs, strict=True)
        tensors = [x for row in rows for own in row for x in own]
        if not self.given.operator.is_linear:
            return [*tensors, *pieces]
        return [x if x is None else x.new_zeros(()).expand(x.shape) for x in (*tensors, *pieces)]

    def fetch(self, window: Window, number: int) -> Pieces:
        """What the local shards need of others of input ``number``."""
        own = dict(zip(self.exchange.local, (row[number] for row in self.inputs), strict=True))
        boxes = window.layout.boxes
        given = {
            (source, target): cut(own[source], box, boxes[source]).contiguous()
            for (source, target), box in window.pieces.items()
            if source in own
        }
        like = self.inputs[0][number]
        wanted = {key: _shape(box, like) for key, box in window.pieces.items() if key[1] in own}
        return self.exchange.swap(given, wanted, like)

    def result(self, at: int) -> Tensor:
        """The part of the output of local shard number ``at``."""
        shard, given = self.exchange.local[at], self.given
        box, result = given.outputs[shard], None
        parts = given.chunks(shard)
        for part in parts:
            made = given.operator.run(self._padded(at, part), part, self.parameters[at])
            if len(parts) == 1:
                if any(storage_key(made) == storage_key(x) for x in self.inputs[at]):
                    return made.clone(memory_format=torch.contiguous_format)
                made = made.contiguous()
                # No view: those of a function with several results must not be changed in place.
                return torch.ops.aten._unsafe_view(made, made.shape) if is_view(made) else made
            if result is None:
                result = made.new_empty((*made.shape[:FIRST], *sizes(box)))
            cut_spatial(result, part, box).copy_(made)
            del made
        if result is None:  # an empty part
            x = self.inputs[at][0]
            shape = (x.size(0), *sizes(given.output.boxes[shard])[1:])
            result = x.new_empty(shape)
        return result

    def _padded(self, at: int, part: Box) -> Tensor:
        """What the chunk ``part`` of the output reads: all inputs side by side, with padding."""
        source = self.given.operator.source(part)
        shard = self.exchange.local[at]
        made = [
            _assemble(window, shard, x, pieces, source, self.given.operator.fill)
            for window, x, pieces in zip(
                self.given.windows, self.inputs[at], self.pieces, strict=True
            )
        ]
        return made[0] if len(made) == 1 else torch.cat(made, 1)

    def gradients(
        self, gradients: Sequence[Tensor], needed: Sequence[bool]
    ) -> Iterator[Tensor | None]:
        """The gradients of all tensors, in their order."""
        given, local = self.given, self.exchange.local
        width = len(self.parameters[0]) + len(given.inputs)
        wanted = [any(needed[i::width]) for i in range(width)]
        of_inputs = wanted[len(self.parameters[0]) :]
        asked = [any(of_inputs), *wanted[: len(self.parameters[0])]]
        found: list[list[Tensor | None]] = []
        back: list[Pieces] = [{} for _ in given.inputs]
        for at, (shard, dy) in enumerate(zip(local, gradients, strict=True)):
            sums: list[Tensor | None] = [None] * len(self.parameters[at])
            parts = given.chunks(shard)
            own: list[Tensor | None] = [None] * len(given.inputs)
            for part in parts:
                x = self._padded(at, part)
                dy_part = cut_spatial(dy, part, given.outputs[shard])
                with self.exchange.at(shard):
                    dx, others = given.operator.gradients(
                        dy_part, x, part, self.parameters[at], asked
                    )
                del x
                sums = [_added(a, b) for a, b in zip(sums, others, strict=True)]
                alone = len(parts) == len(own) == 1 and self._is_own(part, shard)
                if dx is not None and alone and storage_key(dx) != storage_key(dy):
                    own = [dx]  # neither padded nor cut: no neighbour reads, or is read
                elif dx is not None:
                    self._scatter(dx, at, part, own, back, of_inputs)
                del dx, others
            found.append([*sums, *self._or_zeros(own, at, of_inputs)])
        for number, window in enumerate(given.windows):
            if of_inputs[number]:
                column = [row[len(self.parameters[0]) + number] for row in found]
                self._return(window, back[number], column, self.inputs[0][number])
        return (gradient for row in found for gradient in row)

    def _or_zeros(
        self, totals: Sequence[Tensor | None], at: int, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        return [
            torch.zeros_like(x) if is_wanted and total is None else total
            for x, total, is_wanted in zip(self.inputs[at], totals, wanted, strict=True)
        ]

    def _is_own(self, part: Box, shard: int) -> bool:
        """Does the part of the output read just the shard's own part of the only input?"""
        return self.given.operator.source(part) == self.given.inputs[0].boxes[shard][FIRST:]

    def _scatter(
        self,
        dx: Tensor,
        at: int,
        part: Box,
        own: list[Tensor | None],
        back: Sequence[Pieces],
        wanted: Sequence[bool],
    ) -> None:
        """Add the gradient of what a chunk read to the shard's own part, and to the pieces of others."""
        shard, source = self.exchange.local[at], self.given.operator.source(part)
        channels = [layout.shape[1] for layout in self.given.inputs]
        for number, of_input in enumerate(dx.split(channels, 1)):
            if not wanted[number]:
                continue
            x, window = self.inputs[at][number], self.given.windows[number]
            box = window.layout.boxes[shard][FIRST:]
            mine = meet(source, box)
            if own[number] is None and mine == box:  # a copy is faster than a sum with zeros
                made = torch.empty_like(x, memory_format=torch.contiguous_format)
                own[number] = made.copy_(cut_spatial(of_input, box, source))
            elif not is_empty(mine):
                if (total := own[number]) is None:
                    total = own[number] = torch.zeros_like(x)
                cut_spatial(total, mine, box).add_(cut_spatial(of_input, mine, source))
            for (sender, target), piece in window.images.items():
                there = meet(source, piece[FIRST:])
                if target != shard or is_empty(there):
                    continue
                key = (shard, sender)
                if key not in back[number]:
                    back[number][key] = x.new_zeros(_shape(piece, x))
                cut_spatial(back[number][key], there, piece[FIRST:]).add_(
                    cut_spatial(of_input, there, source)
                )

    def _return(
        self, window: Window, back: Pieces, totals: Sequence[Tensor | None], like: Tensor
    ) -> None:
        """Send the gradients of pieces back to the shards that they came from, which add them."""
        local = self.exchange.local
        wanted = {
            (target, source): _shape(box, like)
            for (source, target), box in window.pieces.items()
            if source in local
        }
        for target, source in window.pieces:  # also what no chunk has read
            if source in local and (source, target) not in back:
                piece = window.pieces[target, source]
                back[source, target] = like.new_zeros(_shape(piece, like))
        for (target, source), came in self.exchange.swap(back, wanted, like).items():
            total = totals[local.index(source)]
            assert total is not None
            box = window.layout.boxes[source]
            cut(total, window.pieces[source, target], box).add_(came)


def cut(x: Tensor, box: Box, within: Box) -> Tensor:
    """The part ``box`` of ``x``, which is the part ``within`` of a value: a view."""
    for dim, ((first, end), (start, last)) in enumerate(zip(box, within, strict=True)):
        if (first, end) != (start, last):
            x = x.narrow(dim, first - start, end - first)
    return x


def _shape(box: Box, like: Tensor) -> tuple[int, ...]:
    """The shape of a piece, with the rows and channels of ``like``."""
    return (*like.shape[:FIRST], *sizes(box)[FIRST:])


def cut_spatial(x: Tensor, box: Box, within: Box) -> Tensor:
    """`cut` of the spatial dimensions."""
    front: Box = tuple((0, length) for length in x.shape[:FIRST])
    return cut(x, (*front, *box), (*front, *within))


def _assemble(
    window: Window, shard: int, x: Tensor, pieces: Mapping[Any, Tensor], source: Box, fill: float
) -> Tensor:
    """The spatial part ``source`` of a value for a shard: its own part, pieces, and ``fill`` outside."""
    box: Box = (*window.layout.whole[:FIRST], *source)
    own = window.layout.boxes[shard]
    if box == own:
        return x
    inside = meet(box, window.layout.whole)
    alone = inside == meet(box, own) and not (window.wraps and inside != box)
    if alone and not is_empty(inside):  # all that is read is here
        x = cut(x, inside, own)
        if inside == box:
            return x
        padding = [
            n
            for (a, b), (c, d) in zip(reversed(box), reversed(inside), strict=True)
            for n in (c - a, b - d)
        ]
        return torch.nn.functional.pad(x, padding[: -2 * FIRST], value=fill)
    shape = (*x.shape[:FIRST], *sizes(source))
    made = x.new_full(shape, fill) if inside != box else x.new_empty(shape)
    if not is_empty(mine := meet(box, own)):
        cut(made, mine, box).copy_(cut(x, mine, own))
    for (sender, target), piece in pieces.items():
        if target == shard:
            at = window.images[sender, target]
            if not is_empty(there := meet(box, at)):
                cut(made, there, box).copy_(cut(piece, there, at))
    return made


def _added(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    return more if total is None else total if more is None else total.add_(more)


def needs_no_window(given: Windows) -> bool:
    """Does the operator run on the parts as they are, without padding in any dimension?"""
    return (
        len(given.inputs) == 1
        and given.windows[0].is_local
        and not any(map(is_empty, given.output.boxes))
    )
