"""Integers and floats that know which node of the graph computes them.

``x.shape`` of a recorded tensor gives ``SizeInt``. For Python and torch these are ordinary integers,
so control flow over sizes just runs, but arithmetic on them is recorded. A size that the code turns
into a plain number (``range(n)``, ``int(n)``, a comparison) is fixed in the graph. Capture records
with two batch sizes to find out whether that happened to the batch size.
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
        """Make a node for ``function(*args)``, and return its ``value`` as a number that knows the node."""


class SizeInt(int):
    """An ``int`` that a node of the graph computes."""

    node: fx.Node
    recorder: NumberRecorder

    def __deepcopy__(self, memo: Any) -> int:
        return int(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)


class SizeFloat(float):
    """A ``float`` that a node of the graph computes."""

    node: fx.Node
    recorder: NumberRecorder

    def __deepcopy__(self, memo: Any) -> float:
        return float(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (float(self),)


def plain(number: Any) -> Any:
    """A ``SizeInt`` or ``SizeFloat`` as an ordinary number; anything else unchanged."""
    if isinstance(number, SizeInt):
        return int(number)
    return float(number) if isinstance(number, SizeFloat) else number


def _define(kind: type[Any], base: type[Any], name: str, function: Callable[..., Any]) -> None:
    original = getattr(base, f"__{name}__")

    def forward(self: Any, *others: Any) -> Any:
        value = original(base(self), *(plain(other) for other in others))
        if value is NotImplemented:
            return value
        return self.recorder.record_number(function, (self, *others), value)

    setattr(kind, f"__{name}__", forward)
    if hasattr(base, f"__r{name}__") and function is not round:
        reflected_original = getattr(base, f"__r{name}__")

        def reflected(self: Any, other: Any) -> Any:
            value = reflected_original(base(self), plain(other))
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
    "round": round,
    "floor": math.floor,
    "ceil": math.ceil,
}
for _name, _function in _BOTH.items():
    _define(SizeInt, int, _name, _function)
    _define(SizeFloat, float, _name, _function)
for _name, _function in {
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}.items():
    _define(SizeInt, int, _name, _function)
