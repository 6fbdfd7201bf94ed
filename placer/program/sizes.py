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

from torch import fx


class NumberRecorder(Protocol):
    """Makes the nodes for arithmetic on sizes."""

    def record_number(self, function: Callable[..., Any], args: tuple[Any, ...], value: Any) -> Any:
        """Make a node for ``function(*args)``; returns its ``value`` as a number that refers to the node."""

    def note_reading(self, name: str, args: tuple[Any, ...], outcome: bool | None) -> None:
        """Note that Python code compares the numbers ``args``, or turns one into a plain number.

        ``name`` is the name of the method without underscores, such as "lt" or "int".
        """


class SizeInt(int):
    """An ``int`` that a node of the graph computes."""

    node: fx.Node
    recorder: NumberRecorder

    def __deepcopy__(self, memo: Any) -> int:
        return int.__int__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int.__int__(self),)


class SizeFloat(float):
    """A ``float`` that a node of the graph computes."""

    node: fx.Node
    recorder: NumberRecorder

    def __deepcopy__(self, memo: Any) -> float:
        return float(plain(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (plain(self),)


class InputFloat(SizeFloat):
    """A ``float`` that is an input of the graph, or computed from one; its value is ``value``.

    To code in C, such as ``math.exp``, which takes the number without asking for a method, it is NaN. So a
    number that is computed from it there, and which the graph would hold fixed, is NaN too and is noticed.
    """

    value: float

    def __new__(cls, value: float) -> InputFloat:
        self = super().__new__(cls, math.nan)
        self.value = value
        return self


def plain(number: Any) -> Any:
    """A ``SizeInt`` or ``SizeFloat`` as an ordinary number; anything else unchanged."""
    if isinstance(number, SizeInt):
        return int.__int__(number)
    if isinstance(number, InputFloat):
        return number.value
    return float.__float__(number) if isinstance(number, SizeFloat) else number


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


_BOTH: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "neg": operator.neg,
    "abs": operator.abs,
    "round": round,
    "floor": math.floor,
    "ceil": math.ceil,
}
for _name, _function in _BOTH.items():
    _define_arithmetic(SizeInt, int, _name, _function)
    _define_arithmetic(SizeFloat, float, _name, _function)
for _name, _function in {
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}.items():
    _define_arithmetic(SizeInt, int, _name, _function)


def _define_reading(kind: type[Any], base: type[Any], name: str) -> None:
    """Define a comparison with another number, or a conversion to a plain number."""
    original = getattr(base, f"__{name}__")

    def read(self: Any, *others: Any) -> Any:
        value = original(plain(self), *map(plain, others))
        if value is not NotImplemented:
            self.recorder.note_reading(name, (self, *others), value if others else None)
        return value

    setattr(kind, f"__{name}__", read)


for _name in ("eq", "ne", "lt", "le", "gt", "ge", "bool", "int", "float"):
    _define_reading(SizeInt, int, _name)
    _define_reading(SizeFloat, float, _name)
SizeInt.__hash__ = int.__hash__  # type: ignore[method-assign]
SizeFloat.__hash__ = float.__hash__  # type: ignore[method-assign]
