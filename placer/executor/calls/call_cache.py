"""Finds the programs for the arguments of a call, and captures the model for new kinds of calls."""

from __future__ import annotations

import enum
import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from placer.errors import CaptureError
from placer.executor.boxes import with_stand_ins
from placer.executor.calls.numbers import Recaptures
from placer.executor.calls.program_cache import ProgramCache
from placer.program import (
    AttributeGuard,
    BoundCall,
    bind_arguments,
    call_difference,
    call_tensors,
    changed_numbers,
    refuse_attributes,
    refuse_global_hooks,
)

_MAX_CALLS = 64  # kinds of call that are kept, for different values of arguments
_STEP_ARGUMENTS = ("target", "loss_fn", "reduction", "normalizer", "own_rows", "scaler")
_PLAIN_TYPES = (Tensor, bool, int, float, str, enum.Enum, torch.dtype, torch.device, type(None))


class Call(NamedTuple):
    """A call of a placed model: its programs, its tensors, and its arguments as the caller passed them.

    ``arguments`` is None in a dry run, which has no caller. ``leaves_by_name`` are all their leaves.
    ``boxes`` has, by the position of a leaf that stands for a whole tensor, the part of it that was given.
    """

    programs: ProgramCache
    leaves: list[Tensor]
    arguments: Mapping[str, Any] | None
    leaves_by_name: Mapping[str, Any] = {}
    boxes: Mapping[int, Tensor] = {}


def _call(programs: ProgramCache, bound: BoundCall, given: Mapping[int, Tensor]) -> Call:
    by_name = dict(zip(bound.leaf_names, bound.leaves, strict=True))
    for name, leaf in by_name.items():
        if isinstance(leaf, Tensor) and vars(leaf):
            refuse_attributes(name, leaf, programs.captured.conditions.asked)
    leaves = call_tensors(programs.call, bound)
    boxes = {i: given[id(leaf)] for i, leaf in enumerate(leaves) if id(leaf) in given}
    return Call(programs, leaves, bound.arguments, by_name, boxes)


class _Last(NamedTuple):
    """A call whose arguments are tensors or defaults: its programs, what was bound, and the defaults."""

    programs: ProgramCache
    bound: BoundCall  # without tensors
    names: tuple[str, ...]
    defaults: Mapping[str, Any]

    @classmethod
    def of(cls, programs: ProgramCache, bound: BoundCall) -> _Last | None:
        """None for calls with other arguments."""
        arguments, given = bound.arguments, bound.positional
        leaves = list(map(id, arguments.values())) == list(map(id, bound.leaves))
        if not leaves or bound.said or not _are_tensors(arguments[name] for name in given):
            return None
        defaults = {name: value for name, value in arguments.items() if name not in given}
        return cls(programs, replace(bound, leaves=(), arguments={}), tuple(arguments), defaults)

    def again(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
        """The call, if it differs in its tensors only, as most calls do: to inspect it takes long."""
        positional = [name for name, by_position in self.bound.positional.items() if by_position]
        given = {**dict(zip(positional, args, strict=False)), **kwargs}
        same = len(args) == len(positional) and given.keys() == self.bound.positional.keys()
        if not same or not _are_tensors(given.values()):
            return None
        found = {**self.defaults, **given}
        arguments = {name: found[name] for name in self.names}
        bound = replace(self.bound, leaves=tuple(arguments.values()), arguments=arguments)
        return _call(self.programs, bound, {})


def _are_tensors(values: Iterable[Any]) -> bool:
    return all(type(value) in (Tensor, nn.Parameter) for value in values)


class CallCache:
    """The programs of a placed model for each way in which it has been called.

    ``before_capture`` is called before the model is captured for another way.
    """

    def __init__(
        self, captured: ProgramCache, *, before_capture: Callable[[], object] = lambda: None
    ) -> None:
        self._known = [captured]
        self._last: _Last | None = None
        self._recaptures = Recaptures()
        self._before_capture = before_capture

    @property
    def captured(self) -> ProgramCache:
        """The programs for the call with which the model was placed."""
        return self._known[0]

    @property
    def guards(self) -> list[AttributeGuard]:
        """The plain attributes that any of these programs reads."""
        return [guard for programs in self._known for guard in programs.guards]

    @property
    def numbers(self) -> list[tuple[str, str]]:
        """The module path and name of each number in an attribute that is an input of a program."""
        return [each for programs in self._known for each in programs.numbers]

    def find(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        step: bool = False,
        method: str = "forward",
    ) -> Call:
        """The programs for a call, its tensors and arguments; a new kind of call is captured.

        ``method`` is that of the model which is called. ``step`` says whether ``placed.step`` was called or
        ``placed(x)``, for error messages.

        A number that differs from an earlier call becomes an input of the program, if only arithmetic reads
        it. Raises ``CaptureError`` for arguments that ``forward`` does not accept or fails on, and for new
        arguments that are not plain values.
        """
        refuse_global_hooks()
        if self._last and self._last.bound.method == method:
            again = self._last.again(args, kwargs)
            if again is not None:
                return again
        captured = self._known[0]
        args, kwargs, boxes = with_stand_ins(args, kwargs)
        try:
            signature = captured.call.signature
            if method != "forward":
                signature = inspect.signature(getattr(captured.model, method))
            bound = bind_arguments(signature, args, kwargs, method)
        except CaptureError as error:
            unknown = [name for name in kwargs if name not in captured.call.signature.parameters]
            hint = "pass the target as target=…" * (step and len(args) > 1)
            if unknown:
                hint = _keyword_hint(unknown[0], kwargs[unknown[0]], step=step)
            remedy = "; ".join(filter(None, (error.remedy, hint)))
            raise CaptureError(error.where, error.problem, remedy) from None
        for programs in self._known:
            if call_difference(programs.call, bound) is None:
                self._last = None if boxes else _Last.of(programs, bound)
                return _call(programs, bound, boxes)
        difference = call_difference(captured.call, bound)
        assert difference is not None
        named = zip(bound.leaf_names, bound.leaves, strict=True)
        objects = [(n, leaf) for n, leaf in named if not isinstance(leaf, _PLAIN_TYPES)]
        if objects and method == "forward":
            raise difference
        for programs in self._known:
            if numbers := changed_numbers(programs.call, bound):
                bound = replace(bound, numbers=frozenset(numbers))
                break
        self._before_capture()
        began = time.perf_counter()
        self._known.append(captured.for_call(bound))
        self._recaptures.add(captured.model, [difference.where], time.perf_counter() - began)
        del self._known[1:-_MAX_CALLS]
        return _call(self._known[-1], bound, boxes)


def _keyword_hint(name: str, value: Any, *, step: bool) -> str:
    """A hint where to pass a keyword that ``forward`` does not accept."""
    if step:
        shown = repr(value) if isinstance(value, bool | int | float | str) else "…"
        return (
            "step passes other keywords to forward; if it is for the loss, bind it: "
            f"functools.partial(loss_fn, {name}={shown})"
        )
    if name == "own_rows":
        return "own_rows is an argument of step; inference takes the whole batch on every rank"
    return f"{name} is an argument of step" if name in _STEP_ARGUMENTS else ""
