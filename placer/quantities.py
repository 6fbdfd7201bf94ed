"""Converts byte sizes, durations and counts between text and numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from placer.errors import nearest

_BYTE_FACTORS = {
    "": 1, "b": 1,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,  # as in "a card of 16 G"
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
# Units of columns of a table, the largest first.
Units = tuple[tuple[str, float], ...]
BYTES: Units = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
SECONDS: Units = (("s", 1), ("ms", 1e-3), ("us", 1e-6))
FLOPS: Units = (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3), ("FLOP", 1))
_UNITS = ("KiB", "MiB", "GiB", "TiB", "KB", "MB", "GB", "TB")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """The bytes that ``text`` stands for: an integer, or a number with a decimal or binary unit (MB; MiB, M).

    Raises ``ValueError`` if the text is not a size, or if it is 2**63 bytes or more.

    >>> parse_bytes("16GiB"), parse_bytes("16 g"), parse_bytes("500 MB"), parse_bytes(1024)
    (17179869184, 17179869184, 500000000, 1024)
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return _bounded(text, text)
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2].lower() not in _BYTE_FACTORS:
        near = nearest(match[2], _UNITS) if match is not None else None
        hint = f"did you mean '{match[1]}{near}'? Else " if match is not None and near else ""
        raise ValueError(
            f"{text!r} is not a size; {hint}write a number and a unit, such as '16GiB' or '500 MB'"
        )
    return _bounded(float(match[1]) * _BYTE_FACTORS[match[2].lower()], text)


def _bounded(nbytes: float, text: str | int) -> int:
    if nbytes >= 2**63:
        raise ValueError(f"{text!s:.40} is more bytes than any device has")
    return int(nbytes)


def format_bytes(nbytes: int | float, *, enough: bool = False) -> str:
    """``nbytes`` in the binary unit that leaves one to three digits before the point.

    It is rounded to the nearest value, or with ``enough`` rounded up.

    >>> format_bytes(17179869184), format_bytes(1536), format_bytes(12), format_bytes(-2**20)
    ('16.00 GiB', '1.50 KiB', '12 B', '-1.00 MiB')
    >>> format_bytes(2**30 + 1), format_bytes(2**30 + 1, enough=True)
    ('1.00 GiB', '1.01 GiB')
    """
    size = abs(nbytes)
    sign = "-" if nbytes < 0 else ""
    for unit, factor in BYTES[:-1]:
        if size >= factor:
            parts = math.ceil(size * 100 / factor) if enough else size * 100 / factor
            return f"{sign}{parts / 100:.2f} {unit}"
    return f"{sign}{size:.0f} B"


def format_count(count: int, one: str, many: str = "") -> str:
    """A count with its noun ``one``; ``many`` is the plural if it is not ``one`` with an s.

    >>> format_count(1, "device"), format_count(2, "device"), format_count(2, "batch", "batches")
    ('1 device', '2 devices', '2 batches')
    """
    return f"{count} {one if count == 1 else many or one + 's'}"


def spell_bytes(nbytes: int) -> str | int:
    """``nbytes`` as in a spec, exactly: in the largest binary unit that divides it.

    >>> spell_bytes(17179869184), spell_bytes(1536 * 2**20), spell_bytes(1001)
    ('16GiB', '1536MiB', 1001)
    """
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes and nbytes % factor == 0:
            return f"{nbytes // factor}{unit}"
    return nbytes


def format_seconds(seconds: float) -> str:
    """``seconds`` in the unit that leaves one to three digits before the point.

    >>> format_seconds(0.0123), format_seconds(2.5), format_seconds(4.2e-5)
    ('12.30 ms', '2.50 s', '42.00 us')
    """
    for unit, factor in SECONDS[:-1]:
        if abs(seconds) >= factor:
            return f"{seconds / factor:.2f} {unit}"
    return f"{seconds / 1e-6:.2f} us"


def common_unit(values: Iterable[float], units: Units) -> tuple[str, float]:
    """The unit, with its factor, in which the largest of ``values`` has one to three digits before the point.

    >>> common_unit([2**20, 2**31], BYTES)
    ('GiB', 1073741824)
    """
    largest = max(map(abs, values), default=0)
    return next((unit for unit in units if largest >= unit[1]), units[-1])


def format_in(value: float, factor: float) -> str:
    """``value`` in a unit of this factor, with two decimals; a whole number in single bytes.

    >>> format_in(3 * 2**29, 2**30), format_in(1, 2**30), format_in(0, 2**30), format_in(12, 1)
    ('1.50', '<0.01', '0.00', '12')
    """
    if isinstance(value, int) and factor == 1:
        return str(value)
    text = f"{value / factor:.2f}"
    return "<0.01" if value > 0 and text == "0.00" else text
