"""Remove from the fake copy of a model whatever its own forward left there in earlier calls.

Some models store something for later calls: a grid of positions, a bias for the longest sequence so far,
hooks on their layers. A capture after a call must find the same program as a capture before it. So we
remove such an attribute and record a call::

    grid = None ──► forward sets grid ──► equal to the old value?  yes: it stays removed
                                                                   no, or forward fails: it is put back

Tensors count as equal only if they are computed from constants and sizes alone; their values are then
computed and compared. The model is then in the state that its first call leaves, so the program of a model
that was never called is valid for it too.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from placer._torch import FORWARD_HOOK_TABLES
from placer.errors import CaptureError
from placer.operands import tensors_of_tree
from placer.program.batch import grown
from placer.program.call import BoundCall
from placer.program.constants import find_value, is_constant
from placer.program.failure import ForwardFailure, TraceFailure, end_frames
from placer.program.fake import FakeConverter
from placer.program.leaves import find_whole_modules, is_inside, is_torch_leaf
from placer.program.objects import attribute_of
from placer.program.reachable import ReachableState
from placer.program.record import run_once
from placer.program.recorder import Recorder
from placer.program.restore import Snapshot, module_roots
from placer.program.sizes import SizeFloat, SizeInt, plain

_ABSENT = object()
_TABLES = ("_parameters", "_buffers", "_modules")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

# Records a call with the modules at these paths as single nodes; if True, with twice the batch.
Run = Callable[[Collection[str], bool], Recorder | None]


class Forgotten(NamedTuple):
    """What was removed from the fake copy of a model. The model itself still has it."""

    tensors: tuple[Tensor, ...] = ()  # of the model, not of its copy
    hooks: bool = False  # whether hooks were removed as well


@dataclass(frozen=True, slots=True)
class _Attribute:
    """An attribute of the module at ``path``, and the value that it has before the first call.

    With ``code``, it stands for the module's forward hooks that run this code instead.
    """

    path: str
    name: str
    missing: Any = None
    code: CodeType | None = None

    def remove(self, fake_model: nn.Module) -> None:
        module = fake_model.get_submodule(self.path)
        if self.code is not None:
            hooks = module._forward_hooks.items()
            for key in [key for key, hook in hooks if _code(hook) is self.code]:
                for table in FORWARD_HOOK_TABLES:
                    getattr(module, table).pop(key, None)
            return
        values: dict[str, Any] = (
            module.__dict__ if self.name in module.__dict__ else module._buffers
        )
        if self.missing is _ABSENT:
            values.pop(self.name, None)
        else:
            values[self.name] = self.missing


def forget_earlier_calls(
    converter: FakeConverter,
    model: nn.Module,
    fake_model: nn.Module,
    bound: BoundCall,
    inputs: Sequence[Tensor],
    *,
    guess: int = 1,
    ignore_device_moves: bool = False,
) -> Forgotten:
    """Remove from ``fake_model``, the fake copy of ``model``, what forward recreates with equal values.

    A candidate is an attribute with a tensor (not a parameter, nor a persistent buffer), or a forward hook,
    that code reachable from the model sets after ``__init__``. Without candidates, nothing is recorded. The
    arguments are those of `record_model`.
    """

    def run(whole: Collection[str], doubled: bool) -> Recorder | None:
        rows = next((x.size(0) for x in inputs if x.dim()), 0)
        if doubled and not rows:
            return None
        dims = [0 if doubled and x.dim() and x.size(0) == rows else None for x in inputs]
        called = grown(converter, inputs, dims, 2)
        arguments = converter, model, fake_model, frozenset(whole), guess
        make = partial(Recorder, *arguments, ignore_device_moves=ignore_device_moves)
        return run_once(make, converter, bound, called, locate_draws=False)[0]

    removed: dict[_Attribute, None] = {}
    pending = [*_tensors(model, converter.reachable), *_hooks(model, converter.reachable)]
    again = bool(pending)
    while again:  # one may be recreated only if another was removed before
        again = False
        for ways in list(pending):
            found = (_forget(way, model, fake_model, run) for way in ways)
            if gone := next(filter(None, found), None):
                removed.update(dict.fromkeys(gone))
                pending.remove(ways)
                again = bool(pending)
    values = [_value(model.get_submodule(x.path), x.name) for x in removed if x.code is None]
    return Forgotten(
        tensors=tuple(tensor for value in values for tensor in tensors_of_tree(value)),
        hooks=any(x.code is not None for x in removed),
    )


# -- candidates: for each kind, several ways to remove them ----------------------------------------


def _tensors(model: nn.Module, reachable: ReachableState) -> Iterator[list[list[_Attribute]]]:
    """Attributes with tensors. Attributes of one name in modules of one class are one kind."""
    paths: dict[tuple[type, str], list[str]] = {}
    for path, module in model.named_modules():
        if is_torch_leaf(module):
            continue
        buffers = module._buffers
        # Sorted, since the order of a set differs between processes.
        unsaved = sorted(module._non_persistent_buffers_set)
        names = [name for name in unsaved if buffers.get(name) is not None]
        names += [
            name
            for name, value in module.__dict__.items()
            if value is not None and name not in _TABLES and tensors_of_tree(value)
        ]
        for name in names:
            paths.setdefault((type(module), name), []).append(path)
    assigned = reachable.assigned({name for _, name in paths}) if paths else ()
    for (_, name), found in paths.items():
        if name in assigned:
            missing = (None, _ABSENT) if reachable.asks_for(name) else (None,)
            yield [[_Attribute(path, name, x) for path in found] for x in missing]


def _hooks(model: nn.Module, reachable: ReachableState) -> Iterator[list[list[_Attribute]]]:
    """Hooks that the model's own code defines, alone or with a flag that says that they are installed."""
    kinds: dict[CodeType, list[_Attribute]] = {}
    for path, module in model.named_modules():
        for code in {_code(hook) for hook in module._forward_hooks.values()} - {None}:
            kinds.setdefault(code, []).append(_Attribute(path, FORWARD_HOOK_TABLES[0], code=code))
    kinds = {code: hooks for code, hooks in kinds.items() if reachable.defines(code)}
    if not kinds:
        return
    flags: dict[str, list[_Attribute]] = {}
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            if value is True and name != "training":
                flags.setdefault(name, []).append(_Attribute(path, name, False))
    assigned = reachable.assigned(flags)
    for hooks in kinds.values():
        yield [hooks, *([*hooks, *flags[name]] for name in flags if name in assigned)]


def _code(hook: Any) -> Any:
    return getattr(hook, "__code__", None)


# -- does forward recreate them? -------------------------------------------------------------------


def _forget(
    way: Sequence[_Attribute],
    model: nn.Module,
    fake_model: nn.Module,
    run: Run,
) -> Sequence[_Attribute]:
    """Remove the candidates in ``way`` that forward recreates with equal values. Returns those removed."""
    present = Snapshot(module_roots(fake_model))
    while way:
        for attribute in way:
            attribute.remove(fake_model)
        changes = _changes(model, fake_model, way, run, doubled=False)
        made = [x for x in way if changes.get((x.path, x.name))]
        # What depends on the batch stays, since the program may run on smaller micro-batches.
        if len(made) == len(way) and all(changes.values()):
            if all(_changes(model, fake_model, way, run, doubled=True).values()):
                return way
            made = []
        present.restore()
        way = made if len(made) < len(way) else []
    return ()


def _changes(
    model: nn.Module,
    fake_model: nn.Module,
    removed: Sequence[_Attribute],
    run: Run,
    *,
    doubled: bool,
) -> Mapping[tuple[str, str], bool]:
    """What a call sets: (module path, attribute) -> is it now as in ``model``? Empty if the call fails."""
    before = Snapshot(module_roots(fake_model))
    whole = {module.layer for module in find_whole_modules(fake_model)}
    while True:
        try:
            recorder = run(whole, doubled)
            changed = dict.fromkeys(attribute_of(change.path) for change in before.changes())
            return _compare(model, fake_model, recorder, changed) if recorder else {}
        except TraceFailure as failure:
            end_frames(failure)
            # As a single node, a module would hide whether what was removed from it is made again.
            hidden = any(is_inside([failure.layer], x.path) for x in removed)
            if hidden or failure.layer in ("", *whole):
                return {}
            whole.add(failure.layer)
        except (ForwardFailure, CaptureError) as failure:
            end_frames(failure)
            return {}
        finally:
            before.restore()


def _compare(
    model: nn.Module,
    fake_model: nn.Module,
    recorder: Recorder,
    changes: Iterable[tuple[str, str]],
) -> Mapping[tuple[str, str], bool]:
    compare = _Comparison(model, recorder)
    found = {}
    for path, name in changes:
        now, then = fake_model.get_submodule(path), model.get_submodule(path)
        if is_inside(recorder.single_nodes, path):
            continue
        if name in FORWARD_HOOK_TABLES:
            hooks = [list(getattr(module, name).values()) for module in (now, then)]
            found[path, name] = _same_items(hooks[0], hooks[1], _same_function)
        else:
            found[path, name] = compare.same(_value(now, name), _value(then, name))
    return found


class _Comparison:
    """Compares what a recording left in the fake copy with the attributes of the model."""

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        self._writer = recorder.writer
        self._numbers = recorder.sizes.values
        # Buffers that are not saved are constants, too, unless forward writes to them.
        fixed = {
            f"{path}.{name}".lstrip("."): module._buffers.get(name)
            for path, module in model.named_modules()
            for name in module._non_persistent_buffers_set
        }
        reads = recorder.writer.graph.find_nodes(op="get_attr")
        buffers = {
            node.name: fixed[node.target] for node in reads if fixed.get(node.target) is not None
        }
        self._constants = ChainMap(recorder.writer.constants, buffers)

    def same(self, now: Any, then: Any) -> bool:
        """Is ``now``, a value in the fake copy, equal to ``then``, the value in the model?"""
        if isinstance(now, SizeInt | SizeFloat):
            now = plain(now)
        if isinstance(now, Tensor):
            return isinstance(then, Tensor) and self._same_tensor(now, then)
        if type(now) is not type(then):
            return False
        if isinstance(now, dict):
            return now.keys() == then.keys() and all(self.same(now[k], then[k]) for k in now)
        if isinstance(now, list | tuple):
            return _same_items(now, then, self.same)
        return isinstance(now, _PLAIN) and bool(now == then)

    def _same_tensor(self, now: Tensor, then: Tensor) -> bool:
        if (now.shape, now.dtype) != (then.shape, then.dtype) or then.requires_grad:
            return False
        if not self._writer.makes(now):
            return self._writer.converter.original(now) is then
        node = self._writer.node_of(now)
        if not is_constant(node, self._constants, self._numbers):
            return False
        if then.is_meta:
            return True
        try:
            known = find_value(node, self._constants, self._numbers)
        except RuntimeError:  # the CPU lacks a kernel for the dtype
            return False
        return known is not None and torch.equal(known.value, then.cpu())


def _same_items(now: Sequence[Any], then: Sequence[Any], same: Callable[[Any, Any], bool]) -> bool:
    return len(now) == len(then) and all(map(same, now, then))


def _same_function(now: Any, then: Any) -> bool:
    """The same code, with the same values around it?"""
    if not isinstance(now, FunctionType) or not isinstance(then, FunctionType):
        return now is then or (type(now) is type(then) and isinstance(now, _PLAIN) and now == then)
    defaults = now.__defaults__ == then.__defaults__ and now.__kwdefaults__ == then.__kwdefaults__
    around = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (now, then)]
    same = now.__code__ is then.__code__ and defaults
    return same and _same_items(around[0], around[1], _same_function)


def _value(module: nn.Module, name: str) -> Any:
    return module.__dict__.get(name, module._buffers.get(name, _ABSENT))
