"""A log of what Python code did with sizes, to find out whether a recording is valid for every batch size.

Capture records a model with its batch and with twice as many rows. If the graphs are equal, the graph is
assumed to be valid for every batch size, unless Python code read sizes that depend on it: for a third batch
size, ``if x.size(0) == 1`` may take the other branch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Python code compared sizes, or turned one into a plain number.

    ``operands`` are the numbers of the sizes in the log, None for plain numbers. ``outcome`` is the result of
    a comparison.
    """

    name: str  # of the method, such as "lt" or "int"
    layer: str
    operands: tuple[int | None, ...]
    outcome: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeLog:
    """The sizes of a recording, numbered in the order in which they were read or computed.

    For each size, ``sources`` has the numbers of the sizes that it is computed from.
    """

    values: tuple[int | float, ...] = ()
    sources: tuple[tuple[int, ...], ...] = ()
    readings: tuple[Reading, ...] = ()


def reads_rows(log: SizeLog, doubled: SizeLog) -> bool:
    """Whether Python code reads sizes that depend on the batch size, and so may differ for a third one.

    ``doubled`` is the log of a recording with twice the batch.
    """
    if len(log.values) != len(doubled.values) or len(log.readings) != len(doubled.readings):
        return True
    return varying_reading(log, doubled) is not None


def varying_reading(log: SizeLog, other: SizeLog) -> Reading | None:
    """The first reading of a size that differs between two recordings of the same operations, or None.

    Two sizes that are equal in both recordings are assumed to be equal always.
    """
    depends: list[bool] = []
    for value, changed, sources in zip(log.values, other.values, log.sources, strict=True):
        depends.append(value != changed or any(depends[source] for source in sources))
    for first, second in zip(log.readings, other.readings, strict=True):
        sizes = [operand for operand in first.operands if operand is not None]
        found_equal = (first.name, first.outcome) in (("eq", True), ("ne", False))
        always_equal = found_equal and first.outcome == second.outcome and len(sizes) == 2
        if not always_equal and any(depends[size] for size in sizes):
            return first
    return None
