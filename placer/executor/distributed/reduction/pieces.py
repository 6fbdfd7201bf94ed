"""Updates each parameter in pieces, one on each rank that has it, which has optimizer state for its piece.

This is the first stage of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054). While an optimizer steps, every
parameter is this rank's piece of it, and so is its gradient; then all ranks gather the weights::

    rank 0   p[0:4]  p.grad[0:4]  ──►  optimizer.step()  ──┐
    rank 1   p[4:8]  p.grad[4:8]  ──►  optimizer.step()  ──┴──►  p on both, from their pieces

The optimizer is the user's own, over the parameters themselves: it makes state like what it sees. Outside of
its step nothing differs. Gradients are whole on every rank, because code that reads, clips or scales them
must see what it sees in one process. So they are summed as without pieces, and gathering the weights comes
on top, with half the bytes of that sum. To scatter the sums would save as much, but each rank would be left
with a piece of every gradient: that is another value of ``shard_state``, "gradients" (`GradientReducer`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from placer.errors import PlacerError
from placer.executor.distributed.reduction.gradient_piece import piece_of_gradient
from placer.executor.distributed.reduction.gradients import SharedParameter, bucketed
from placer.executor.distributed.reduction.summing import gather_pieces, padded
from placer.state_layout import piece_length, piece_of

State = MutableMapping[Any, MutableMapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Whole:
    """A parameter's weights and gradient while the parameter is a piece."""

    weights: Tensor
    gradient: Tensor


class Pieces:
    """This rank's pieces of the parameters whose training state it shares with other ranks."""

    def __init__(self, shared: Iterable[SharedParameter]) -> None:
        found = [s for s in shared if s.sharing.size > 1 and s.parameter.numel()]
        # In an order that is the same for all ranks of a group.
        self.shared = {id(s.parameter): s for members in bucketed(found) for s in members}
        self._wholes: dict[int, _Whole] = {}  # by the id of the parameter, while an optimizer steps

    def own(self, parameter: Tensor) -> slice | None:
        """The elements that this rank updates, in row-major order; None if it is all of them."""
        shared = self.shared.get(id(parameter))
        if shared is None:
            return None
        return piece_of(self._whole(parameter).numel(), shared.sharing.rank, shared.sharing.size)

    def require_whole(self) -> None:
        """Raise ``PlacerError`` if an optimizer's step has failed, so that weights are pieces still."""
        if self._wholes:
            raise PlacerError(
                "optimizer.step()",
                "has failed before, so every rank has new weights for its own pieces only",
                "load the last checkpoint in a new job",
            )

    @contextmanager
    def updating(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """In this block ``parameters`` are pieces; at its end the ranks that share them gather them."""
        self.begin(parameters, {})
        yield
        self.end()

    @torch.no_grad()
    def begin(self, parameters: Iterable[nn.Parameter], state: State) -> None:
        """Make pieces of ``parameters`` that have gradients, of these, and of their optimizer's ``state``.

        A parameter of which this rank has no piece has no gradient then, so optimizers skip it.
        """
        self.require_whole()
        for parameter in parameters:
            own, gradient = self.own(parameter), parameter.grad
            if own is None or gradient is None:
                continue
            self.cut_state(parameter, state)
            self._wholes[id(parameter)] = _Whole(parameter.data, gradient)
            parameter.grad = None
            if own.start == own.stop:
                continue
            piece = piece_of_gradient(gradient, own)
            if parameter.numel() > 1:
                parameter.data = parameter.data.reshape(-1)[own]
            parameter.grad = piece.view(parameter.shape)

    @torch.no_grad()
    def end(self) -> None:
        """Gather the updated pieces, and give parameters their whole weights and gradients again."""
        updated = [self.shared[key] for key in self.shared if key in self._wholes]
        pieces = {id(shared.parameter): self._updated(shared.parameter) for shared in updated}
        for shared in updated:
            shared.parameter.grad = None
            shared.parameter.data = self._whole(shared.parameter)
        for members in bucketed(updated):
            self._gather(members, [pieces[id(shared.parameter)] for shared in members])
        for shared in updated:
            shared.parameter.grad = self._wholes.pop(id(shared.parameter)).gradient
            increment_version(shared.parameter)  # also on ranks that have updated nothing

    def cut_state(self, parameter: Tensor, state: State) -> None:
        """Cut what ``state`` has of the whole ``parameter``, because it was loaded or made before a step."""
        own = self.own(parameter)
        if own is None or parameter not in state:
            return
        if own.start == own.stop:
            del state[parameter]
            return
        for key, value in state[parameter].items():
            state[parameter][key] = self.cut(parameter, value)

    def cut(self, parameter: Tensor, value: Any) -> Any:
        """This rank's piece of ``value`` if that has the shape of ``parameter``, else ``value`` itself."""
        own, whole = self.own(parameter), self._whole(parameter)
        is_whole = isinstance(value, Tensor) and value.shape == whole.shape and whole.numel() > 1
        return value.reshape(-1)[own].clone() if is_whole and own is not None else value

    def is_piece(self, parameter: Tensor, value: Any) -> bool:
        """Is ``value``, state of an optimizer, this rank's piece of a tensor like ``parameter``?"""
        own = self.own(parameter)
        is_row = isinstance(value, Tensor) and value.dim() == 1 and parameter.numel() > 1
        return own is not None and is_row and len(value) == own.stop - own.start

    def gather(self, parameter: Tensor, piece: Tensor) -> Tensor:
        """The whole of a tensor of the shape of ``parameter``; all ranks of its group call this together."""
        return gather_pieces(piece, parameter.shape, self.shared[id(parameter)].sharing)

    def _whole(self, parameter: Tensor) -> Tensor:
        held = self._wholes.get(id(parameter))
        return parameter if held is None else held.weights

    def _gather(self, members: Sequence[SharedParameter], own: Sequence[Tensor]) -> None:
        """Gather the weights of ``members``, which are one bucket, from each rank's ``own`` pieces."""
        group = members[0].sharing
        wholes = [m.parameter.data for m in members]
        lengths = [piece_length(whole.numel(), group.size) for whole in wholes]
        first = wholes[0]
        if len(members) == 1 and first.is_contiguous() and first.numel() % group.size == 0:
            group.start_gather(first.view(-1), own[0])()
            return
        part = torch.cat([padded(piece, n) for piece, n in zip(own, lengths, strict=True)])
        gathered = part.new_empty(group.size, len(part))
        group.start_gather(gathered.view(-1), part)()
        for whole, piece in zip(wholes, gathered.split(lengths, dim=1), strict=True):
            whole.copy_(piece.reshape(-1)[: whole.numel()].view(whole.shape))

    def _updated(self, parameter: nn.Parameter) -> Tensor:
        """This rank's piece of the weights of ``parameter``, which is a piece unless it has one element."""
        own, whole = self.own(parameter), self._whole(parameter)
        assert own is not None
        is_cut = own.start < own.stop and whole.numel() > 1
        return parameter.data if is_cut else parameter.data.reshape(-1)[own]
