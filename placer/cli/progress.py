"""Says what a command does while that takes a while: what was tried, and the best so far."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from placer.quantities import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from placer.plan.types import Plan
    from placer.simulation.judge import JudgingPlanner
    from placer.spec import PlacementSpec

_EVERY = 1.0  # seconds between looks at what is new
_AGAIN = 15.0  # seconds after which a line is written though nothing is new


class Progress:
    """What a command does at the moment; a `placer.simulation.judge.Watcher`.

    With ``compare`` it says which plan is best.
    """

    def __init__(self, title: str, *, compare: bool = True) -> None:
        self._title, self._compare = title, compare
        self.about = ""  # what all that is done now is part of
        self._what, self._planned = "", 0
        self._best: tuple[tuple[bool, int, bool, float], str] | None = None
        self._start = time.monotonic()

    def doing(self, what: str) -> None:
        """Say what is done now."""
        self._what = f"{self.about}, {what}" if self.about else what

    def found(self, what: str) -> None:
        """Say what is known so far."""
        self._best = (False, 0, False, 0.0), what

    def planned(self, spec: PlacementSpec, plan: Plan, *, judged: bool = True) -> None:
        """Count a plan, and keep the best: what fits, then what is over by the fewest bytes, then time.

        What was ``judged`` to fit is better than what fits by estimate.
        """
        self._planned += 1
        key = not plan.fits, plan.overflow_bytes, not judged, plan.rank_time
        if self._compare and (self._best is None or key < self._best[0]):
            verdict = _verdict(plan) if judged else f"by estimate {_verdict(plan)}"
            devices = format_count(len(spec.devices) * plan.replicas, "device")
            self._best = key, f"{devices}, {verdict}"

    @property
    def state(self) -> str:
        """All that is known, without seconds."""
        text = f"{self._title}: {self._what}" if self._what else self._title
        if self._planned:
            text += f"; tried {self._planned}"
        so_far = "best so far" if self._compare else "so far"
        return f"{text}, {so_far}: {self._best[1]}" if self._best is not None else text

    def __str__(self) -> str:
        return f"{self.state} ({time.monotonic() - self._start:.0f} s)"

    def __rich__(self) -> str:
        return str(self).replace("[", "\\[")

    def write_lines(self, stop: threading.Event) -> None:
        """Write a line to stderr when something is new, but not more than one each second, until ``stop``."""
        said, when = self._title, time.monotonic()
        while not stop.wait(_EVERY):
            if self.state != said or time.monotonic() - when > _AGAIN:
                said, when = self.state, time.monotonic()
                print(f"  {self}", file=sys.stderr, flush=True)


def _verdict(plan: Plan) -> str:
    if not plan.fits:
        return f"does not fit by {format_bytes(plan.overflow_bytes)}"
    seconds = "" if plan.step_seconds is None else f", {format_seconds(plan.step_seconds)} a step"
    headroom = plan.tightest.headroom
    return f"fits{seconds}" + ("" if headroom is None else f", {format_bytes(headroom)} headroom")


@contextmanager
def progress(
    console: Console, title: str, make: JudgingPlanner | None = None, *, compare: bool = True
) -> Iterator[Progress]:
    """Show that something takes a while: beside a spinner on a terminal, otherwise by lines on stderr.

    Yields what can be told how far it is; a planner ``make`` tells that by itself. For ``compare`` see
    `Progress`.
    """
    found = Progress(title, compare=compare)
    if make is not None:
        make.watcher = found
    try:
        if console.is_terminal:
            with console.status(found):
                yield found
            return
        print(f"{title} …", file=sys.stderr, flush=True)
        stop = threading.Event()
        thread = threading.Thread(target=found.write_lines, args=(stop,), daemon=True)
        thread.start()
        try:
            yield found
        finally:
            stop.set()
            thread.join()
    finally:
        if make is not None:
            make.watcher = None
