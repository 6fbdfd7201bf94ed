"""Run forward once on fake tensors, and write down its result and what it leaves behind."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx, nn

from placer._torch import storage_key, without_modes, without_torch_function
from placer.errors import CaptureError
from placer.operands import tensors_of_tree
from placer.program.call import (
    BoundCall,
    arguments_roots,
    call_arguments,
    call_leaves,
    objects_of,
    place_arguments,
    placeholder_names,
)
from placer.program.failure import TraceFailure, locate_function
from placer.program.fake.sizes import RecordedNumber, plain
from placer.program.objects.paths import spell
from placer.program.objects.python_random import forbid_python_random
from placer.program.objects.restore import Change, Snapshot
from placer.program.recording.leaving import (
    Left,
    StoreFailure,
    find_parts,
    flag_of,
    write_changes,
    written_tensor,
)
from placer.program.recording.new_names import refusing_unknown_names
from placer.program.recording.recorder import Recorder
from placer.program.recording.single_node import refuse_changes_besides
from placer.program.result import ResultFormat, flatten_result, note_parts
from placer.program.stored import StateInput, table_at
from placer.program.targets import present_value

_SET_ALIKE = (bool, str, type(None), Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRun:
    """One run of forward: its result, what it leaves behind, and the numbers that were inputs."""

    recorder: Recorder
    result: ResultFormat
    leaves: Sequence[Any]  # of the result, as arguments for the graph's output node
    shapes: Sequence[Any]  # per leaf: the shape of a tensor, or the value
    left: Sequence[Left]
    numbers: Mapping[fx.Node, StateInput]  # the placeholders of numbers


def run_forward(
    recorder: Recorder,
    bound: BoundCall,
    inputs: Sequence[Tensor],
    numbers: Sequence[StateInput],
    before: Snapshot,
) -> ForwardRun:
    """Run the fake model's forward while ``recorder`` watches; ``before`` has the state of model and code.

    Those of ``numbers`` that are arguments of the call, attributes or variables are inputs of the graph.
    Raises ``TraceFailure`` for what a graph cannot express.
    """
    model, writer = recorder.fake_model, recorder.writer
    recorder.before = before
    names = placeholder_names(bound)
    for name, tensor in zip(names, inputs, strict=True):
        writer.placeholder(name, tensor)
    given = call_leaves(bound, inputs)
    put: dict[fx.Node, tuple[StateInput, Any]] = {}
    for each in numbers:
        number = _put(each, recorder, bound, given)
        put[number.node] = each, number
        recorder.given.add(id(number))
    arguments = call_arguments(bound, given)
    args, kwargs = place_arguments(bound, arguments)
    apart = set(map(id, objects_of(bound).values()))  # the caller's own: ``before`` has them
    passed = Snapshot(arguments_roots(bound, arguments), root="call", without=apart)
    flags = recorder.watch_inputs(inputs)
    own = (*inputs, *model.parameters(), *model.buffers())
    part_of = find_parts(arguments_roots(bound, arguments), before, recorder.reachable)
    converter = recorder.setup.converter
    held = [*inputs, *converter.fakes]
    attributes = Snapshot([((), vars(x)) for x in held], without={id(converter.mode)})
    try:
        with refusing_unknown_names(recorder.reachable), forbid_python_random(recorder.generators):
            if isinstance(model, nn.TransformerEncoder):
                result = recorder.call_encoder(type(model).forward, model, args, kwargs)
            else:
                result = getattr(model, bound.method)(*args, **kwargs)
        if bound.method != "forward" and recorder.calls_model:
            raise TraceFailure("", "it calls the model itself", "")
        leaves, form = flatten_result(result, lambda leaf: isinstance(leaf, RecordedNumber))
        with without_torch_function():
            shapes = [x.shape if isinstance(x, Tensor) else plain(x) for x in leaves]
        for leaf in leaves:
            writer.argument(leaf)  # it can be written down
        recorder.check()
        all_changes = [*before.changes(), *passed.changes()]
        refuse_changes_besides(recorder, all_changes)
        changes = [
            change
            for change in all_changes
            if change.place not in recorder.single.changed
            and id(change.value) not in recorder.given
        ]
        _refuse_changed_again(recorder, changes)
        try:
            left = write_changes(changes, writer, recorder.path_of, before, part_of)
        except StoreFailure as failure:
            location = locate_function(type(model.get_submodule(failure.layer)).forward)
            raise TraceFailure(failure.layer, failure.reason, location) from failure
        for index, (name, tensor) in enumerate(zip(names, inputs, strict=True)):
            if storage_key(tensor) in recorder.written:
                node = writer.node("call_function", present_value, (tensor,))
                writer.bind(tensor, node)
                left.append(written_tensor("input", (index,), node, tensor, label=name))
            if tensor.is_leaf and tensor.requires_grad != flags[id(tensor)]:
                left.append(flag_of("input", (index,), tensor.requires_grad))
        left += _changed_flags(model, flags, recorder.reached.flags, recorder.flags.set)
        # At the end, so that an input that is written and returned is one value.
        written_leaves = [writer.argument(leaf) for leaf in leaves]
        kept = leaves, [change.value for change in changes]
        _refuse_attributes(recorder, kept, held, attributes)
        _refuse_leaves(recorder, kept, own)
        _refuse_retained(recorder, kept)
        recorder.run_backward(kept, inputs)
    finally:
        with without_torch_function():
            for parameter in model.parameters():
                parameter.requires_grad_(flags.get(id(parameter), parameter.requires_grad))
    return ForwardRun(
        recorder=recorder,
        result=note_parts(form, result, part_of),
        leaves=written_leaves,
        shapes=shapes,
        left=left,
        numbers={node: each for node, (each, _) in put.items()},
    )


def _refuse_leaves(recorder: Recorder, kept: Any, own: Sequence[Tensor]) -> None:
    """Raise ``TraceFailure`` if forward gives away a tensor that it has made and that gets a gradient.

    The caller would get a copy, without the gradient. ``own`` are inputs and state.
    """
    known = set(map(id, own))
    for tensor in tensors_of_tree(kept):
        own_leaf = tensor.is_leaf and tensor.requires_grad and id(tensor) not in known
        if own_leaf and recorder.writer.makes(tensor):
            layer = recorder.writer.layer_of.get(recorder.writer.node_of(tensor).name, "")
            reason = "it keeps a tensor that it makes and that requires gradients"
            location = locate_function(type(recorder.fake_model.get_submodule(layer)).forward)
            raise TraceFailure(layer, reason, location)


def _refuse_retained(recorder: Recorder, kept: Any) -> None:
    """Raise ``CaptureError`` if forward gives away a tensor whose gradient it has retained."""
    given = set(map(id, tensors_of_tree(kept)))
    for tensor, location in recorder.retained:
        if id(tensor) in given:
            raise retained_result(recorder.model, f"calls retain_grad() ({location})")


def retained_result(model: nn.Module, calls: str) -> CaptureError:
    """The error for a result that would be a copy, and so would not retain the gradient."""
    return CaptureError(
        type(model).__name__,
        f"its forward {calls} and gives the tensor away; the caller would get a copy, without the gradient",
        "put a backward hook on the module that makes it",
    )


def _refuse_attributes(recorder: Recorder, values: Any, held: Any, before: Snapshot) -> None:
    """Raise ``CaptureError`` if forward has changed attributes of ``held`` tensors or of those in ``values``.

    Programs make other tensors. ``before`` has the attributes of the ``held`` ones, of inputs and the model.
    """
    with without_modes(), without_torch_function():  # it is no operation of forward
        (fake,) = recorder.setup.converter.copies([torch.empty(0)])
    known = set(map(id, [*held, *recorder.setup.converter.fakes]))
    made = [x for x in tensors_of_tree(values) if isinstance(x, type(fake)) and id(x) not in known]
    changed = [change.path for change in before.changes()]
    for path in [*changed, *((name,) for tensor in made for name in vars(tensor))]:
        if path[0] not in vars(fake):
            raise CaptureError(
                type(recorder.fake_model).__name__,
                f"its forward sets the attribute {spell(path)!r} on a tensor that the caller sees; "
                "it would be lost",
                "return it, or keep it in an attribute of the model",
            )


_STORE_ATTR = dis.opmap["STORE_ATTR"]


@functools.cache
def stored_names(code: CodeType) -> frozenset[str]:
    """The names of attributes to which ``code`` assigns."""
    if _STORE_ATTR not in code.co_code[::2]:  # as in most code; disassembling takes long
        return frozenset()
    found = dis.get_instructions(code)
    return frozenset(str(x.argval) for x in found if x.opname == "STORE_ATTR")


def stored_at(codes: Iterable[CodeType], name: str) -> str:
    """``file.py:line`` where one of ``codes``, not a constructor, assigns to an attribute ``name``, or ""."""
    for code in codes:
        for each in dis.get_instructions(code) if code.co_name != "__init__" else ():
            if each.opname == "STORE_ATTR" and each.argval == name and each.positions:
                return f"{code.co_filename}:{each.positions.lineno}"
    return ""


def _refuse_changed_again(recorder: Recorder, changes: Sequence[Change]) -> None:
    """Raise ``TraceFailure`` if code that is checkpointed, which the backward runs again, changes something.

    It may set flags and tensors, which it then sets to the same.
    """
    codes = recorder.codes_again.values()
    names = {name for code in codes for name in (*code.co_names, *code.co_freevars)}
    found = [
        (change.path[0] if change.root == "model" else "", change.path)
        for change in changes
        if names.intersection(map(str, change.path))
        and ("_buffers" in change.path or not isinstance(change.value, _SET_ALIKE))
    ]
    found += [
        (path, (path, name))
        for path, module in recorder.fake_model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and storage_key(buffer) in recorder.written_again
    ]
    for layer, path in found:
        reason = f"it changes {spell(path)} in code that it checkpoints, which backward runs again"
        location = locate_function(type(recorder.fake_model.get_submodule(layer)).forward)
        if layer:
            raise TraceFailure(layer, reason, location)
        raise CaptureError(
            type(recorder.fake_model).__name__,
            f"{reason} ({location})",
            "change it outside of the code that is checkpointed",
        )


def _put(each: StateInput, recorder: Recorder, bound: BoundCall, given: list[Any]) -> Any:
    """Put a recorded number where forward reads ``each``; returns it."""
    if each.argument:
        position = bound.leaf_names.index(each.argument)
        given[position] = recorder.number_input(each.name, given[position])
        return given[position]
    if each.variable is not None:
        number = recorder.number_input(each.name, plain(each.variable.read()))
        each.variable.write(number)
        return number
    table = table_at(recorder.fake_model, each.path)
    table[each.path[-1]] = recorder.number_input(each.name, plain(table[each.path[-1]]))
    return table[each.path[-1]]


def _changed_flags(
    model: nn.Module, flags: Mapping[int, bool], used: Mapping[str, bool], named: Set[int]
) -> list[Left]:
    """The parameters that forward lets require gradients, or not: before a call of the placed model.

    ``named`` are the ids of those whose flag it sets, which may be what it was. ``used``: whether
    parameters required gradients when a module that stays whole read them. Raises ``CaptureError`` if
    that is another flag.
    """
    for name, parameter in model.named_parameters():
        if used.get(name, parameter.requires_grad) != parameter.requires_grad:
            layer, _, own = name.rpartition(".")
            raise CaptureError(
                layer or type(model).__name__,
                f"its forward changes requires_grad of {own} after it has used it",
                "change it before it is used, or outside of forward",
            )
    return [
        flag_of("model", (path, "_parameters", name), parameter.requires_grad)
        for path, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
        and (
            id(parameter) in named
            or flags.get(id(parameter), parameter.requires_grad) != parameter.requires_grad
        )
    ]
