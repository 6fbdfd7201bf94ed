"""Values that a program reads in every call besides the call's tensors: tensors of the state, numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor, nn

from placer.emit import StagedModel
from placer.errors import CaptureError, PlacerError
from placer.program import StateInput, example_numbers


class CallState:
    """The state that a call of ``model`` reads, read once before any slice of the batch runs.

    What ``model``, a rank's part, lacks is read from ``whole``.
    ``leaves`` are those of the call's arguments by name; where one is missing, as in a dry run, it is the
    example's. ``sizes`` are the numbers of rows of the slices, and ``cut`` replaces tensors with a graph.
    """

    def __init__(
        self,
        model: nn.Module,
        leaves: Mapping[str, Any],
        sizes: Sequence[int],
        cut: Callable[[Any], Any] = lambda value: value,
        whole: nn.Module | None = None,
    ) -> None:
        self._models = [model] if whole is None else [model, whole]
        self._leaves = leaves
        self._sizes = sizes
        self._cut = cut
        self._values: dict[tuple[Any, ...], Sequence[Any]] = {}

    def inputs(
        self,
        staged: StagedModel,
        slice_: Sequence[Tensor],
        position: int,
        needed: Collection[str] | None = None,
    ) -> dict[str, Any]:
        """The inputs of ``staged`` by name, or those that are ``needed``, for the slice at ``position``."""
        names = staged.graph_inputs if needed is None else needed
        found = dict(zip(staged.graph_inputs, slice_, strict=False))
        for name, each in zip(staged.graph_inputs[len(slice_) :], staged.state, strict=True):
            if name in names:
                found[name] = self._of(each, staged, position)
        return {name: value for name, value in found.items() if name in names}

    def _of(self, each: StateInput, staged: StagedModel, position: int) -> Any:
        key = each.path, each.argument, id(each.variable), id(each.tensor)
        if key not in self._values:
            self._values[key] = self._slices(each, staged)
        return self._values[key][position]

    def _slices(self, each: StateInput, staged: StagedModel) -> Sequence[Any]:
        leaves = {**example_numbers(staged.call), **self._leaves}
        found = (each.read(model, leaves) for model in self._models)
        value = self._cut(next((value for value in found if value is not None), None))
        if value is None:
            raise PlacerError(
                each.name,
                f"is not the {'tensor' if each.kind is Tensor else 'number'} that forward reads there",
                "call the placed model in the state in which it was captured, or place it again",
            )
        if each.batch_dim is None or len(self._sizes) == 1:
            return [value] * len(self._sizes)
        slices: Sequence[Any] = value.split(list(self._sizes), each.batch_dim)
        return slices


def refuse_kept_on_some_ranks(staged: StagedModel) -> None:
    """Raise ``PlacerError`` if forward reads what calls leave on some ranks only.

    Those are tensors, and attributes that a layer of one stage changes.
    """
    if len(staged.stages) > 1:
        for name in staged.conditions.read_elsewhere:
            raise PlacerError(
                name,
                "is changed by a layer that stays whole, and read outside of it, which works in one process "
                "only: ranks that do not run the layer do not see the change",
                "let the layer return it",
            )
    for each in staged.state:
        if each.kind is Tensor:
            raise PlacerError(
                each.name,
                "is a tensor that forward keeps from one call to the next, which works in one process only",
                "pass it as an argument and return it",
            )


def refuse_kept_rows(
    known: Sequence[StagedModel], staged: StagedModel | None, error: CaptureError | None = None
) -> None:
    """Raise ``CaptureError`` if slices read all rows that forward, by a ``known`` program, left before.

    ``staged`` is the program for them; None: it could not be captured, because of ``error``.
    """
    if error is not None and "forward fails" not in error.problem:
        return
    for each in known:
        rows = iter(each.stored_leaves(each.rows))
        for stored in each.stored:
            batched = any(x.dim is not None for x in islice(rows, stored.count))
            read = staged is None or any(
                x.path[: len(stored.path)] == stored.path and x.batch_dim is None
                for x in staged.state
                if x.kind is Tensor
            )
            if batched and read and stored.root == "model":
                raise CaptureError(
                    stored.name,
                    "is kept from one call to the next with a row per sample, and slices of the batch "
                    "cannot read their rows of it",
                    "pass it as an argument and return it; or use 1 replica and 1 micro-batch",
                ) from error
