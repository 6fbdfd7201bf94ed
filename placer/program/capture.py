"""Capture a model: record it, make modules that cannot be recorded single nodes, check the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from placer._torch import is_compiled
from placer.errors import CaptureError
from placer.garbage import only_new_garbage
from placer.program.alias import Aliasing, NodeFailure, analyze_aliasing
from placer.program.batch import Batch, SplitRules, find_batch, grown, refuse_unsure
from placer.program.call import (
    BoundCall,
    bind_call,
    describe_shapes,
    make_call_format,
    placeholder_names,
)
from placer.program.earlier_calls import Forgotten, forget_earlier_calls
from placer.program.failure import (
    ForwardFailure,
    TraceFailure,
    describe,
    end_frames,
    locate_function,
    with_own_lines,
)
from placer.program.fake import FakeConverter
from placer.program.fingerprint import fingerprint_graph, graph_lines
from placer.program.guards import tensor_paths
from placer.program.leaves import find_whole_modules, is_torch_leaf
from placer.program.record import RecordedProgram, record_model
from placer.program.size_log import reads_rows
from placer.program.state import named_state
from placer.program.types import Conditions, Program, WholeModule, rows_of, training_flags
from placer.program.watch import RECORDING
from placer.program.whole import record_whole
from placer.versions import require

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
) -> Program:
    """The program of ``model`` called with ``args`` and ``kwargs``, in its present mode (train or eval).

    Allocates no memory and does not change the model: a fake copy of it is run. The model and the
    inputs may be on any device, ``meta`` included. A submodule that cannot be recorded becomes one
    node (``whole_modules`` says why) and the recording starts again, so there are at most as many
    recordings as modules. A second recording with twice the batch finds out what depends on the
    batch size, and which inputs have a row per sample as far as ``rules`` do not say (`find_batch`).
    ``grad`` is what code of the model gets that asks whether gradients are enabled; the
    graph holds in either case if none asks. What forward left in the model in earlier calls is left
    out (`earlier_calls`).

    Raises ``CaptureError`` when the model cannot be captured. A model whose forward moves tensors to
    several devices is one, unless ``ignore_device_moves``. Raises ``VersionError`` when the installed
    torch lacks what capture needs.
    """
    require("planning")
    _check_model(model)
    bound = bind_call(model, args, kwargs)
    converter = FakeConverter()
    with RECORDING:
        capture = _Capture(model, bound, converter, converter.module(model))
        capture.ignore_device_moves, capture.grad = ignore_device_moves, grad
        capture.rules = rules or SplitRules()
        recording = capture.record()
        inputs = [node for node in recording.graph.nodes if node.op == "placeholder"]
        unread = [n for n, node in zip(capture.names, inputs, strict=True) if not node.users]
        refuse_unsure(capture.batch, capture.inputs, capture.names, unread=unread)
        aliasing = capture.check(recording)
    return _assemble(model, recording, aliasing, bound, capture)


class _Capture:
    """One capture: repeated recordings, and the modules that so far had to become single nodes."""

    def __init__(
        self, model: nn.Module, bound: BoundCall, converter: FakeConverter, fake_model: nn.Module
    ) -> None:
        self.model = model
        self.bound = bound
        self.converter = converter
        self.fake_model = fake_model
        self.inputs = converter.inputs(bound.tensors)
        self.names = placeholder_names(bound)
        self.rules = SplitRules()
        self.batch = Batch(dims=(None,) * len(self.inputs), doubled=None)
        self.whole: dict[str, WholeModule] = {}
        self.guess = 1
        self.ignore_device_moves = False
        self.grad = True
        self.fixed_batch_reason = ""
        self.reads_rows = False
        self.forgotten = Forgotten()

    def record(self) -> RecordedProgram:
        """Record with as few single-node modules as possible, for every batch size if possible.

        What the model keeps of earlier calls is left out, if its next call would make it again.
        """
        self.forgotten = forget_earlier_calls(
            self.converter,
            self.model,
            self.fake_model,
            self.bound,
            self.inputs,
            ignore_device_moves=self.ignore_device_moves,
        )
        self.whole = {module.layer: module for module in find_whole_modules(self.fake_model)}
        while True:
            try:
                recording = self._run(self.inputs)
                self._compare_batches(recording)
            except TraceFailure as failure:
                end_frames(failure)
                self._keep_whole(failure)
            else:
                return recording

    def check(self, recording: RecordedProgram) -> Aliasing:
        """Run the graph by itself on fake tensors; this also finds out which nodes share memory."""
        try:
            return analyze_aliasing(
                self.model,
                recording.graph,
                recording.constants,
                self.bound.tensors,
                guess=self.guess,
            )
        except NodeFailure as failure:
            error = failure.__cause__
            assert error is not None
            raise CaptureError(
                recording.layer_of.get(failure.node.name, "") or type(self.model).__name__,
                f"the captured graph does not run at {failure.node.format_node()}: {describe(error)}",
                "this is a defect of placer; please report it with the model",
            ) from error

    def _run(self, inputs: Sequence[Tensor], *, named: bool = True) -> RecordedProgram:
        call = self.converter, self.model, self.fake_model, self.bound, inputs
        try:
            if "" in self.whole:
                return record_whole(*call, guess=self.guess)
            return record_model(
                *call,
                frozenset(self.whole),
                guess=self.guess,
                ignore_device_moves=self.ignore_device_moves,
                grad=self.grad,
                named=named,
                forgotten=self.forgotten.tensors,
            )
        except ForwardFailure as failure:
            end_frames(failure)
            if failure.guessed and self.guess:
                self.guess = 0
                return self._run(inputs, named=named)
            raise failure.as_error(
                f"on these inputs ({describe_shapes(inputs)})",
                _NO_VALUES if failure.guessed else _CHECK_INPUTS,
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

        self.batch = find_batch(
            self.names,
            self.inputs,
            self.rules,
            record,
            lambda larger: larger.results != recording.results,
            converter=self.converter,
        )
        other: RecordedProgram | None = self.batch.doubled
        if other is None:
            self.fixed_batch_reason = reasons[0] if reasons else ""
            return
        first, second = graph_lines(recording.graph), graph_lines(other.graph)
        if first == second and recording.result == other.result:
            self.reads_rows = reads_rows(recording.sizes, other.sizes)
            return
        nodes = list(recording.graph.nodes)
        index = next(
            (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
            min(len(first), len(second)) - 1,
        )
        node = nodes[min(index, len(nodes) - 1)]
        layer = recording.layer_of.get(node.name, "")
        if node.op == "call_module" or layer in self.whole:
            layer = layer.rpartition(".")[0]
        location = recording.location_of.get(node.name, "")
        reason = "it computes something else for another batch size"
        if not layer or layer in self.whole or self._is_special(other):
            self.fixed_batch_reason = f"{layer or 'the model itself'}: {reason} ({location})"
            return
        raise TraceFailure(layer, reason, location)

    def _run_larger(self, inputs: Sequence[Tensor]) -> tuple[RecordedProgram | None, str]:
        """Record with a larger batch; None and the reason if that fails."""
        try:
            return self._run(inputs, named=False), ""
        except CaptureError as error:
            return None, error.problem
        except TraceFailure as failure:
            return None, f"{failure.layer}: {failure.reason} ({failure.location})"

    def _is_special(self, other: RecordedProgram) -> bool:
        """Whether one row is an exception: ``other``, recorded with two, is the graph for four rows too."""
        dims = self.batch.dims
        if rows_of(dims, [tensor.shape for tensor in self.inputs]) != 1:
            return False
        more, _ = self._run_larger(grown(self.converter, self.inputs, dims, 4))
        return more is not None and graph_lines(more.graph) == graph_lines(other.graph)


def _not_a_module(found: object) -> CaptureError:
    name = getattr(found, "__name__", "")
    if callable(found) and name.isidentifier():
        kind = "class" if isinstance(found, type) else "function"
        problem = f"is the {kind} {name!r}, not a torch.nn.Module"
        return CaptureError("model", problem, f"call it: {name}()")
    problem = f"is a {type(found).__name__}, not a torch.nn.Module"
    return CaptureError("model", problem, "pass a module")


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise _not_a_module(model)
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                path or "the model",
                "is TorchScript, whose tensors cannot be replaced by ones without data",
                "use the Python module that it was made from",
            )
        if is_compiled(module):
            name = path or "model"
            raise CaptureError(
                path or "the model",
                "is compiled already (torch.compile), which hides its layers",
                f"pass the module that was compiled: {name}._orig_mod instead of {name}",
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise CaptureError(
                name,
                "is not initialized yet, so the model's shapes are unknown (a lazy module)",
                "run the model once on a small input before you hand it to placer",
            )


def _assemble(
    model: nn.Module,
    recording: RecordedProgram,
    aliasing: Aliasing,
    bound: BoundCall,
    capture: _Capture,
) -> Program:
    graph = recording.graph
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    modules = dict(model.named_modules(remove_duplicate=False))
    whole = {
        path: WholeModule(layer=path, reason=_CHECKPOINTED, location=location)
        for path, location in recording.checkpointed.items()
    } | capture.whole
    called = {str(node.target) for node in nodes if node.op in ("call_module", "get_attr")}
    return Program(
        model=model,
        graph=graph,
        order=tuple(node.name for node in nodes),
        layer_of={node.name: recording.layer_of[node.name] for node in nodes},
        state_of={node.name: _state_of(node, modules, recording.constants) for node in nodes},
        mutated_state_of=aliasing.mutated_state_of,
        mutated_inputs=aliasing.mutated_inputs,
        colocated=aliasing.colocated,
        rng_nodes=aliasing.rng_nodes,
        constants=recording.constants,
        constant_paths=tensor_paths(
            model, [(s.path, s.name) for s in recording.guards], recording.constants
        ),
        call=make_call_format(bound, recording.result, capture.batch.dims),
        whole_modules=tuple(
            w
            for w in whole.values()
            if not w.layer or (w.layer in called and not is_torch_leaf(modules[w.layer]))
        ),
        fingerprint=fingerprint_graph(model, graph, capture.forgotten.tensors),
        conditions=Conditions(
            modes=training_flags(model),
            any_batch_size=not capture.fixed_batch_reason,
            reads_rows=capture.reads_rows,
            readings=recording.sizes.readings,
            whole=frozenset(capture.whole),
            guess=capture.guess,
            lines=tuple(graph_lines(graph)),
            guards=recording.guards,
            ignore_device_moves=capture.ignore_device_moves,
            grad=recording.grad,
            hooked_by_forward=capture.forgotten.hooks,
        ),
        fixed_batch_reason=capture.fixed_batch_reason,
        notes=_side_effect_notes(recording),
    )


def _side_effect_notes(recording: RecordedProgram) -> tuple[str, ...]:
    """A sentence for each attribute that forward sets on modules: the placed model does not set it."""
    setters: dict[str, list[str]] = {}
    for path, attribute in recording.side_effects:
        setters.setdefault(attribute, []).append(path or "the model")
    read = {setting.name for setting in recording.guards}
    notes = []
    for attribute, paths in sorted(setters.items()):
        others = f" and of {len(paths) - 1} more" if len(paths) > 1 else ""
        stays = ": every call computes what the first would" if attribute in read else ""
        notes.append(
            f"forward of {paths[0]}{others} sets self.{attribute}; the placed model does not{stays}"
        )
    return tuple(notes)


def _state_of(
    node: fx.Node, modules: Mapping[str, nn.Module], constants: Mapping[str, Tensor]
) -> tuple[str, ...]:
    if node.op not in ("get_attr", "call_module") or node.name in constants:
        return ()
    path = str(node.target)
    if path not in modules:
        return (path,)
    return tuple(name for name, _ in named_state(modules[path], prefix=path))
