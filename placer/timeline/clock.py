"""When things run: work on devices and links, each begun as soon as what it needs is free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

SpanKind = Literal["compute", "transfer", "optimizer"]


class Span(NamedTuple):
    """Something that ran from ``start`` to ``end`` (seconds from the beginning of the step).

    ``on`` are the devices, or the link, that were busy with it; ``nbytes`` are those of a transfer.
    """

    kind: SpanKind
    name: str  # an action such as "2F0", or what is transferred
    on: tuple[str, ...]
    start: float
    end: float
    nbytes: int = 0


class Clock:
    """Lays spans out in time, in the order in which they are begun.

    A process launches work and goes on; a device, or a link, does one thing at a time in the order in
    which it was launched.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._free: dict[str, float] = {}  # device, link or process -> when it is free again

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
        """When a span ends that needs all of ``on`` for ``seconds`` and begins after the times ``after``.

        A ``process`` launches it, which takes that process ``launching`` seconds; the span does not end
        before that is done.
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
    """When the last of ``spans`` ends; 0 for none."""
    return max((span.end for span in spans), default=0.0)


def idle_share(spans: Sequence[Span]) -> float:
    """The share of the time up to the last computation in which the devices that compute do not.

    >>> idle_share([Span("compute", "0F0", ("a",), 0, 1), Span("compute", "1F0", ("b",), 1, 2)])
    0.5
    """
    computed = [span for span in spans if span.kind == "compute"]
    room = len({name for span in computed for name in span.on}) * end_of(computed)
    busy = sum(span.end - span.start for span in computed)
    return max(0.0, 1.0 - busy / room) if room else 0.0
