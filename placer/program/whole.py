"""A graph of a single node for a model whose own ``forward`` cannot be recorded."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from placer._torch import HOOK_TABLES, is_own_leaf
from placer.errors import CaptureError
from placer.operands import tensors_of_tree
from placer.program.call import (
    arguments_roots,
    call_arguments,
    call_leaves,
    place_arguments,
    placeholder_names,
    rebuild_call,
)
from placer.program.failure import ForwardFailure, locate
from placer.program.fake.converter import GuessData
from placer.program.fingerprint import graph_lines
from placer.program.guards import make_guards, watch_attributes
from placer.program.objects.copying import copy_module
from placer.program.objects.originals import refusing_originals
from placer.program.objects.paths import spell
from placer.program.objects.python_random import keep_random
from placer.program.objects.restore import Change, Snapshot, module_roots, own_context
from placer.program.recording.backward import BackwardHooks
from placer.program.recording.forward import retained_result, stored_at
from placer.program.recording.inside import Inside
from placer.program.recording.reached import Follow, Reached
from placer.program.recording.readings import reading_of_inputs
from placer.program.recording.record import RecordedProgram, recording_modes
from placer.program.recording.recorder import Setup
from placer.program.recording.writer import GraphWriter
from placer.program.result import ResultFormat, flatten_result, is_alike, is_fixed, result_of_values
from placer.program.state import named_state
from placer.program.stored import table_at
from placer.program.targets import WholeRoot
from placer.program.types import AnyNumber


@own_context()
def record_whole(setup: Setup, inputs: Sequence[Tensor], reason: str) -> RecordedProgram:
    """A graph that calls all of the model in one node, a function of its parameters, buffers and inputs.

    ``reason`` says why it cannot be recorded. Raises ``ForwardFailure`` if the model itself fails, and
    ``CaptureError`` if it leaves something behind that a caller could see: the node has a copy of the model.
    """
    converter, bound = setup.converter, setup.bound
    model, fake_model = setup.model, setup.fake_model
    snapshot = Snapshot(module_roots(fake_model), converter.reachable)
    reached = Reached(fake_model, converter.state)
    new_guesses = partial(GuessData, converter.mode, setup.guess, reached.__contains__)
    guesses = new_guesses()
    flags = {name: parameter.requires_grad for name, parameter in fake_model.named_parameters()}
    attributes: set[tuple[str, str]] = set()
    hooks = BackwardHooks(fake_model, converter.reachable, reached, new_guesses)

    def read(path: str, name: str) -> None:
        attributes.add((path, name))

    try:
        with (
            recording_modes(converter),
            Follow(reached),
            guesses,
            watch_attributes(dict(fake_model.named_modules()), read, refusing_originals(model)),
        ):
            arguments = call_arguments(bound, call_leaves(bound, converter.copies(inputs)))
            given = Snapshot(arguments_roots(bound, arguments), root="call")
            args, kwargs = place_arguments(bound, arguments)
            reached.begin((args, kwargs), inside=setup.is_split)
            try:
                with hooks.watching():
                    leaves, result = flatten_result(fake_model.forward(*args, **kwargs))
                inside = reached.end(leaves)
                given_away = [x for x in leaves if isinstance(x, Tensor) and x.retains_grad]
                if setup.is_split and any(not x.is_leaf for x in given_away):
                    raise retained_result(model, f"retains a gradient ({reason})")
                reached.note_replaced(fake_model)
                changes = [*snapshot.changes(), *given.changes()]
                once = set(map(id, _made_once(setup, inputs, changes)))
                others = [change for change in changes if id(change) not in once]
                _refuse_changes(setup, others, reached, reason)
                hooks.run_backward(tensors_of_tree(leaves), inputs)
                if not setup.is_split:
                    _refuse_set_in_backward(setup, hooks.changes, reason)
            finally:
                given.restore()
            _refuse_flags(flags, fake_model, type(model), reason)
    except CaptureError:
        raise
    except Exception as error:
        places = tuple(guesses.places)
        raise ForwardFailure("", locate(error), guessed=guesses.guessed, places=places) from error
    finally:
        snapshot.restore()
    reading = ""
    if guesses.guessed:
        other = GuessData.other(converter, fake_model, setup.guess)
        changes, differs = [], False
        with suppress(Exception):  # these values may be impossible
            changes, _, found = _run_again(setup, inputs, reached, snapshot, other)
            differs = not is_alike(found, (leaves, result))
        if differs:
            raise result_of_values(type(model).__name__, reason)
        others = [change for change in changes if not _may_be_made_once(change)]
        _refuse_changes(setup, others, reached, reason)
        if inside is not None:
            again = partial(_run_again, setup, inputs, reached, snapshot)
            reading = reading_of_inputs(guesses, inside, lambda other: again(other)[1])
        _refuse_flags(flags, fake_model, type(model), reason)
    writer = GraphWriter(converter, fake_model)
    for name, tensor in zip(placeholder_names(bound), inputs, strict=True):
        writer.placeholder(name, tensor)
    names = [name for name, _ in named_state(model)]
    state = [writer.node("get_attr", name) for name in names]
    kept = tuple(x.value if isinstance(x, AnyNumber) else x for x in bound.constants)
    form = replace(bound, leaves=kept)  # keeps no tensor of the caller's
    fixed = {i: leaf for i, leaf in enumerate(leaves) if is_fixed(leaf)}
    call = WholeRoot(
        _skeleton(model), tuple(names), partial(rebuild_call, form), (result.spec, fixed)
    )
    node = writer.node("call_function", call, (*state, *inputs))
    numbers: dict[fx.Node, Any] = {}
    results: list[Any] = list(leaves)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor | int | float):
            results[i] = writer.node("call_function", operator.getitem, (node, i))
            if isinstance(leaf, Tensor):
                writer.bind(leaf, results[i])
            else:
                numbers[results[i]] = leaf
    writer.note_inside(node, inside, reading)
    graph = writer.finish(results, numbers)
    return RecordedProgram(
        graph=graph,
        lines=graph_lines(graph),
        layer_of=dict.fromkeys(writer.layer_of, ""),
        location_of=dict.fromkeys(writer.location_of, ""),
        result=result,
        results=tuple(x.shape if isinstance(x, Tensor) else x for x in leaves),
        written_inside=reached.written,
        changed_in_backward=tuple(hooks.changes),
        gradient_hooks=tuple(hooks.runs),
        readings=writer.readings,
        inside=writer.inside,
        independent=(False,) * len(writer.shapes),
        guards=make_guards(model, attributes),
        shapes=writer.shapes,
    )


def _run_again(
    setup: Setup, inputs: Sequence[Tensor], reached: Reached, snapshot: Snapshot, guess: GuessData
) -> tuple[list[Change], Inside | None, tuple[list[Any], ResultFormat]]:
    """Run the model once more, with other values where it reads them: what it changes, runs and returns."""
    converter, model, bound = setup.converter, setup.fake_model, setup.bound
    arguments = call_arguments(bound, call_leaves(bound, converter.copies(inputs)))
    given = Snapshot(arguments_roots(bound, arguments), root="call")
    try:
        with recording_modes(converter), Follow(reached), guess, keep_random():
            args, kwargs = place_arguments(bound, arguments)
            reached.extend((args, kwargs), inside=setup.is_split)
            leaves, form = flatten_result(model.forward(*args, **kwargs))
            inside = reached.end(leaves)
        return [*snapshot.changes(), *given.changes()], inside, (leaves, form)
    finally:
        given.restore()
        snapshot.restore()


def _refuse_set_in_backward(setup: Setup, changes: Sequence[Change], reason: str) -> None:
    """Raise ``CaptureError`` if a hook that forward puts on a tensor sets something in the model."""
    for change in changes:
        # Objects whose methods are hooks of modules are the user's own.
        if change.root == "model" and not change.path[1].endswith("hooks"):
            raise CaptureError(
                type(setup.model).__name__,
                f"its forward cannot be captured ({reason}), and a hook sets {spell(change.path)} in the "
                "backward, which that of the placed model would not",
                "move the code that cannot be captured into a submodule, or return the tensor and put the "
                "hook on that",
            )


def _skeleton(model: nn.Module) -> nn.Module:
    """``model`` with its tensors on ``meta`` and without its own hooks, which run around the node."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = empty
    skeleton = copy_module(model, memo, keep_objects=True)
    for name in HOOK_TABLES:
        getattr(skeleton, name).clear()
    return skeleton


def _refuse_flags(
    flags: Mapping[str, bool], fake_model: nn.Module, kind: type[nn.Module], reason: str
) -> None:
    """Raise ``CaptureError`` if the model has let a parameter require gradients, or not."""
    changed = [n for n, p in fake_model.named_parameters() if p.requires_grad != flags[n]]
    for name, parameter in fake_model.named_parameters():
        parameter.requires_grad_(flags[name])
    if changed:
        raise CaptureError(
            kind.__name__,
            f"its forward cannot be captured ({reason}), and it changes requires_grad of {changed[0]}",
            "change it before the call, or move the code that cannot be captured into a submodule",
        )


def _made_once(setup: Setup, inputs: Sequence[Tensor], changes: Sequence[Change]) -> list[Change]:
    """Those of ``changes`` that only a first call makes: a list or object in an attribute that was None.

    It holds no tensors, and a second call, which is run here, leaves the same object there.
    """
    found = [each for each in changes if _may_be_made_once(each)]
    if not found:
        return []
    bound, model = setup.bound, setup.fake_model
    leaves = call_leaves(bound, setup.converter.copies(inputs))
    args, kwargs = place_arguments(bound, call_arguments(bound, leaves))
    model.forward(*args, **kwargs)
    return [each for each in found if table_at(model, each.path).get(each.path[-1]) is each.value]


def _may_be_made_once(change: Change) -> bool:
    """Is it a list or object without tensors in an attribute of the model that was None?"""
    kept = change.root == "model" and change.kind == "set" and change.before is None
    plain = isinstance(change.value, bool | int | float | str)
    return kept and not plain and not tensors_of_tree(change.value)


def _refuse_changes(setup: Setup, changes: Sequence[Change], reached: Reached, reason: str) -> None:
    """Raise ``CaptureError`` for a change that a caller could see.

    What the code keeps for itself is none, but for lists and counts that every slice of a batch changes. Nor
    are tensors that do not depend on the inputs, as a grid of anchors, if they collect no gradient: the node
    makes them in its own copy of the model. Buffers and tensors that were there, as a count of the calls,
    may depend on what they were.
    """
    for change in changes:
        tensors = tensors_of_tree(change.value)
        hooks = change.root == "model" and change.path[1].endswith("hooks")
        counts = change.kind != "set" or isinstance(change.before, int | float)
        in_code = change.root == "code" and not tensors and not (setup.is_split and counts)
        before = change.before if isinstance(change.before, Tensor) else None
        again = before is not None and getattr(change.value, "shape", None) == before.shape
        matter = again or any(x in reached or is_own_leaf(x) for x in tensors)
        constant = bool(tensors) and not matter
        if not (hooks or in_code or constant):
            what, remedy = spell(change.path), "return the value"
            if "_buffers" in change.path:
                what = f"the buffer {what}"
                remedy = f"write into the buffer (self.{change.path[-1]}.copy_(…))"
            line = stored_at(setup.converter.reachable.codes, str(change.path[-1]))
            raise CaptureError(
                type(setup.model).__name__,
                f"its forward cannot be captured ({reason}), and it sets {what}{line and f' ({line})'}, "
                "which a call of the placed model would not",
                f"move the code that cannot be captured into a submodule, or {remedy}",
            )
