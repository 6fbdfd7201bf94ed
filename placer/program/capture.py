"""Capture a model: record it, make modules that cannot be recorded single nodes, check the graph."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import UnsupportedOperatorException

from placer.errors import CaptureError
from placer.garbage import only_new_garbage
from placer.program.alias import Aliasing, NodeFailure, analyze_aliasing
from placer.program.batch import Batch, BatchDim, SplitRules, find_batch, grown, refuse_unsure
from placer.program.call import (
    BoundCall,
    bind_call,
    describe_shapes,
    make_call_format,
    objects_of,
    placeholder_names,
)
from placer.program.checks import (
    check_arguments,
    check_model,
    store_of_backward,
    store_of_whole,
    unknown_store,
    whole_if_packed,
)
from placer.program.failure import (
    CHANGES_FLAGS,
    ForwardFailure,
    TraceFailure,
    describe,
    end_frames,
    locate_function,
    method_not_captured,
    with_own_lines,
)
from placer.program.fake import FakeConverter, Guess
from placer.program.fingerprint import fingerprint_graph
from placer.program.guards import tensor_paths
from placer.program.inside import SOMETHING_ELSE, mixing_inside
from placer.program.leaves import find_whole_modules, is_inside, is_torch_leaf, runs_own_hooks
from placer.program.record import RecordedProgram, record_model, replaced_state
from placer.program.recorder import Setup
from placer.program.rows import (
    Mixing,
    RowFlow,
    Rows,
    find_rows,
    is_norm,
    is_norm_function,
    rows_by_size,
)
from placer.program.size_log import reads_rows, varying_reading
from placer.program.state import state_of
from placer.program.stored import StateInput
from placer.program.targets import WholeRoot
from placer.program.types import Captured, Conditions, WholeModule, rows_of, training_flags
from placer.program.watch import RECORDING
from placer.program.whole import record_whole
from placer.spec.layers import match_paths
from placer.versions import require_torch

_CHECKPOINTED = "the model checkpoints its activations, so backward runs it again as a whole"

_DECIDES = "it decides by values of the batch what it computes"
_CHECK_INPUTS = "check the example inputs: shapes, dtypes, and the mode of the model"
_NO_VALUES = (
    "it reads values of tensors, which planning does not have (0 and 1 were tried): keep the values "
    "that it needs in plain Python numbers"
)


@only_new_garbage()
def capture_model(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    ignore_device_moves: bool = False,
    grad: bool = True,
    rules: SplitRules | None = None,
    numbers: Sequence[StateInput] = (),
    changing: Collection[str] = (),
    method: str = "forward",
) -> Captured:
    """What is recorded of a ``method`` of ``model`` called with ``args`` and ``kwargs``, in its present mode.

    Allocates no memory and does not change the model: a fake copy of it is run. The model and the
    inputs may be on any device, ``meta`` included. A submodule that cannot be recorded becomes one
    node (``whole_modules`` says why) and the recording starts again, so there are at most as many
    recordings as modules. A second recording with twice the batch finds out what depends on the
    batch size, and which inputs have a row per sample as far as ``rules`` do not say (`find_batch`).
    ``grad`` is what code of the model gets that asks whether gradients are enabled; the
    graph holds in either case if none asks. ``changing`` are names of arguments that are other numbers in
    other calls; of ``numbers``, arguments and attributes, those become inputs of the graph at which no
    Python code looks.

    Raises ``CaptureError`` when the model cannot be captured. A model whose forward moves tensors to
    several devices is one, unless ``ignore_device_moves``. Raises ``VersionError`` when the installed
    torch lacks what capture needs.
    """
    require_torch()
    check_model(model)
    bound = replace(bind_call(model, args, kwargs, method), numbers=frozenset(changing))
    check_arguments(bound)
    converter = FakeConverter()
    with RECORDING:
        setup = Setup(
            converter=converter,
            model=model,
            fake_model=converter.module(model, objects_of(bound)),
            bound=bound,
            ignore_device_moves=ignore_device_moves,
            grad=grad,
            numbers=tuple(numbers),
            is_split=rules is not None and rules.is_split,
        )
        capture = _Capture(setup, (rules or SplitRules()).with_marks(bound.said))
        recording = capture.record()
        capture.refuse_copies()
        inputs = [node for node in recording.graph.nodes if node.op == "placeholder"]
        unread = [n for n, node in zip(capture.names, inputs, strict=False) if not node.users]
        refuse_unsure(capture.batch, capture.inputs, capture.names, unread=unread)
        aliasing = capture.check(recording)
    return _assemble(model, recording, aliasing, bound, capture)


class _Capture:
    """One capture: repeated recordings, and the modules that so far had to become single nodes."""

    def __init__(self, setup: Setup, rules: SplitRules) -> None:
        self.setup = setup
        self.model, self.bound, self.converter = setup.model, setup.bound, setup.converter
        self.inputs = self.converter.inputs(self.bound.tensors)
        self.names = placeholder_names(self.bound)
        self.rules = whole_if_packed(rules, self.bound)
        self.held: tuple[StateInput, ...] = ()  # tensors of the state that are inputs
        self.batch = Batch(dims=(None,) * len(self.inputs), doubled=None)
        self.whole: dict[str, WholeModule] = {}
        self.guess = Guess()
        self.fixed_batch_reason = ""
        self.reads_rows = False
        self.mixing_note = ""
        self.mixing = ""

    def record(self) -> RecordedProgram:
        """Record with as few single-node modules as possible, for every batch size if possible."""
        whole = find_whole_modules(self.setup.fake_model, self.converter.reachable)
        self.whole = {module.layer: module for module in whole}
        while True:
            try:
                recording = self._run(self.inputs)
                self._compare_lengths(recording)
                self._compare_batches(recording)
            except TraceFailure as failure:
                end_frames(failure)
                self._keep_whole(failure)
            else:
                return recording

    def refuse_copies(self) -> None:
        """Raise ``CaptureError`` if replicas will run a module that needs its own parameters, not copies."""
        for each in self.whole.values() if self.rules.is_copied else ():
            if each.reason == CHANGES_FLAGS:
                raise CaptureError(
                    each.layer or type(self.model).__name__,
                    f"{each.reason} ({each.location}), which replicas with copies of it cannot do",
                    "set it before forward; or use 1 replica, and micro-batches",
                )

    def check(self, recording: RecordedProgram) -> Aliasing:
        """Run the graph by itself on fake tensors; this also finds out which nodes share memory."""
        given = dict(zip(self.bound.leaf_names, self.bound.leaves, strict=True))
        try:
            return analyze_aliasing(
                self.model,
                recording.graph,
                recording.constants,
                [*self.bound.tensors, *(each.read(self.model, given) for each in recording.state)],
                guess=self.guess,
                arguments=objects_of(self.bound),
            )
        except NodeFailure as failure:
            error = failure.__cause__
            assert error is not None
            raise CaptureError(
                recording.layer_of.get(failure.node.name, "") or type(self.model).__name__,
                f"the captured graph does not run at {failure.node.format_node()}: {describe(error)}",
                "this is a defect of placer; please report it with the model",
            ) from error

    def _run(
        self, inputs: Sequence[Tensor], *, named: bool = True, shorter: int = 0
    ) -> RecordedProgram:
        setup = replace(self.setup, whole=frozenset(self.whole), guess=self.guess, shorter=shorter)
        count = len(self.inputs)
        inputs, held = inputs[:count], inputs[count:]
        try:
            if "" in self.whole:
                whole = self.whole[""]
                if setup.bound.method != "forward":
                    raise method_not_captured(setup.bound.method, whole.reason, whole.location)
                location = f", {whole.location}" if whole.location else ""
                return record_whole(setup, inputs, whole.reason + location)
            with replaced_state(setup, self.held, held):
                return record_model(setup, inputs, named=named)
        except ForwardFailure as failure:
            end_frames(failure)
            guess = self.guess.following(failure.places)
            if failure.guessed and guess is not None:
                self.guess = guess
                return self._run(inputs, named=named, shorter=shorter)
            raise failure.as_error(
                f"on these inputs ({describe_shapes(inputs)})",
                _NO_VALUES if failure.guessed else _remedy(failure.__cause__),
            ) from with_own_lines(failure.__cause__)

    def _keep_whole(self, failure: TraceFailure) -> None:
        if failure.layer in self.whole:
            raise CaptureError(
                failure.layer or type(self.model).__name__,
                f"its forward cannot be captured: {failure.reason}"
                + (f" ({failure.location})" if failure.location else ""),
                "move this code into a submodule, which is then kept whole on one device",
            ) from failure.__cause__
        self.whole[failure.layer] = WholeModule(
            layer=failure.layer,
            reason=failure.reason,
            location=failure.location
            or locate_function(type(self.model.get_submodule(failure.layer)).forward),
        )

    def _compare_batches(self, recording: RecordedProgram) -> None:
        """Find the inputs that have a row per sample, and compare the graph with that for twice the batch.

        Raises ``TraceFailure`` naming the module where they first differ, so that it becomes a single
        node. Where that does not help, sets ``fixed_batch_reason`` to the reason. It does not if the batch
        has one row, for which the model does something else than for several.
        """
        self.fixed_batch_reason, self.reads_rows = "", False
        reasons: list[str] = []

        def record(inputs: Sequence[Tensor]) -> RecordedProgram | None:
            larger, reason = self._run_larger(inputs)
            reasons.append(reason)
            return larger

        self.held = tuple(each for each in recording.state if each.kind is Tensor)
        values = [each.read(self.model, {}) for each in self.held]
        self.batch = find_batch(
            [*self.names, *(each.name for each in self.held)],
            [*self.inputs, *map(self.converter.tensor, values)],
            self.rules,
            record,
            lambda larger: larger.results != recording.results,
            converter=self.converter,
        )
        other: RecordedProgram | None = self.batch.doubled
        if other is None:
            self.fixed_batch_reason = reasons[0] if reasons else ""
            return
        found = self._first_difference(recording, other)
        if found is None:
            self.reads_rows = reads_rows(recording.sizes, other.sizes)
            if _operations(recording) != _operations(other):
                self.fixed_batch_reason = f"the model itself: {SOMETHING_ELSE}"
            return
        layer, location = found
        reason = SOMETHING_ELSE
        if not layer or layer in self.whole or self._is_special(other):
            self.fixed_batch_reason = f"{layer or 'the model itself'}: {reason} ({location})"
            return
        raise TraceFailure(layer, reason, location)

    def _compare_lengths(self, recording: RecordedProgram) -> None:
        """Compare the graph with that for packed sequences that are one step shorter.

        Raises ``TraceFailure`` naming the module whose code depends on how long they are.
        """
        if not recording.packs:
            return
        try:
            other = self._run(self.inputs, named=False, shorter=1)
        except CaptureError:  # all sequences must have the full length
            return
        reason = "its Python code depends on the lengths of packed sequences"
        found = self._first_difference(recording, other)
        if found is not None:
            raise TraceFailure(found[0], reason, found[1])
        reading = varying_reading(recording.sizes, other.sizes)
        if reading is not None:
            raise TraceFailure(reading.layer, reason, "")

    def _first_difference(
        self, recording: RecordedProgram, other: RecordedProgram
    ) -> tuple[str, str] | None:
        """The module where the graph of ``other`` first differs, and the line; None if it does not."""
        first, second = recording.lines, other.lines
        if first == second and recording.result == other.result:
            return None
        nodes = list(recording.graph.nodes)
        index = next(
            (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
            min(len(first), len(second)) - 1,
        )
        node = nodes[min(index, len(nodes) - 1)]
        layer = recording.layer_of.get(node.name, "")
        if node.op == "call_module" or layer in self.whole:
            layer = layer.rpartition(".")[0]
        return layer, recording.location_of.get(node.name, "")

    @property
    def input_dims(self) -> tuple[BatchDim, ...]:
        """The batch's dimension in each input of the call."""
        return self.batch.dims[: len(self.inputs)]

    @property
    def rows(self) -> int | None:
        return rows_of(self.input_dims, [tensor.shape for tensor in self.inputs])

    def all_dims(self, recording: RecordedProgram) -> list[BatchDim]:
        """The batch's dimension in each input of the graph."""
        held = iter(self.batch.dims[len(self.inputs) :])
        return [
            *self.input_dims,
            *(next(held, None) if each.kind is Tensor else None for each in recording.state),
        ]

    def state(self, recording: RecordedProgram) -> tuple[StateInput, ...]:
        """The inputs of the graph after those of the call, each with its dimension of the batch."""
        dims = self.all_dims(recording)[len(self.inputs) :]
        return tuple(
            replace(each, batch_dim=dim) for each, dim in zip(recording.state, dims, strict=True)
        )

    def find_rows(
        self,
        recording: RecordedProgram,
        aliasing: Aliasing,
        state_of: Mapping[str, Collection[str]],
    ) -> RowFlow | None:
        """How nodes depend on the rows of the batch; None if that is not known.

        Raises ``CaptureError`` if the batch is to be split and a node mixes its rows, unless the user has
        said how the inputs are split.
        """
        doubled: RecordedProgram | None = self.batch.doubled
        flow, mixing = None, self.reading_mixing(recording, None)
        if self.fixed_batch_reason and doubled is not None:
            mixing += self.batch_mixing(recording, doubled)
        if (
            doubled is not None
            and len(doubled.shapes) == len(recording.shapes)
            and not self.fixed_batch_reason
        ):
            flow = find_rows(
                recording.graph,
                recording.shapes,
                doubled.shapes,
                self.all_dims(recording),
                self.model,
                recording.independent,
                aliasing.mutated_state_of,
                state_of,
                aliasing.mutated_inputs_of,
            )
            mixing = [
                *self.reading_mixing(recording, flow),
                *flow.mixing,
                *self.inside_mixing(recording, doubled, flow),
                *self.hook_mixing(recording, doubled),
                *self.state_mixing(recording, aliasing, flow),
            ]
        if not mixing:
            return flow
        first = mixing[0]
        layer = first.layer or recording.layer_of.get(first.node, "") or type(self.model).__name__
        location = first.location or recording.location_of.get(first.node, "")
        reason = f"{first.reason}{f' ({location})' if location else ''}"
        is_said = self.rules.says(self.names, self.input_dims)
        if not self.rules.is_split:
            self.mixing = "" if is_said or flow is None else f"{layer}: {reason}"
        elif is_said:
            self.mixing_note = (
                f"{layer}: {first.reason}. Every slice of the batch is computed by itself, as the "
                "spec's inputs say, so results are those of the slices, not of the whole batch."
            )
        else:
            said = self.rules.spell(self.names, self.input_dims)
            raise CaptureError(
                layer,
                f"{reason}, so a slice of the batch does not compute what the whole batch does",
                "use 1 replica and 1 micro-batch; or return what is compared, and compare it in the loss, by "
                "placed.step(…, whole_batch=True); or, if slices may be computed by themselves, as under "
                f'nn.DataParallel, say so in the spec: "inputs": {said}',
            )
        return flow

    def reading_mixing(self, recording: RecordedProgram, flow: RowFlow | None) -> list[Mixing]:
        """The nodes that decide by values of the batch what they compute, as far as ``flow`` is known."""
        return [
            Mixing(node=node, reason=_DECIDES, location=location)
            for node, location in recording.readings.items()
            if flow is None or flow.rows[node].depends
        ]

    def batch_mixing(self, recording: RecordedProgram, doubled: RecordedProgram) -> list[Mixing]:
        """Where the model runs other operations for another batch size, unless for a single row only."""
        if self.rows == 1 or "" in self.whole or _operations(recording) == _operations(doubled):
            return []
        layer, location = self._first_difference(recording, doubled) or ("", "")
        return [Mixing(node="", reason=SOMETHING_ELSE, layer=layer, location=location)]

    def inside_mixing(
        self, recording: RecordedProgram, doubled: RecordedProgram, flow: RowFlow
    ) -> list[Mixing]:
        """The single nodes that mix rows."""
        found = [
            mixing_inside(node.name, inside, doubled.inside[other.name], self.rows or 1, self.model)
            for node, other in zip(recording.graph.nodes, doubled.graph.nodes, strict=True)
            if (inside := recording.inside.get(node.name)) and flow.rows[node.name].depends
        ]
        return [each for each in found if each is not None]

    def hook_mixing(self, recording: RecordedProgram, doubled: RecordedProgram) -> list[Mixing]:
        """The modules whose hooks on gradients mix rows."""
        found = []
        for run, other in itertools.zip_longest(recording.gradient_hooks, doubled.gradient_hooks):
            if run is None or other is None:
                return [Mixing(node="", reason=SOMETHING_ELSE)]
            mixing = mixing_inside("", run.inside, other.inside, self.rows or 1, self.model)
            if run.reading:
                mixing = Mixing(node="", reason=_DECIDES, location=run.reading)
            if mixing is not None:
                reason = f"a hook on its gradients replaces them, and {mixing.reason}"
                location = mixing.location or run.location
                found.append(Mixing(node="", layer=run.layer, reason=reason, location=location))
        return found

    def state_mixing(
        self, recording: RecordedProgram, aliasing: Aliasing, flow: RowFlow
    ) -> list[Mixing]:
        """The nodes that set state from the batch, or that would set it once per micro-batch.

        Raises ``CaptureError`` if it is a parameter. Norms are left to the spec's ``batch_norm``.
        """
        nodes = {node.name: node for node in recording.graph.nodes}
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        found = []
        names_of = {name: set(names) for name, names in aliasing.mutated_state_of.items()}
        for node in recording.graph.nodes:  # which values a module reads may decide what it writes
            if _is_whole(node):
                layer = str(node.target) if node.op == "call_module" else ""
                found_in = (
                    n for n in recording.written_inside if not layer or is_inside([layer], n)
                )
                inside = set(found_in)
                names_of[node.name] = names_of.get(node.name, set()) | inside
        for node_name, names in names_of.items():
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

    def result_rows(self, recording: RecordedProgram, flow: RowFlow | None) -> tuple[Rows, ...]:
        """How each leaf of the output node depends on the rows of the batch.

        By its shape if ``flow`` is not known. Raises ``CaptureError`` if the batch is to be split and it is
        not known how a stored value of the batch follows from those of slices, or if a single node stores
        one.
        """
        (leaves,) = recording.graph.output_node().args
        assert isinstance(leaves, list | tuple)
        doubled: RecordedProgram | None = self.batch.doubled
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
        return tuple(rows)

    def _run_larger(self, inputs: Sequence[Tensor]) -> tuple[RecordedProgram | None, str]:
        """Record with a larger batch; None and the reason if that fails."""
        guess = self.guess
        try:
            return self._run(inputs, named=False), ""
        except CaptureError as error:
            reason = error.problem
        except TraceFailure as failure:
            reason = f"{failure.layer}: {failure.reason} ({failure.location})"
        self.guess = guess  # no guess will do for that batch
        return None, reason

    def _is_special(self, other: RecordedProgram) -> bool:
        """Whether one row is an exception: ``other``, recorded with two, is the graph for four rows too."""
        if self.rows != 1:
            return False
        more, _ = self._run_larger(grown(self.converter, self.inputs, self.input_dims, 4))
        return more is not None and more.lines == other.lines


def _remedy(error: BaseException | None) -> str:
    if isinstance(error, UnsupportedOperatorException):
        return "torch cannot run this operator without data; use another one (padding, for a nested tensor)"
    return _CHECK_INPUTS


def _is_whole(node: fx.Node) -> bool:
    """Does ``node`` call a module, or all of the model?"""
    return node.op == "call_module" or isinstance(node.target, WholeRoot)


def _assemble(
    model: nn.Module,
    recording: RecordedProgram,
    aliasing: Aliasing,
    bound: BoundCall,
    capture: _Capture,
) -> Captured:
    graph = recording.graph
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    modules = dict(model.named_modules(remove_duplicate=False))
    own = set(map(id, modules.values()))
    whole = {
        path: WholeModule(layer=path, reason=_CHECKPOINTED, location=location)
        for path, location in recording.checkpointed.items()
    } | capture.whole
    reads = {node.name: state_of(node, modules, recording.constants) for node in nodes}
    flow = capture.find_rows(recording, aliasing, reads)
    called = {str(node.target) for node in nodes if node.op in ("call_module", "get_attr")}
    return Captured(
        model=model,
        graph=graph,
        layer_of={node.name: recording.layer_of[node.name] for node in nodes},
        aliasing=aliasing,
        constants=recording.constants,
        constant_paths=tensor_paths(
            model, [(s.path, s.name) for s in recording.guards], recording.constants
        ),
        call=make_call_format(bound, recording.result, capture.input_dims),
        whole_modules=tuple(
            w
            for w in whole.values()
            if not w.layer or (w.layer in called and not is_torch_leaf(modules[w.layer]))
        ),
        fingerprint=fingerprint_graph(model, graph, recording.lines),
        conditions=Conditions(
            modes=training_flags(model),
            any_batch_size=not capture.fixed_batch_reason,
            reads_rows=capture.reads_rows,
            readings=recording.sizes.readings,
            whole=frozenset(capture.whole),
            guess=capture.guess,
            lines=recording.lines,
            guards=recording.guards,
            stored=recording.stored,
            state=recording.state,
            numbers=recording.numbers,
            fixed=_fixed(bound, recording),
            repeats=recording.repeats,
            ignore_device_moves=capture.setup.ignore_device_moves,
            answers=recording.answers,
            asked=recording.asked,
            has_own_hooks=any(
                runs_own_hooks(x, capture.converter.reachable, own) for x in modules.values()
            ),
        ),
        results=capture.result_rows(recording, flow),
        changing=recording.changing,
        fixed_batch_reason=capture.fixed_batch_reason,
        notes=(capture.mixing_note,) if capture.mixing_note else (),
        mixing=capture.mixing,
        stored=recording.stored,
        replaced=recording.replaced,
        state=capture.state(recording),
    )


def _fixed(bound: BoundCall, recording: RecordedProgram) -> dict[str, int | float]:
    """The changing numbers among the arguments that are part of the program, by name."""
    free = {each.argument for each in recording.numbers}
    pairs = zip(bound.leaf_names, bound.leaves, strict=True)
    return {name: leaf for name, leaf in pairs if name in bound.numbers - free}


def _operations(recording: RecordedProgram) -> list[Any]:
    """What runs, and which flags of tensors are set, whatever the sizes."""
    ran = [re.sub(r"\d+", "", line) for line in recording.lines]
    return [*ran, *((each.path, each.flag) for each in recording.stored if each.flag is not None)]
