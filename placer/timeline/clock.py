"""Finds when work runs on devices and links: as early as its inputs and its devices allow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

SpanKind = Literal["compute", "transfer", "optimizer"]


class Span(NamedTuple):
    """Work that runs from ``start`` to ``end``, in seconds from the beginning of the step.

    ``on`` has the devices, or the link, that are busy with it; ``nbytes`` is the size of a transfer.
    """

    kind: SpanKind
    name: str  # an action such as "2F0", or the name of the value that is transferred
    on: tuple[str, ...]
    start: float
    end: float
    nbytes: int = 0


class Clock:
    """Assigns times to spans, in the order in which `run` is called.

    A process launches work asynchronously. A device or a link does one thing at a time, in the order in
    which it was launched.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        # The time at which a device, link or process is free again
        self._free: dict[str, float] = {}

    def run(
        self,
        kind: SpanKind,
        name: str,
        on: Sequence[str],
        seconds: float,
        *,
        after: Iterable[float] = (),
        process: str | None = None,
        launching: float = 0.0,
        nbytes: int = 0,
    ) -> float:
        """Add a span that occupies all of ``on`` for ``seconds``; returns its end.

        It starts after all times in ``after``. If a ``process`` launches it, that takes the process
        ``launching`` seconds, and the span does not end before the launch has ended.
        """
        begun = launched = 0.0
        if process is not None:
            begun = self._free.get(process, 0.0)
            launched = self._free[process] = begun + launching
        start = max([begun, *after, *(self._free.get(name, 0.0) for name in on)])
        end = max(start + seconds, launched)
        self._free.update(dict.fromkeys(on, end))
        self.spans.append(Span(kind, name, tuple(on), start, end, nbytes))
        return end


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
