"""Find out how a recording depends on the rows of the batch, and refuse to split what mixes them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from placer.errors import CaptureError
from placer.program.alias import Aliasing
from placer.program.checks import store_of_backward, store_of_whole, unknown_store
from placer.program.recording.inside import SOMETHING_ELSE, mixing_inside
from placer.program.recording.record import RecordedProgram
from placer.program.rows.batch import BatchDim, SplitRules
from placer.program.rows.dependence import (
    Mixing,
    RowFlow,
    Rows,
    counting_nodes,
    find_rows,
    is_norm,
    is_norm_function,
    rows_by_size,
)
from placer.program.targets import WholeRoot
from placer.program.types import rows_of
from placer.spec.layers import match_paths

_DECIDES = "it decides by values of the batch what it computes"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCheck:
    """Compares a recording of ``model`` with that for twice the batch, ``doubled``, if there is one.

    ``dims`` has the batch's dimension in each input of the graph, of which the first are those of the call,
    with their ``names`` and ``shapes``. ``whole`` are the modules that are single nodes.
    """

    model: nn.Module
    recording: RecordedProgram
    doubled: RecordedProgram | None
    aliasing: Aliasing
    rules: SplitRules
    names: Sequence[str]
    dims: Sequence[BatchDim]
    shapes: Sequence[torch.Size]
    whole: Collection[str]
    fixed_batch_reason: str

    def flow(self, state_of: Mapping[str, Collection[str]]) -> RowFlow | None:
        """How nodes depend on the rows of the batch, and on the state that they read; None if not known."""
        recording, doubled = self.recording, self.doubled
        if doubled is None or len(doubled.shapes) != len(recording.shapes):
            return None
        if self.fixed_batch_reason and recording.operations() != doubled.operations():
            return None
        return find_rows(
            recording.graph,
            recording.shapes,
            doubled.shapes,
            self.dims,
            self.model,
            recording.independent,
            self.aliasing.mutated_state_of,
            state_of,
            self.aliasing.mutated_values_of,
            counting=counting_nodes(recording.graph, doubled.graph),
        )

    def outcome(self, flow: RowFlow | None) -> tuple[str, str]:
        """Where rows are mixed, if the batch is not to be split; and a note, if it is, as the user says.

        Raises ``CaptureError`` if the batch is to be split and a node mixes its rows, unless the user has
        said how the inputs are split.
        """
        mixing = self._mixing(flow)
        if not mixing:
            return "", ""
        first, layer_of = mixing[0], self.recording.layer_of
        layer = first.layer or layer_of.get(first.node, "") or type(self.model).__name__
        location = first.location or self.recording.location_of.get(first.node, "")
        reason = f"{first.reason}{f' ({location})' if location else ''}"
        dims = tuple(self.dims[: len(self.names)])
        is_said = self.rules.says(self.names, dims)
        if not self.rules.is_split:
            return "" if is_said or flow is None else f"{layer}: {reason}", ""
        if is_said:
            return "", (
                f"{layer}: {first.reason}. Every slice of the batch is computed by itself, as the "
                "spec's inputs say, so results are those of the slices, not of the whole batch."
            )
        raise CaptureError(
            layer,
            f"{reason}, so a slice of the batch does not compute what the whole batch does",
            "use 1 replica and 1 micro-batch; or return what is compared, and compare it in the loss, by "
            "placed.step(…, whole_batch=True); or, if slices may be computed by themselves, as under "
            f'nn.DataParallel, say so in the spec: "inputs": {self.rules.spell(self.names, dims)}',
        )

    def results(self, flow: RowFlow | None) -> tuple[Rows, ...]:
        """How each leaf of the output node depends on the rows of the batch.

        By its shape if ``flow`` is not known. Raises ``CaptureError`` if the batch is to be split and it is
        not known how a stored value of the batch follows from those of slices, or if a single node stores
        one.
        """
        recording, doubled = self.recording, self.doubled
        (leaves,) = recording.graph.output_node().args
        assert isinstance(leaves, list | tuple)
        if flow is not None:
            rows = [flow.rows[x.name] if isinstance(x, fx.Node) else Rows() for x in leaves]
        elif doubled is not None and len(doubled.results) == len(recording.results):
            rows = list(map(rows_by_size, recording.results, doubled.results))
        else:
            rows = [Rows(combination=None) for _ in leaves]
        names = [f"result.{name}".rstrip(".") for name in recording.result.names]
        names += [name for each in recording.stored for name in each.leaf_names]
        for pattern, combination in self.rules.stored.items():
            for name in match_paths(pattern, names):
                rows[names.index(name)] = Rows(combination=combination)
        if self.rules.is_split:
            for name, row in list(zip(names, rows, strict=True))[len(recording.result.names) :]:
                if not row.is_known:
                    raise unknown_store(name)
            for change in recording.changed_inside:
                if not isinstance(change.value, bool | str | type(None)):
                    raise store_of_whole(change)
            for change in recording.changed_in_backward:
                if not isinstance(change.value, bool | str | type(None)):
                    raise store_of_backward(change)
        ranks = [len(x) if isinstance(x, torch.Size) else None for x in recording.results]
        return tuple(replace(row, rank=r) for row, r in zip(rows, ranks, strict=True))

    @property
    def _batch_rows(self) -> int | None:
        return rows_of(self.dims[: len(self.shapes)], self.shapes)

    def _mixing(self, flow: RowFlow | None) -> list[Mixing]:
        recording, doubled = self.recording, self.doubled
        found = [
            Mixing(node=node, reason=_DECIDES, location=location)
            for node, location in recording.readings.items()
            if flow is None or flow.rows[node].depends
        ]
        if doubled is None:
            return found
        if flow is None:
            return [*found, *(self._of_batch_size(doubled) if self.fixed_batch_reason else ())]
        return [
            *found,
            *flow.mixing,
            *self._inside(doubled, flow),
            *self._in_hooks(doubled),
            *self._of_state(flow),
        ]

    def _of_batch_size(self, doubled: RecordedProgram) -> list[Mixing]:
        """Where the model runs other operations for another batch size, unless for a single row only."""
        recording = self.recording
        if (
            self._batch_rows == 1
            or "" in self.whole
            or recording.operations() == doubled.operations()
        ):
            return []
        layer, location = recording.first_difference(doubled, self.whole) or ("", "")
        return [Mixing(node="", reason=SOMETHING_ELSE, layer=layer, location=location)]

    def _inside(self, doubled: RecordedProgram, flow: RowFlow) -> list[Mixing]:
        """The single nodes that mix rows."""
        recording, rows = self.recording, self._batch_rows or 1
        found = [
            mixing_inside(node.name, inside, doubled.inside[other.name], rows, self.model)
            for node, other in zip(recording.graph.nodes, doubled.graph.nodes, strict=True)
            if (inside := recording.inside.get(node.name)) and flow.rows[node.name].depends
        ]
        return [each for each in found if each is not None]

    def _in_hooks(self, doubled: RecordedProgram) -> list[Mixing]:
        """The modules whose hooks on gradients mix rows."""
        hooks = itertools.zip_longest(self.recording.gradient_hooks, doubled.gradient_hooks)
        found = []
        for run, other in hooks:
            if run is None or other is None:
                return [Mixing(node="", reason=SOMETHING_ELSE)]
            mixing = mixing_inside("", run.inside, other.inside, self._batch_rows or 1, self.model)
            if run.reading:
                mixing = Mixing(node="", reason=_DECIDES, location=run.reading)
            if mixing is not None:
                reason = f"a hook on its gradients replaces them, and {mixing.reason}"
                location = mixing.location or run.location
                found.append(Mixing(node="", layer=run.layer, reason=reason, location=location))
        return found

    def _of_state(self, flow: RowFlow) -> list[Mixing]:
        """The nodes that set state from the batch, or that would set it once per micro-batch.

        Raises ``CaptureError`` if it is a parameter. Norms are left to the spec's ``batch_norm``.
        """
        recording = self.recording
        nodes = {node.name: node for node in recording.graph.nodes}
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        found = []
        for node_name, names in self._written_state().items():
            node = nodes[node_name]
            for name in sorted(names):
                owner = self.model.get_submodule(name.rpartition(".")[0])
                if is_norm(owner) or is_norm_function(node):
                    continue
                depends = flow.rows[node_name].depends
                if _is_whole(node):
                    depends = recording.written_inside.get(name, True)
                if not (depends or self.rules.in_turn):
                    continue
                kind = "parameter" if name in parameters else "buffer"
                reason = f"it sets the {kind} {name} " + (
                    "from the batch"
                    if depends
                    else "in every call, and would for every micro-batch"
                )
                if kind == "parameter" and self.rules.is_split:
                    raise CaptureError(
                        recording.layer_of.get(node_name, "") or type(self.model).__name__,
                        f"{reason}, so slices of the batch would make other weights than the whole batch",
                        "call the model once before you place it, if only its first call does that; or use 1 "
                        "replica and 1 micro-batch",
                    )
                found.append(Mixing(node=node_name, reason=reason))
        return found

    def _written_state(self) -> dict[str, set[str]]:
        """The names of the state that each node writes, with what the code of single nodes writes."""
        names_of = {name: set(names) for name, names in self.aliasing.mutated_state_of.items()}
        inside = defaultdict[str, set[str]](set)  # by layer
        for name in self.recording.written_inside:
            path = name.split(".")
            for depth in range(len(path) + 1):
                inside[".".join(path[:depth])].add(name)
        # Which values a module reads may decide what it writes.
        for node in filter(_is_whole, self.recording.graph.nodes):
            layer = str(node.target) if node.op == "call_module" else ""
            names_of.setdefault(node.name, set()).update(inside[layer])
        return names_of


def _is_whole(node: fx.Node) -> bool:
    """Does ``node`` call a module, or all of the model?"""
    return node.op == "call_module" or isinstance(node.target, WholeRoot)
