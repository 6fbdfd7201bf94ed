"""Capture a model: record it, make modules that cannot be recorded single nodes, check the graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import UnsupportedOperatorException

from placer.errors import CaptureError
from placer.garbage import only_new_garbage
from placer.program.alias import Aliasing, NodeFailure, analyze_aliasing
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
    whole_if_packed,
)
from placer.program.failure import (
    CHANGES_FLAGS,
    DIFFERENTIATES,
    ForwardFailure,
    TraceFailure,
    describe,
    end_frames,
    locate_function,
    method_not_captured,
    with_own_lines,
)
from placer.program.fake.converter import FakeConverter, Guess
from placer.program.fingerprint import fingerprint_graph
from placer.program.guards import tensor_paths
from placer.program.leaves import find_whole_modules, is_torch_leaf, runs_own_hooks
from placer.program.recording.inside import SOMETHING_ELSE
from placer.program.recording.record import RecordedProgram, record_model, replaced_state
from placer.program.recording.recorder import Setup
from placer.program.recording.watch import RECORDING
from placer.program.row_check import RowCheck
from placer.program.rows.batch import Batch, BatchDim, SplitRules, find_batch, grown, unsure_error
from placer.program.size_log import reads_rows, varying_reading
from placer.program.state import state_of
from placer.program.stored import StateInput
from placer.program.types import Captured, Conditions, WholeModule, rows_of, training_flags
from placer.program.whole import record_whole
from placer.versions import require_torch

_CHECKPOINTED = "the model checkpoints its activations, so backward runs it again as a whole"

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
    node (``whole_modules`` says why), with all that are alike, and the recording starts again. A second
    recording with twice the batch finds out what depends on the batch size, and which inputs have a row
    per sample as far as ``rules`` do not say (`find_batch`).
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
        error = unsure_error(capture.batch, capture.inputs, capture.names, unread=unread)
        if error is not None:
            raise error
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
                return record_whole(setup, inputs, whole.located_reason)
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
        first = self.model.get_submodule(failure.layer)
        location = failure.location or locate_function(type(first).forward)
        for path, module in self.model.named_modules(remove_duplicate=False):
            # Layers that are alike fail alike: found one by one, each takes a recording of the whole model.
            if path not in self.whole and (path == failure.layer or _are_alike(first, module)):
                self.whole[path] = WholeModule(layer=path, reason=failure.reason, location=location)

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
        found = recording.first_difference(other, self.whole)
        if found is None:
            self.reads_rows = reads_rows(recording.sizes, other.sizes)
            if recording.operations() != other.operations():
                self.fixed_batch_reason = f"the model itself: {SOMETHING_ELSE}"
            return
        layer, location = found
        reason = SOMETHING_ELSE
        if any(each.name == "len" and each.layer == layer for each in recording.sizes.readings):
            reason += "; len(x) is a plain number, x.shape[0] is recorded"
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
        found = recording.first_difference(other, self.whole)
        if found is not None:
            raise TraceFailure(found[0], reason, found[1])
        reading = varying_reading(recording.sizes, other.sizes)
        if reading is not None:
            raise TraceFailure(reading.layer, reason, "")

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
    check = RowCheck(
        model=model,
        recording=recording,
        doubled=capture.batch.doubled,
        aliasing=aliasing,
        rules=capture.rules,
        names=capture.names,
        dims=capture.all_dims(recording),
        shapes=[tensor.shape for tensor in capture.inputs],
        whole=capture.whole.keys(),
        fixed_batch_reason=capture.fixed_batch_reason,
    )
    flow = check.flow(reads)
    mixing, note = check.outcome(flow)
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
            whole[path]
            for path, module in modules.items()
            if path in whole and (not path or (path in called and not is_torch_leaf(module)))
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
            ignore_device_moves=capture.setup.ignore_device_moves,
            answers=recording.answers,
            asked=recording.asked,
            has_own_hooks=any(
                runs_own_hooks(x, capture.converter.reachable, own) for x in modules.values()
            ),
            read_elsewhere=recording.read_elsewhere,
        ),
        results=check.results(flow),
        changing=recording.changing.union(
            path for path, x in whole.items() if x.reason.startswith(DIFFERENTIATES)
        ),
        fixed_batch_reason=capture.fixed_batch_reason,
        notes=(note,) if note else (),
        mixing=mixing,
        stored=recording.stored,
        replaced=recording.replaced,
        state=capture.state(recording),
    )


def _are_alike(a: nn.Module, b: nn.Module) -> bool:
    """Have the modules the same code, parts and plain values?"""

    def values(module: nn.Module) -> dict[str, Any]:
        return {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str)}

    return type(a) is type(b) and values(a) == values(b) and repr(a) == repr(b)


def _fixed(bound: BoundCall, recording: RecordedProgram) -> dict[str, int | float]:
    """The changing numbers among the arguments that are part of the program, by name."""
    free = {each.argument for each in recording.numbers}
    pairs = zip(bound.leaf_names, bound.leaves, strict=True)
    return {name: leaf for name, leaf in pairs if name in bound.numbers - free}
