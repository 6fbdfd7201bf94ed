"""A few training steps of what a ledger watches."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from placer.simulation.ledger import Ledger
from placer.timeline import Timeline, repeat_parts


def record_steps(
    ledger: Ledger,
    train: Callable[[], object],
    update: Callable[[], object],
    let_go: Callable[[], object],
    *,
    steps: int,
    once: bool,
) -> Timeline:
    """The timeline of ``steps`` steps: forward and backward, the optimizer's update, gradients let go.

    With ``once`` the first step is recorded with two updates (the first makes the optimizer's state, the
    second uses it), and the timeline is made of these parts. What ``ledger`` has already comes before.
    """
    if not once:
        for _ in range(steps):
            train()
            update()
            let_go()
        return ledger.timeline()
    marks = [0, ledger.num_events]
    for run in (train, update, update, let_go):
        run()
        marks.append(ledger.num_events)
    state, step, first, later, end = (range(*pair) for pair in itertools.pairwise(marks))
    parts = [state, step, first, end, *[step, later, end] * (steps - 1)]
    return repeat_parts(ledger.timeline(), parts)
