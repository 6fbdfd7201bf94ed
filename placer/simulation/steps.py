"""Records a few training steps in a `Ledger`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from placer.cost import Loss
from placer.errors import CaptureError, PlacerError, causes, first_line
from placer.simulation.ledger import Ledger
from placer.timeline import Timeline, repeat_parts


def record_steps(
    ledger: Ledger,
    train: Callable[[], object],
    update: Callable[[], object],
    zero_grad: Callable[[], object],
    *,
    steps: int,
    once: bool,
) -> Timeline:
    """The timeline of ``steps`` training steps, each of which calls ``train``, ``update``, ``zero_grad``.

    With ``once`` only one step is run, with two updates (the first creates the optimizer's state, the
    second uses it), and the timeline is put together from these parts. It begins with the events that
    ``ledger`` has recorded before.
    """
    if not once:
        for _ in range(steps):
            train()
            update()
            zero_grad()
        return ledger.timeline()
    ends = [0, ledger.num_events]  # the number of events after each part
    for run in (train, update, update, zero_grad):
        run()
        ends.append(ledger.num_events)
    state, step, first, later, end = (range(*pair) for pair in itertools.pairwise(ends))
    parts = [state, step, first, end, *[step, later, end] * (steps - 1)]
    return repeat_parts(ledger.timeline(), parts)


@contextmanager
def explained_failure(loss: Loss) -> Iterator[None]:
    """Raise an exception of the model's code in this block, or of the loss, as a ``CaptureError``.

    Most often autograd refuses a backward, because a value that it needs was overwritten.
    """
    try:
        yield
    except PlacerError:
        raise
    except Exception as error:
        *_, root = causes(error)
        problem = first_line(root).partition(" Hint: ")[0]
        raise CaptureError(
            "the model" if loss.assumed else f"the model or loss {loss.name}",
            f"fails in a dry run: {type(root).__name__}: {problem}",
            "call the plain model and the backward of its loss: if that fails too, mend the model, or "
            'plan with "training": false; if it does not, please report it with the model',
        ) from error
