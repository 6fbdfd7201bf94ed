"""Tensors written as text, ``[name=]SHAPE[:DTYPE]``, for inputs and targets. Does not import torch."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from placer.errors import PlacerError, nearest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Name of a dtype in torch -> bytes per element
_DTYPES = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "complex64": 8,
}  # fmt: skip
_MOST_BYTES = 2**63 - 1  # torch counts the bytes of a tensor in an int64
_OTHER_NAMES = {
    "float": "float32", "double": "float64", "half": "float16", "long": "int64", "int": "int32",
    "fp32": "float32", "fp64": "float64", "fp16": "float16", "bf16": "bfloat16",
}  # fmt: skip
_EXAMPLE = re.compile(r"(?!scalar:)[A-Za-z_./~][^=:]*:[A-Za-z_][\w.]*")
_INPUT = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>[^:=]*)(?::(?P<dtype>[^:<]*)(?:<(?P<below>[^<]*))?)?"
)
_MOST_DIGITS = 30  # that are read: more than 2**63 has, which is too large in any case
_FORM = "write [name=]SHAPE[:DTYPE], such as 1x1x128x128x128, 16x64:int64<50257 or mask=4x16:bool"
_CALLABLE = ", or path/file.py:callable that returns "
_ARGUMENTS = _CALLABLE + "the arguments of forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """One tensor argument of forward, positional if ``name`` is None. Its integers are below ``below``."""

    name: str | None
    shape: tuple[int, ...]
    dtype_name: str
    below: int

    @property
    def dtype(self) -> torch.dtype:
        """The ``torch.dtype``."""
        import torch

        found: torch.dtype = getattr(torch, self.dtype_name)
        return found

    def on_meta(self) -> Tensor:
        """The input on ``meta``, without data."""
        import torch

        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def random(self) -> Tensor:
        """The input with random data: normally distributed, or integers from 0 to ``below - 1``."""
        import torch

        if self.dtype.is_floating_point or self.dtype.is_complex:
            return torch.randn(self.shape, dtype=self.dtype)
        return torch.randint(self.below, self.shape).to(self.dtype)


def is_example(text: str) -> bool:
    """Does ``text`` name a callable rather than a shape?

    >>> is_example("scenes.py:two_scenes"), is_example("8x64:int64"), is_example("scalar:int64")
    (True, False, False)
    """
    return _EXAMPLE.fullmatch(text) is not None


def parse_input(text: str, *, option: str = "--input") -> InputSpec:
    """The input that ``text``, a value of ``option``, describes. Raises ``PlacerError`` if it is not valid.

    >>> parse_input("mask=4x16:bool").shape
    (4, 16)
    >>> parse_input("scalar").shape
    ()
    """
    where, of_forward = f"{option} {text}", option == "--input"
    form = _FORM + (_ARGUMENTS if of_forward else f"{_CALLABLE}it")
    match = _INPUT.fullmatch(text.strip())
    if match is None:
        raise PlacerError(where, "is not an input" if of_forward else "is not a target", form)
    sizes = [] if match["shape"] == "scalar" else match["shape"].split("x")
    if not all(size.isdecimal() for size in sizes):
        raise PlacerError(where, f"{match['shape']!r} is not a shape", form)
    given = "float32" if match["dtype"] is None else match["dtype"]
    given = given.removeprefix("torch.").lower()
    dtype_name = _OTHER_NAMES.get(given, given)
    if dtype_name not in _DTYPES:
        near = nearest(given, [*_DTYPES, *_OTHER_NAMES])
        hint = f"did you mean {near!r}? " if near else ""
        raise PlacerError(where, f"no dtype {given!r}", f"{hint}dtypes: {', '.join(_DTYPES)}")
    below = match["below"] or "2"
    if not below.isdecimal() or int(below) < 1:
        raise PlacerError(where, f"{below!r} is not a bound above 0", form)
    shape = tuple(int(size[:_MOST_DIGITS]) for size in sizes)
    if math.prod(shape) * _DTYPES[dtype_name] > _MOST_BYTES:
        problem = "has more bytes than a tensor can have (2**63 - 1)"
        raise PlacerError(where, problem, "check the sizes")
    return InputSpec(name=match["name"], shape=shape, dtype_name=dtype_name, below=int(below))


def parse_inputs(texts: Sequence[str], *, required: bool = True) -> tuple[InputSpec, ...]:
    """All inputs, in order.

    Raises ``PlacerError`` if a text is not valid, if a name is given twice, or if there is no input and one
    is ``required``.
    """
    inputs = tuple(parse_input(text) for text in texts)
    names = [item.name for item in inputs if item.name is not None]
    for name in names:
        if names.count(name) > 1:
            raise PlacerError("--input", f"{name!r} is given twice", "keep one")
    if required and not inputs:
        raise PlacerError(
            "--input", "an example input is needed to see what forward does", _FORM + _ARGUMENTS
        )
    return inputs
