"""Finds when operations run on devices and links: as early as devices and dependencies allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from placer.timeline.types import Task

SpanKind = Literal["compute", "transfer", "sum", "optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operation:
    """Work that keeps all of ``on`` (devices or links) busy for ``seconds``.

    It starts when all operations ``after`` which it comes have ended, and not before the one that it runs
    ``beside`` has started. If a ``process`` launches it, that takes the process ``launch_seconds``: the
    operation does not start before its launch, nor end before that has ended. Seconds are numbers of any one
    type: with fractions, all times are exact. With arrays, each element is a step of its own; `run` then
    needs another ``latest``. ``nbytes`` is the size of a transfer or of a sum.
    """

    kind: SpanKind
    name: str
    on: tuple[str, ...]
    seconds: float
    after: tuple[Operation, ...] = field(default=(), repr=False)
    beside: Operation | None = field(default=None, repr=False)
    process: str | None = None
    launch_seconds: float = 0
    nbytes: int = 0
    task: Task | None = None


class Span(NamedTuple):
    """An operation that runs from ``start`` to ``end``, in seconds from the beginning of the step.

    ``on`` has the devices, or the link, that are busy with it; ``nbytes`` is the size of a transfer; ``task``
    is what computes, if anything does.
    """

    kind: SpanKind
    name: str  # an action such as "2F0", or which stages a transfer connects
    on: tuple[str, ...]
    start: float
    end: float
    nbytes: int = 0
    task: Task | None = None


def run(
    operations: Iterable[Operation], *, latest: Callable[[Sequence[float]], float] = max
) -> tuple[Span, ...]:
    """The spans of ``operations``, which are in the order in which they are launched.

    List scheduling (Graham 1966, doi:10.1002/j.1538-7305.1966.tb01709.x) with a list per device, link and
    process: each does one thing at a time, in the order of ``operations``, as early as possible. A process
    goes on as soon as it has launched an operation. Takes time linear in operations and dependencies.

    >>> first = Operation(kind="compute", name="0F0", on=("a",), seconds=2)
    >>> second = Operation(kind="compute", name="1F0", on=("b",), seconds=1, after=(first,))
    >>> [(span.name, span.start, span.end) for span in run([first, second])]
    [('0F0', 0, 2), ('1F0', 2, 3)]
    """
    spans: dict[Operation, Span] = {}
    free: dict[str, float] = {}  # the time at which a device, link or process is free again
    for operation in operations:
        earliest = [free.get(name, 0) for name in operation.on]
        earliest += [spans[before].end for before in operation.after]
        launched: float = 0
        if operation.beside is not None:
            earliest.append(spans[operation.beside].start)
        if operation.process is not None:
            earliest.append(free.get(operation.process, 0))
            launched = free[operation.process] = earliest[-1] + operation.launch_seconds
        start = latest(earliest)
        end = latest([start + operation.seconds, launched])
        free.update(dict.fromkeys(operation.on, end))
        spans[operation] = Span(
            operation.kind,
            operation.name,
            operation.on,
            start,
            end,
            operation.nbytes,
            operation.task,
        )
    return tuple(spans.values())


def end_of(spans: Iterable[Span]) -> float:
    """The end of the last of ``spans``; 0 if there are none."""
    return max((span.end for span in spans), default=0.0)


def idle_share(spans: Sequence[Span]) -> float:
    """The share of time in which devices are idle, until the last computation ends.

    Only devices that compute at all are counted.

    >>> idle_share([Span("compute", "0F0", ("a",), 0, 1), Span("compute", "1F0", ("b",), 1, 2)])
    0.5
    """
    computed = [span for span in spans if span.kind == "compute"]
    room = len({name for span in computed for name in span.on}) * end_of(computed)
    busy = sum(span.end - span.start for span in computed)
    return max(0.0, 1.0 - busy / room) if room else 0.0
