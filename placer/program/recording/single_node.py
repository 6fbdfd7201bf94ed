"""Run a module that becomes a single node of the graph: what it calls is not recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map_only

from placer._torch import ALL_HOOK_TABLES, is_own_leaf, without_torch_function
from placer.operands import tensors_of_tree
from placer.program.failure import (
    ForwardFailure,
    SetForLayer,
    TraceFailure,
    Untraceable,
    locate,
    locate_caller,
)
from placer.program.fake.converter import GuessData
from placer.program.fake.packed import assume_sizes, packed_sequences
from placer.program.leaves import is_torch_leaf, must_stay_whole
from placer.program.objects.hook_table import HookTable
from placer.program.objects.paths import Path, spell, walk
from placer.program.objects.python_random import keep_random
from placer.program.objects.restore import (
    MISSING,
    Change,
    Snapshot,
    has_same_contents,
    hook_owners,
    is_same,
    module_roots,
)
from placer.program.recording.inside import Inside
from placer.program.recording.readings import reading_of_inputs
from placer.program.recording.writer import executable
from placer.program.result import flatten_result, is_alike
from placer.program.targets import CallInModes, Checkpointed, Modes, call_module

# Parts of modules that other rules are for: modes, weights and hooks.
_NOT_READ = frozenset(("training", "_parameters", "_modules", *ALL_HOOK_TABLES))

# What a module may return that depends on the values of tensors, and that a node does not return again.
_VALUES = (bool, int, float, str, np.ndarray, np.generic)

if TYPE_CHECKING:
    from placer.program.recording.recorder import Recorder


@dataclass(slots=True)
class SingleNodes:
    """What the single nodes of a recording have done so far.

    ``changed`` and ``states`` are by place: what they have changed, which they do again in every call, and
    what was there before the first and after the last of them. ``changing`` are the paths of those that do.
    ``written`` is the state that they write, and whether it depends on their inputs. ``ran_code``: one has
    run code that is not torch's. ``failure`` is that of the last one that failed.
    """

    changed: dict[tuple[int, Any], Change] = field(default_factory=dict)
    states: dict[tuple[int, Any], tuple[Any, Any]] = field(default_factory=dict)
    changing: set[str] = field(default_factory=set)
    written: dict[str, bool] = field(default_factory=dict)
    ran_code: bool = False
    failure: ForwardFailure | None = None


def call_single_node(
    recorder: Recorder,
    original: Callable[..., Any],
    path: str,
    module: nn.Module,
    args: Any,
    kwargs: Any,
) -> Any:
    """Run the module at ``path``, and let ``recorder`` write one node for it."""
    writer = recorder.writer
    node_args, node_kwargs = writer.argument(args), writer.argument(kwargs)
    guess = GuessData(writer.converter.mode, recorder.setup.guess, recorder.reached.__contains__)
    recorder.paused = True
    plain_layer = is_torch_leaf(module) and not must_stay_whole(module)
    reading = ""
    before, removes_others, differs = None, False, False
    given = executable(args), executable(kwargs)
    _refuse_changes_before(recorder, path, module, is_plain=plain_layer)
    containers = Snapshot([((), given)] if not plain_layer else (), root="call")
    if not plain_layer:
        before = Snapshot(_roots(recorder, path, module), recorder.reachable)
        recorder.single.ran_code = True
    try:
        # Layers of torch draw random numbers from torch only, and none on fake tensors.
        with guess, nullcontext() if is_torch_leaf(module) else keep_random():
            for packed in packed_sequences((args, kwargs)):
                assume_sizes(packed)
            recorder.reached.begin(
                (args, kwargs), inside=recorder.setup.is_split and not plain_layer
            )
            value = original(module, *given[0], **given[1])
            inside = recorder.reached.end(value)
        if before is not None:
            recorder.reached.note_replaced(module, path)
            removes_others = _note_changes(recorder, path, before)
            if inside is not None:
                inside.note_flags(before.changes())
        if guess.guessed:
            call = partial(original, module)
            # These are the values that its buffers have, or other guesses for a model without data.
            other = GuessData.other(writer.converter, module, recorder.setup.guess)
            roots = _roots(recorder, path, module)
            with suppress(Exception):  # they may be impossible
                # To see what it then writes and returns.
                _, again = _run_again(recorder, call, roots, args, kwargs, other)
                differs = not is_alike(flatten_result(again), flatten_result(value))
            if not is_torch_leaf(module):
                reading = find_reading(recorder, guess, inside, call, roots, args, kwargs)
    except Exception as error:
        location = locate(error) or locate_caller()
        failure = ForwardFailure(path, location, guessed=guess.guessed, places=tuple(guess.places))
        failure.__cause__ = error
        recorder.single.failure = failure
        raise
    finally:
        recorder.paused = False
    made = {type(x).__name__ for x in tree_iter(value) if guess.guessed and isinstance(x, _VALUES)}
    if differs or made:
        kind = ", ".join(sorted(made)) or "a container or object"
        with recorder.refusing():
            raise Untraceable(f"{path} returns something that values of tensors decide ({kind})")
    if any(isinstance(each.holder, dict | list) for each in containers.changes()):
        with recorder.refusing():
            raise Untraceable(f"{path} changes a dict or list that it is given")
    if removes_others:
        with recorder.refusing():
            raise Untraceable(f"a hook of {path} removes one of another layer")
    function = _way_of_calling(recorder, path, module, args, kwargs)
    if function is not None:
        reference = writer.node("get_attr", path, layer=path)
        node_args = (reference, *node_args)
        node = recorder.record("call_function", function, node_args, node_kwargs, value, layer=path)
    else:
        node = recorder.record("call_module", path, node_args, node_kwargs, value, layer=path)
    writer.note_inside(node, inside, reading)
    recorder.single.written |= recorder.reached.written
    for tensor in tensors_of_tree(value):
        if tensor not in recorder.reached:
            writer.of_no_input.add(writer.node_of(tensor))
    return value


def _roots(recorder: Recorder, path: str, module: nn.Module) -> list[tuple[Path, Any]]:
    """What a module can change by itself, as roots of a `Snapshot`."""
    return [*module_roots(module, path), *hook_owners(module, path, recorder.path_of)]


def _way_of_calling(
    recorder: Recorder, path: str, module: nn.Module, args: Any, kwargs: Any
) -> Callable[..., Any] | None:
    """The target for a node that does not just call the module; None if it does."""
    function: Any = None if is_torch_leaf(module) else recorder.checkpointing()
    if function is not None and recorder.reentrant is not None:
        own = set(map(id, tree_iter((args, kwargs))))
        others = [x for x in recorder.reentrant if isinstance(x, Tensor) and id(x) not in own]
        if any(x.requires_grad for x in others):
            function = Checkpointed(use_reentrant=True, differentiated=True)
    if function is None and Modes.current() != recorder.modes:
        function = call_module
    training = tuple(each.training for each in module.modules())
    if training != tuple(
        recorder.training.get(id(each), each.training) for each in module.modules()
    ):
        if function not in (None, call_module):
            with recorder.refusing():
                raise Untraceable(f"it checkpoints {path}, whose mode it has changed")
        function = CallInModes(training)
    found: Callable[..., Any] | None = function
    return found


def _refuse_changes_before(
    recorder: Recorder, path: str, module: nn.Module, *, is_plain: bool
) -> None:
    """Refuse what recorded code has set in a single node's modules: a program stores it only at its end."""
    if recorder.before is None:
        return
    objects = [module, module._buffers]
    if not is_plain:
        objects = [x for _, x in walk(_roots(recorder, path, module))]
    for change in recorder.before.changes_in(objects):
        _, now = recorder.single.states.get(change.place, (None, MISSING))
        if is_plain and change.path[-1] not in _names_read(type(module)):
            continue
        is_known = id(change.value) in recorder.given or not _NOT_READ.isdisjoint(change.path)
        if not is_known and not is_same(change.now, now):
            with recorder.refusing():
                raise SetForLayer(f"it sets {spell(change.path)}, which the layer {path} may read")


def _names_read(layer: type[nn.Module]) -> frozenset[str]:
    """The names in the code of this class of torch's layers, but not of ``nn.Module``."""
    classes = [each for each in layer.__mro__ if issubclass(each, nn.Module)]
    members = [x for each in classes[: classes.index(nn.Module)] for x in vars(each).values()]
    codes = [member.__code__ for member in members if isinstance(member, FunctionType)]
    return frozenset(name for code in codes for name in code.co_names)


def refuse_changes_besides(recorder: Recorder, changes: Iterable[Change]) -> None:
    """Raise ``TraceFailure`` if recorded code, too, has changed what single nodes change in every call.

    ``changes`` are all of the run.
    """
    ends = {change.place: change.now for change in changes}
    for place, (first, last) in recorder.single.states.items():
        if not has_same_contents(ends.get(place, first), last):
            name = spell(recorder.single.changed[place].path)
            raise TraceFailure(
                "", f"it changes {name}, which a layer that stays whole changes too", ""
            )


def _note_changes(recorder: Recorder, path: str, before: Snapshot) -> bool:
    """Note what a single node has changed, except tensors that do not depend on its inputs.

    Has it removed hooks of other layers, which may run in other processes?
    """
    changes, single = list(before.changes()), recorder.single
    for change in changes:
        first, _ = single.states.get(change.place, (change.before, None))
        single.states[change.place] = first, change.now
        tensors = tensors_of_tree(change.value)
        if not tensors or any(x in recorder.reached or is_own_leaf(x) for x in tensors):
            single.changing.add(path)
            single.changed[change.place] = change
        else:
            single.changed[change.place] = replace(change, value=None)
    return any(isinstance(each.holder, HookTable) and each.root == "code" for each in changes)


def find_reading(
    recorder: Recorder,
    guess: GuessData,
    inside: Inside | None,
    call: Callable[..., Any],
    roots: Sequence[Any],
    args: Any,
    kwargs: Any,
) -> str:
    """The line where a single node decides by values of its inputs what it computes; or "".

    It is looked for only if the batch is to be split, because it takes more runs.
    """
    if inside is None:
        return ""
    return reading_of_inputs(
        guess,
        inside,
        lambda other: _run_again(recorder, call, roots, args, kwargs, other)[0],
    )


def _run_again(
    recorder: Recorder,
    call: Callable[..., Any],
    roots: Sequence[Any],
    args: Any,
    kwargs: Any,
    guess: GuessData,
) -> tuple[Inside | None, Any]:
    """Run a single node with other values where it reads values of tensors; ``roots`` are its modules'.

    Returns what it did inside, and its result.
    """
    before = Snapshot(roots, recorder.reachable)
    try:
        with guess, keep_random():
            with without_torch_function():
                copies = tree_map_only(Tensor, lambda x: x.detach().clone(), (args, kwargs))
            recorder.reached.extend(copies, inside=recorder.setup.is_split)
            value = call(*executable(copies[0]), **executable(copies[1]))
            inside = recorder.reached.end(value)
            if inside is not None:
                inside.note_flags(before.changes())
            return inside, value
    finally:
        before.restore()
