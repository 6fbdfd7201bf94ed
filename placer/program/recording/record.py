"""Record what a model computes: run it once on fake tensors and record every torch call.

`recorder` intercepts the calls, and `writer` writes the graph. This file prepares the run, restores the
modules afterwards, and attributes failures to the innermost module.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor

from placer._torch import storage_key
from placer.errors import CaptureError, causes
from placer.operands import tensors_of_tree
from placer.program.call import objects_of, placeholder_names
from placer.program.failure import (
    ForwardFailure,
    SetForLayer,
    TraceFailure,
    describe,
    end_frames,
    leads_to,
    locate,
    method_not_captured,
)
from placer.program.fake.converter import FakeConverter, fake_execution
from placer.program.fingerprint import graph_lines, varying_lines
from placer.program.guards import PLAIN_VALUES, AttributeGuard, tensor_paths
from placer.program.objects.paths import Path, attribute_of, spell
from placer.program.objects.python_random import PythonRandomDraw
from placer.program.objects.reachable import (
    ReachableState,
    Reference,
    find_reachable_state,
    is_iterator,
)
from placer.program.objects.restore import MISSING, Change, Snapshot, module_roots, own_context
from placer.program.recording.backward import HookRun
from placer.program.recording.forward import ForwardRun, run_forward, stored_names
from placer.program.recording.inside import Inside
from placer.program.recording.leaving import Left, written_tensor
from placer.program.recording.recorder import Recorder, Setup
from placer.program.recording.watched import watching
from placer.program.recording.writer import CPU
from placer.program.result import ResultFormat
from placer.program.size_log import SizeLog
from placer.program.stored import StateInput, Stored, set_at
from placer.program.targets import present_value
from placer.program.types import Answers
from placer.program.variable_guards import settings_guards, variable_guards


def without_numbers(lines: Iterable[str]) -> list[str]:
    """The ``lines`` of a graph, whatever the sizes."""
    return [re.sub(r"\d+", "", line) for line in lines]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedProgram:
    """What was recorded in one run of a model on fake tensors; tables are keyed by node name."""

    graph: fx.Graph
    lines: tuple[str, ...]  # the graph as text, by `graph_lines`
    layer_of: dict[str, str]
    location_of: dict[str, str]
    constants: dict[str, Tensor] = field(default_factory=dict)
    result: ResultFormat
    results: tuple[Any, ...]  # per leaf of the output node: the shape of a tensor, or the value
    state: tuple[StateInput, ...] = ()  # inputs of the graph after those of the call
    # What forward leaves behind; its leaves follow those of the result
    stored: tuple[Stored, ...] = ()
    changed_inside: tuple[Change, ...] = ()  # what single nodes change, which they do in every call
    read_elsewhere: tuple[str, ...] = ()  # attributes among it that recorded code reads
    changing: frozenset[str] = frozenset()  # paths of the single nodes that do
    written_inside: Mapping[str, bool]  # state that they write -> does it depend on the batch?
    replaced: tuple[str, ...] = ()  # buffers that forward replaces
    # Known only if the batch is to be split, as is the next
    changed_in_backward: tuple[Change, ...]
    gradient_hooks: tuple[HookRun, ...]
    numbers: tuple[StateInput, ...] = ()  # numbers of which any will do
    readings: Mapping[str, str]  # single nodes that decide by values of their inputs -> line
    inside: Mapping[str, Inside]  # single nodes -> the operators that they run
    # Per node: it is of a single node, but does not depend on its inputs
    independent: tuple[bool, ...]
    guards: tuple[AttributeGuard, ...]  # the plain attributes that forward read
    # Path of a module under activation checkpointing -> source line
    checkpointed: dict[str, str] = field(default_factory=dict)
    answers: Answers = ()  # to questions about gradients
    asked: frozenset[str] = frozenset()  # names of attributes that inputs do not have
    sizes: SizeLog = field(default_factory=SizeLog)
    packs: bool = False  # forward packs sequences
    shapes: tuple[Any, ...]  # per node: the shape of its tensor, its number, or None

    def operations(self) -> list[Any]:
        """What runs, and which flags of tensors are set, whatever the sizes."""
        return [
            *without_numbers(self.lines),
            *((each.path, each.flag) for each in self.stored if each.flag is not None),
        ]

    def first_difference(
        self, other: RecordedProgram, whole: Collection[str]
    ) -> tuple[str, str] | None:
        """The module where the graph of ``other`` first differs, and the line; None if it does not.

        A module that is a single node, as those at the paths ``whole`` are, is in the module around it.
        """
        if self.lines == other.lines and self.result == other.result:
            return None
        nodes = list(self.graph.nodes)
        index = next(
            (i for i, (a, b) in enumerate(zip(self.lines, other.lines, strict=False)) if a != b),
            min(len(self.lines), len(other.lines)) - 1,
        )
        node = nodes[min(index, len(nodes) - 1)]
        layer = self.layer_of.get(node.name, "")
        if node.op == "call_module" or layer in whole:
            layer = layer.rpartition(".")[0]
        return layer, self.location_of.get(node.name, "")


class UnlocatedRandomDraw(TraceFailure):
    """Forward drew random numbers from Python or numpy; the run did not find out in which module."""


@own_context()
def record_model(setup: Setup, inputs: Sequence[Tensor], *, named: bool = True) -> RecordedProgram:
    """Run the fake copy of a model on fake ``inputs`` and record what it does; it is restored afterwards.

    With ``named``, equal graphs have equal node names, which a graph that is only compared does not
    need. Raises ``TraceFailure``, which names the innermost module that cannot be recorded;
    ``ForwardFailure`` if the model itself fails; and ``CaptureError`` if it moves tensors to several
    devices, unless they are ignored.
    """
    snapshot = Snapshot(module_roots(setup.fake_model), setup.converter.reachable)
    try:
        run, setup = _run_with_numbers(setup, inputs, snapshot)
        recorder, writer = run.recorder, run.recorder.writer
        _refuse_iterators(recorder)
        left, replaced = _replace_buffers(recorder, setup, run.left)
        following = _Next(left, (), (), ())
        if any(map(_matters_next, left)) or any(snapshot.changes()):
            following = _compare_with_next(setup, inputs, run, left)
            left = following.left
        state, written = _state_inputs(run, setup, left)
        left = [*left, *written]
        results = [*run.leaves, *(leaf for each in left for leaf in each.leaves)]
        sizes = recorder.sizes.log()
        results = [writer.inputs_of.get(x, x) if isinstance(x, fx.Node) else x for x in results]
        graph = writer.finish(results, recorder.sizes.values, named=named)
    finally:
        snapshot.restore()
    changed = recorder.single.changed.values()
    read_elsewhere = recorder.attributes & {
        attribute_of(x.path) for x in changed if x.root == "model"
    }
    recorder.attributes |= _set_alike(recorder, left) | _with_attributes(recorder)
    names = {node.name for node in graph.nodes}
    made = set(map(id, recorder.made_tensors))
    held = [each.tensor for each in state if each.tensor is not None]
    found = [
        x for x in (*writer.constants.values(), *held, *recorder.tensors_read) if id(x) not in made
    ]
    return RecordedProgram(
        graph=graph,
        lines=graph_lines(graph),
        layer_of={k: v for k, v in writer.layer_of.items() if k in names},
        location_of={k: v for k, v in writer.location_of.items() if k in names},
        constants={k: v for k, v in writer.constants.items() if k in names},
        result=run.result,
        results=(*run.shapes, *(shape for each in left for shape in each.shapes)),
        state=state,
        stored=tuple(each.stored for each in left),
        changed_inside=tuple(changed),
        read_elsewhere=tuple(map(spell, sorted(read_elsewhere))),
        changing=frozenset(recorder.single.changing),
        written_inside=recorder.single.written,
        replaced=replaced,
        changed_in_backward=tuple(recorder.backward.changes),
        gradient_hooks=tuple(recorder.backward.runs),
        numbers=setup.numbers,
        independent=writer.independent,
        readings=writer.readings,
        inside=writer.inside,
        guards=(
            *recorder.guards(following.unread, setup.numbers),
            *variable_guards(setup.model, setup.converter.reachable, found, recorder.tensors_read),
            *settings_guards(
                setup.converter.reachable.read_by(recorder.codes.values()),
                [
                    *(x.change for x in left if x.change and x.change not in following.once),
                    *following.added,
                ],
                setup.numbers,
            ),
        ),
        checkpointed=recorder.checkpointed,
        answers=recorder.flags.answers((*setup.bound.tensors, *setup.model.parameters())),
        asked=frozenset(recorder.asked),
        sizes=sizes,
        packs=recorder.packs,
        shapes=writer.shapes,
    )


def _refuse_iterators(recorder: Recorder) -> None:
    """Raise ``CaptureError`` if forward reads an iterator, which a recorded program would not advance."""
    ran = recorder.codes.keys()
    names = [each.name for each in recorder.reachable.iterators if id(each.code) in ran]
    names += [
        spell(place)
        for place in sorted(recorder.attributes)
        if is_iterator(vars(recorder.fake_model.get_submodule(place[0])).get(place[1]))
    ]
    for name in names:
        raise CaptureError(
            name,
            "is an iterator, which forward may advance, and a recorded program would not",
            "keep a number or a list, or pass what the iterator gives (next(…)) as an argument",
        )


def _set_alike(recorder: Recorder, left: Sequence[Left]) -> set[tuple[str, str]]:
    """The attributes that forward may have set to the plain values that they had: by module path and name.

    In a later call they may have others, which such a program would leave as they are.
    """
    stored = set().union(*map(stored_names, recorder.codes.values()))
    changed = {each.stored.path[:2] for each in left if each.stored.root == "model"}
    return {
        (path, name)
        for path, module in recorder.fake_model.named_modules()
        for name in stored & vars(module).keys()
        if (path, name) not in changed and isinstance(vars(module)[name], PLAIN_VALUES)
    }


def _with_attributes(recorder: Recorder) -> set[tuple[str, str]]:
    """The parameters and buffers of which forward may read an attribute that the user has set on them.

    Raises ``CaptureError`` if it may read one of an input.
    """
    codes = recorder.codes.values()
    named = {name for code in codes for name in (*code.co_names, *code.co_consts)}
    bound = recorder.setup.bound
    for argument, tensor in zip(placeholder_names(bound), bound.tensors, strict=True):
        refuse_attributes(argument, tensor, named)
    return {
        (path, name)
        for path, module in recorder.model.named_modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and not named.isdisjoint(vars(tensor))
    }


def refuse_attributes(argument: str, tensor: Tensor, names: Set[Any]) -> None:
    """Raise ``CaptureError`` if the input ``tensor`` has an attribute that is among ``names``."""
    for name in sorted(names & vars(tensor).keys()):
        raise CaptureError(
            argument,
            f"has an attribute {name!r}, which forward may read: the captured graph gets the tensor only",
            "give forward an argument for it",
        )


def run_once(
    setup: Setup, inputs: Sequence[Tensor], before: Snapshot, *, locate_draws: bool = True
) -> ForwardRun:
    """Run and record the model once; ``before`` has its state. The model keeps what forward changes."""
    recorder = Recorder(setup)
    try:
        run = _run(recorder, setup, inputs, before, locate_draws=locate_draws)
        if recorder.flags.needs_disabled:
            before.restore()
            setup = replace(setup, disabled=True)
            return run_once(setup, inputs, before, locate_draws=locate_draws)
        return run
    except TraceFailure as failure:
        method = setup.bound.method
        if method == "forward" or failure.layer:
            raise
        raise method_not_captured(
            method, failure.reason, failure.location, calls_layers=recorder.calls_layers
        ) from failure.__cause__


def _run(
    recorder: Recorder,
    setup: Setup,
    inputs: Sequence[Tensor],
    before: Snapshot,
    *,
    locate_draws: bool,
) -> ForwardRun:
    recorder.locate_draws = locate_draws
    given = setup.converter.copies(inputs)
    try:
        with recording_modes(setup.converter, grad=not setup.disabled), recorder.watching():
            return run_forward(recorder, setup.bound, given, setup.numbers, before)
    except (TraceFailure, CaptureError):
        raise
    except Exception as error:
        if recorder.devices.error is not None:
            raise recorder.devices.error from None
        failure = recorder.single.failure
        if failure is not None and leads_to(error, failure.__cause__):
            raise failure from error
        if recorder.failed_in is not None and leads_to(error, recorder.failed_in[0]):
            raise TraceFailure(recorder.failed_in[1], describe(error), locate(error)) from error
        kind = UnlocatedRandomDraw if isinstance(error, PythonRandomDraw) else TraceFailure
        raise kind("", describe(error), locate(error)) from error


def _run_with_numbers(
    setup: Setup, inputs: Sequence[Tensor], before: Snapshot
) -> tuple[ForwardRun, Setup]:
    """Run forward with numbers as inputs: those of ``setup``, and those that forward itself changes.

    A number at which Python code looks, and not only arithmetic, is none: it is part of the program. So it is
    if forward does something else with an ordinary number, as after ``type(number) is int``.
    """
    ordinary = replace(setup, numbers=())
    try:
        run = run_once(ordinary, inputs, before, locate_draws=False)
    except UnlocatedRandomDraw as failure:
        # Run again and compare the generators' states around every module. That is slow, so it
        # is done only now.
        before.restore()
        run_once(ordinary, inputs, before)
        raise TraceFailure("", f"{failure.reason}, but not in every call", "") from failure
    code = setup.converter.reachable
    found = (_changed_number(each, code) for each in run.left)
    changed = [each for each in found if each is not None]
    numbers = list(dict.fromkeys((*setup.numbers, *changed)))
    expected = _operations(run) if numbers else []
    while numbers:
        before.restore()
        setup = replace(setup, numbers=tuple(numbers))
        try:
            run = run_once(setup, inputs, before, locate_draws=False)
        except (TraceFailure, ForwardFailure) as failure:
            end_frames(failure)
            read = set(numbers)
        else:
            read = {each for node, each in run.numbers.items() if run.recorder.reads_number(node)}
            if not read and _operations(run) == expected:
                return run, setup
            read = read or set(numbers)
        if read.issuperset(numbers):  # one of those that are given may be why
            read = read.difference(changed) or read
        numbers = [each for each in numbers if each not in read]
    if setup.numbers:
        before.restore()
        run = run_once(ordinary, inputs, before, locate_draws=False)
    return run, ordinary


def _operations(run: ForwardRun) -> list[str]:
    """What forward does with tensors, as text in which all numbers are values."""
    leaves = [*run.leaves, *(leaf for each in run.left for leaf in each.leaves)]
    numbers = run.recorder.sizes.values
    tensors = [leaf for leaf in leaves if isinstance(leaf, fx.Node) and leaf not in numbers]
    return varying_lines(
        run.recorder.writer.graph, tensors, {node: repr(value) for node, value in numbers.items()}
    )


def _changed_number(left: Left, code: ReachableState) -> StateInput | None:
    """The number in an attribute or in a variable of ``code`` that forward has changed, or None."""
    change = left.change
    if change is None or change.kind != "set" or change.root not in ("model", "code"):
        return None
    kind = type(change.before)
    if kind not in (int, float) or not isinstance(change.value, kind):
        return None
    name = spell(change.path)
    if change.root == "model":
        return StateInput(name=name, path=change.path, kind=kind)
    holder = change.holder
    if not isinstance(holder, Reference):
        container = next(each for each in code.containers if each.value is holder)
        holder = replace(container, keys=(change.path[-1],))
    return StateInput(name=name, variable=holder, kind=kind)


def _state_inputs(
    run: ForwardRun, setup: Setup, left: Sequence[Left]
) -> tuple[tuple[StateInput, ...], list[Left]]:
    """The inputs of the graph that are no tensors of the call, and the tensors of the state that are written.

    Constants are made inputs where they are more: tensors that forward replaces or writes to, and tensors
    with a graph, whose gradients must go on.
    """
    writer = run.recorder.writer
    used = [each for node, each in run.numbers.items() if node.users]
    replaced = {each.stored.path for each in left if each.stored.root == "model"}
    paths = tensor_paths(setup.model, run.recorder.attributes, writer.constants)
    written: list[Left] = []
    for node in [node for node in writer.graph.nodes if node.name in writer.constants]:
        original, path = writer.constants[node.name], paths.get(node.name)
        fake = writer.tensor_of(node)
        # A view of a tensor from outside is one of the fake tensor for which torch takes it.
        taken = fake if isinstance(fake, FakeTensor) else setup.converter.mode.from_tensor(fake)
        is_written = not run.recorder.written.isdisjoint({storage_key(fake), storage_key(taken)})
        if node in run.recorder.made or not (
            is_written
            or original.requires_grad
            or (path is not None and any(path[: len(x)] == x for x in replaced))
        ):
            continue
        name = (
            f"a tensor of {writer.layer_of[node.name] or 'the model'}"
            if path is None
            else spell(path)
        )
        state = StateInput(name=name, path=path or (), tensor=None if path else original)
        used.append(state)
        placeholder = writer.from_state(node, name)
        if is_written:
            present = writer.node("call_function", present_value, (placeholder,))
            writer.bind(fake, present)
            root, where = ("model", path) if path else ("code", (name, 0))
            holder = None if path else [original]
            written.append(written_tensor(root, where, present, fake, label=name, holder=holder))
    return tuple(used), written


def _matters_next(left: Left) -> bool:
    """May a second call tell more? Of arguments, whether a list that was empty is extended or filled anew."""
    change, stored = left.change, left.stored
    if change is None:
        return False
    return stored.root != "call" or (stored.kind == "extend" and not change.before)


class _Next(NamedTuple):
    """What a second call does, which begins in the state that the first has left."""

    left: list[Left]
    unread: tuple[Path, ...]  # containers of the model that forward only adds to, or fills anew
    once: tuple[Change, ...]  # what only the first call adds to lists; the next is recorded again
    added: tuple[Change, ...]  # what single nodes add to containers that they do not read


def _compare_with_next(
    setup: Setup, inputs: Sequence[Tensor], run: ForwardRun, left: list[Left]
) -> _Next:
    """Run once more from the state that the first run has left.

    That tells how lists change: one that was empty before may be extended by every call, or filled anew.
    Raises ``CaptureError`` if forward reads what an earlier call has left in a variable of its code.
    """
    first, second = run.recorder, None
    keys = {(each.stored.root, each.stored.path) for each in left}
    for each in left:
        for tensor in tensors_of_tree(each.change.value) if each.change is not None else ():
            first.keep(tensor)
    reachable = setup.converter.reachable
    # What forward has put into variables may hold containers that the next call fills.
    made = find_reachable_state(setup.fake_model, objects_of(setup.bound))
    inside = [change for change in first.single.changed.values() if change.root == "code"]
    changes = [*(x.change for x in left if x.change is not None), *inside]
    with watching(changes, setup.fake_model, reachable) as containers:
        before = Snapshot(module_roots(setup.fake_model), made)
        try:
            second = run_once(setup, inputs, before, locate_draws=False)
        except (TraceFailure, ForwardFailure, CaptureError) as failure:
            if any(isinstance(error, SetForLayer) for error in causes(failure, implicit=True)):
                raise
            end_frames(failure)
    cached = all(map(first.is_cache, left))
    lines = first.lines(run.leaves, constants=not cached)
    repeats = second is not None and lines == second.recorder.lines(
        second.leaves, constants=not cached
    )
    following = {(x.stored.root, x.stored.path): x for x in (() if second is None else second.left)}
    once: list[Change] = []
    # What the model makes at its first call, and then reads: the next call is recorded again.
    makes = any(
        each.stored.kind == "set" and attribute_of(each.stored.path) in first.attributes
        for each in left
        if each.stored.root == "model" and ("model", each.stored.path) not in following
    )
    for each in left:
        key = each.stored.root, each.stored.path
        number = _changed_number(each, reachable) in setup.numbers
        silent = number or first.is_cache(each) or not containers.was_read(key)
        if second is not None and each.stored.kind == "extend" and key not in following:
            once += [] if each.change is None else [each.change]
        elif second is not None and not makes:
            silent = silent and _is_left_again(each, following.get(key), run, second)
        if each.stored.root == "code" and not (makes or (repeats and silent)):
            raise _read_again(each)
    for key, other in following.items():
        if other.stored.root == "code" and key not in keys:
            raise _read_again(other)
    if second is not None:
        kinds = {key: x.stored.kind for key, x in following.items()}
        left = [
            replace(x, stored=replace(x.stored, kind="items"))
            if x.stored.kind == "extend"
            and kinds.get((x.stored.root, x.stored.path)) == "items"
            and x.change is not None
            and not x.change.before
            else x
            for x in left
        ]
    added = tuple(filter(containers.was_added_to, inside)) if repeats else ()
    return _Next(left, containers.unread() if repeats else (), tuple(once), added)


def _is_left_again(
    left: Left, following: Left | None, first: ForwardRun, second: ForwardRun
) -> bool:
    """Does the second call leave there what the first has left? What is set to the same is no change.

    A new entry need not be: the next call is recorded again, as its guards see the entry.
    """
    if left.change is not None and left.change.before is MISSING:
        return True
    if following is None:
        return left.stored.kind != "extend"
    if (
        "set" in (left.stored.kind, following.stored.kind)
        and left.stored.kind != following.stored.kind
    ):
        return False
    if left.stored.kind == "update":  # a set does not grow by what it has
        return not following.leaves
    found, expected = (
        run.recorder.lines([*each.leaves], constants=True)[-1]
        for run, each in ((second, following), (first, left))
    )
    return found == expected


def _read_again(left: Left) -> CaptureError:
    """The error for a variable of which forward reads what an earlier call has left there."""
    return CaptureError(
        left.stored.name,
        "is set by forward, which reads in the next call what it has set there",
        "keep it in an attribute of the model, or pass it as an argument and return it",
    )


def _replace_buffers(
    recorder: Recorder, setup: Setup, left: Sequence[Left]
) -> tuple[list[Left], tuple[str, ...]]:
    """Record each buffer that forward replaced by another tensor as a copy into the buffer.

    Returns all other changes, among them buffers that require a gradient now, and the names of the buffers.
    Raises ``TraceFailure`` if the old tensor stays in use, or the new one is also another buffer's.
    """
    first, last = (
        Counter(id(x) for module in model.modules() for x in module._buffers.values())
        for model in (setup.model, setup.fake_model)
    )
    others, replaced = [], dict[str, fx.Node]()
    for each in left:
        change = each.change
        name = attribute_of(each.stored.path) if each.stored.root == "model" else ("", "")
        if change is None or change.root != "model" or change.path[1] != "_buffers":
            others.append(each)
            continue
        path, attribute = name
        before = setup.model.get_submodule(path)._buffers.get(attribute)
        now = setup.fake_model.get_submodule(path)._buffers.get(attribute)
        if (
            before is None
            or now is None
            or change.kind == "move"
            or now.requires_grad
            or (now.shape, now.dtype) != (before.shape, before.dtype)
        ):
            others.append(each)
        else:
            full = f"{path}.{attribute}".lstrip(".")
            written = storage_key(change.before) in recorder.written
            if written or first[id(before)] > 1 or last[id(now)] > 1:
                reason = f"it replaces the buffer {full}, whose tensor it also writes or shares"
                raise TraceFailure(path, reason, "")
            replaced[full] = each.leaves[0]
    recorder.writer.replace_buffers(replaced)
    return others, tuple(replaced)


@contextmanager
def replaced_state(
    setup: Setup, state: Sequence[StateInput], tensors: Sequence[Tensor]
) -> Iterator[None]:
    """In this block, the fake model holds ``tensors``, of other sizes, where it holds ``state``."""
    undo: list[Any] = []
    converter = setup.converter
    try:
        for each, tensor in zip(state, tensors, strict=False):
            original = each.read(setup.model, {})
            if each.path and converter.tensor(original) is not tensor:
                before = converter.tensor(original)
                set_at(setup.fake_model, each.path, tensor)
                converter.register(tensor, original)
                undo.append((each.path, before, original))
        yield
    finally:
        for path, before, original in undo:
            set_at(setup.fake_model, path, before)
            converter.register(before, original)


@contextmanager
def recording_modes(converter: FakeConverter, *, grad: bool = True) -> Iterator[None]:
    """The modes of a recording: gradients on or off whatever the caller's mode, and fake CPU tensors."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(converter.mode)
        stack.enter_context(fake_execution())
        stack.enter_context(converter.isolated_caches())
        # Entered only if needed: it slows every torch function.
        if torch.get_default_device() != CPU:
            stack.enter_context(CPU)
        yield
