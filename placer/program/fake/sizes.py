"""Integers and floats that know which node of the graph computes them.

``x.shape`` of a recorded tensor consists of ``SizeInt``. For Python and torch these are ordinary integers, so
control flow over sizes just runs, but arithmetic on them is recorded. A size that the code turns into a plain
number (``range(n)``, ``int(n)``, a comparison) is fixed in the graph. Capture records with two batch sizes to
find out whether that happened to the batch size. Comparisons are logged, because they may give another result
for a third batch size (`placer.program.size_log`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class NumberRecorder(Protocol):
    """Makes the nodes for arithmetic on sizes."""

    def record_number(self, function: Callable[..., Any], args: tuple[Any, ...], value: Any) -> Any:
        """Make a node for ``function(*args)``; returns its ``value`` as a number that refers to the node."""

    def note_reading(self, name: str, args: tuple[Any, ...], outcome: bool | None) -> None:
        """Note that Python code compares the numbers ``args``, or turns one into a plain number.

        ``name`` is the name of the method without underscores, such as "lt" or "int".
        """


class RecordedNumber:
    """A number that a node of the graph computes."""

    node: Any  # an fx.Node
    recorder: NumberRecorder


class SizeInt(RecordedNumber, int):
    """An ``int`` that a node of the graph computes."""

    def __deepcopy__(self, memo: Any) -> int:
        return int.__int__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int.__int__(self),)


class SizeFloat(RecordedNumber, float):
    """A ``float`` that a node of the graph computes."""

    def __deepcopy__(self, memo: Any) -> float:
        return float.__float__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (float.__float__(self),)


class InputInt(RecordedNumber, torch.SymInt):
    """An integer that is an input of the graph, or computed from one; its value is ``value``.

    ``isinstance`` says that it is an ``int``, and functions of torch take it for one. To other code in C,
    such as ``range`` and ``math.isqrt``, it is an object that has to be asked for its value by a method,
    which notes that the number is read. A subclass of ``int`` would not be asked.
    """

    __class__: Any = property(lambda self: int)  # what `isinstance` looks at besides the type

    def __init__(self, value: int) -> None:
        self.value = value


class InputFloat(RecordedNumber, torch.SymFloat):
    """A ``float`` that is an input of the graph, or computed from one, as `InputInt` is an ``int``."""

    __class__: Any = property(lambda self: float)

    def __init__(self, value: float) -> None:
        self.value = value


def plain(number: Any) -> Any:
    """A recorded number as an ordinary one; anything else unchanged."""
    if isinstance(number, InputInt | InputFloat):
        return number.value
    if isinstance(number, SizeInt):
        return int.__int__(number)
    return float.__float__(number) if isinstance(number, SizeFloat) else number


def read(number: Any) -> Any:
    """Like `plain`, for code that then reads the number, which is noted."""
    if isinstance(number, RecordedNumber):
        number.recorder.note_reading("int", (number,), None)
    return plain(number)


def _define_arithmetic(
    kind: type[Any], base: type[Any], name: str, function: Callable[..., Any]
) -> None:
    original = getattr(base, f"__{name}__")

    def forward(self: Any, *others: Any) -> Any:
        value = original(plain(self), *map(plain, others))
        if value is NotImplemented:
            return value
        return self.recorder.record_number(function, (self, *others), value)

    setattr(kind, f"__{name}__", forward)
    if hasattr(base, f"__r{name}__") and function is not round:
        reflected_original = getattr(base, f"__r{name}__")

        def reflected(self: Any, other: Any) -> Any:
            value = reflected_original(plain(self), plain(other))
            if value is NotImplemented:
                return value
            return self.recorder.record_number(function, (other, self), value)

        setattr(kind, f"__r{name}__", reflected)


def _define_arithmetic_of_input(kind: type[Any], name: str, function: Callable[..., Any]) -> None:
    """Define arithmetic with other numbers of any kind, which know nothing of an `InputInt`."""

    def compute(number: Any, *args: Any) -> Any:
        if not all(isinstance(each, int | float) for each in args):
            return NotImplemented
        value = function(*map(plain, args))
        if not isinstance(value, int | float):  # a complex number, which is not recorded
            number.recorder.note_reading(name, args, None)
        return number.recorder.record_number(function, args, value)

    setattr(kind, f"__{name}__", lambda self, *others: compute(self, self, *others))
    setattr(kind, f"__r{name}__", lambda self, other: compute(self, other, self))


_BOTH: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": pow,  # `operator.pow(-1, n)` becomes the code `-1 ** n`
    "neg": operator.neg,
    "abs": operator.abs,
    "round": round,
    "floor": math.floor,
    "ceil": math.ceil,
}
for _name, _function in _BOTH.items():
    _define_arithmetic(SizeInt, int, _name, _function)
    _define_arithmetic(SizeFloat, float, _name, _function)
    _define_arithmetic_of_input(InputInt, _name, _function)
    _define_arithmetic_of_input(InputFloat, _name, _function)
for _name, _function in {
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}.items():
    _define_arithmetic(SizeInt, int, _name, _function)
    _define_arithmetic_of_input(InputInt, _name, _function)


def _define_reading(kind: type[Any], base: type[Any], name: str) -> None:
    """Define a comparison with another number, or a conversion to a plain number."""
    original = getattr(base, f"__{name}__")

    def noting(self: Any, *others: Any) -> Any:
        value = original(plain(self), *map(plain, others))
        if value is not NotImplemented:
            self.recorder.note_reading(name, (self, *others), value if others else None)
        return value

    setattr(kind, f"__{name}__", noting)


for _name in ("eq", "ne", "lt", "le", "gt", "ge", "bool", "int", "float"):
    _define_reading(SizeInt, int, _name)
    _define_reading(SizeFloat, float, _name)
SizeInt.__hash__ = int.__hash__  # type: ignore[method-assign]
SizeFloat.__hash__ = float.__hash__  # type: ignore[method-assign]


def _define_reading_of_input(kind: type[Any], name: str, function: Callable[..., Any]) -> None:
    """Define a method that is no arithmetic: ``function`` gets the value, which is noted."""

    def noting(self: Any, *others: Any) -> Any:
        if any(isinstance(each, Tensor | str | None) for each in others) and name in _COMPARISONS:
            return NotImplemented  # a tensor compares itself, and others are never equal
        self.recorder.note_reading(name, (self, *others), None)
        return function(self.value, *map(plain, others))

    setattr(kind, f"__{name}__", noting)


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_READ: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in _COMPARISONS},
    "bool": bool,
    "int": int,
    "float": float,
    "complex": complex,
    "trunc": math.trunc,
    "hash": hash,
    "str": str,
    "repr": repr,
    "format": format,
    "deepcopy": lambda value, memo: value,
    "reduce_ex": lambda value, protocol: (type(value), (value,)),
}
for _name, _function in _READ.items():
    _define_reading_of_input(InputInt, _name, _function)
    _define_reading_of_input(InputFloat, _name, _function)
_define_reading_of_input(InputInt, "index", operator.index)
