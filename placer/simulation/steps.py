"""Records a few training steps of a plan on fake tensors, as one process runs them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from placer.cost import Loss, device_kernels, find_loss
from placer.errors import CaptureError, PlacerError, causes, first_line
from placer.executor.places.place import current_place
from placer.executor.places.transfer import copy_to
from placer.executor.task import doing
from placer.machine.devices import device_type, updates_together
from placer.plan.types import Plan
from placer.program import FakeConverter, Program
from placer.program.call import objects_of
from placer.program.fake.row_gradients import clear_row_gradients
from placer.simulation.ledger import Ledger
from placer.simulation.optimizers import RowUpdates, make_optimizer
from placer.simulation.usage import steps_of
from placer.timeline import OPTIMIZER, Timeline, repeat_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """What one process does: ``infer`` is a forward, ``train`` a forward and backward.

    ``ledger`` counts the memory of its devices. ``trained`` are its trained parameters, by the device
    whose kernels update them. The optimizer runs inside ``updating()``, and its step inside ``stepping()``.
    """

    ledger: Ledger
    infer: Callable[[], object]
    train: Callable[[], object]
    trained: Mapping[str, Sequence[nn.Parameter]]
    updating: Callable[[], AbstractContextManager[object]]
    stepping: Callable[[], AbstractContextManager[object]] = nullcontext


class FakeCall:
    """The call that a plan was made for, on fake tensors, and how many steps of it a dry run has.

    ``loss`` is by default the one that the plan counts; it runs with its target copied to the place where
    it runs, as from the caller's device to a GPU. With ``run_on`` all stages run the kernels of that
    device. With ``once`` the timeline of several steps is made from one, if they are alike: not if inputs
    keep their gradients.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        inputs: Sequence[Tensor],
        loss: Loss | None,
        *,
        run_on: str | None,
        once: bool,
    ) -> None:
        self.program, self.plan, self.run_on = program, plan, run_on
        self._loss = loss or find_loss(None if plan.loss is None else plan.loss.spec)
        self.whole_batch = self._loss.whole_batch and plan.replicas * plan.microbatches > 1
        self._converter = FakeConverter()
        self.model = self._converter.module(program.model, objects_of(program.call))
        self.leaves, self.target = self._converter.tree((list(inputs), self._loss.target))
        self._once = once and not any(leaf.requires_grad for leaf in self.leaves)

    def running(self) -> AbstractContextManager[object]:
        """In this block, fake tensors are made, and code that reads their values gets guesses."""
        return self._converter.running(self.program.captured.conditions.guess)

    def loss_fn(self, result: Any, target: Any = None) -> Tensor:
        """The loss, with its target copied."""
        place = current_place()
        assert place is not None
        return self._loss(result, tree_map_only(Tensor, partial(copy_to, place), target))

    def record(self, process: Process, device: str | None = None) -> Timeline:
        """The timeline of as many training steps as `steps_of` says, or for inference of a forward.

        ``device`` is the one whose kernels run, if it is the only one. Call it inside `running`.
        """
        ledger, wanted = process.ledger, self.plan.optimizer
        parameters = [each for group in process.trained.values() for each in group]
        # They update parameters as torch's optimizer over all of them would.
        foreach = updates_together(process.trained)
        groups = process.trained.values() if foreach else (parameters,)
        optimizers = [make_optimizer(wanted, group, foreach=foreach) for group in groups]
        rows = RowUpdates(wanted, parameters)

        def update() -> None:
            with doing(OPTIMIZER), process.updating(), process.stepping():
                for optimizer in optimizers:
                    optimizer.step()
                rows.step()

        def zero_grad() -> None:
            with doing(OPTIMIZER), process.updating():
                for parameter in parameters:
                    parameter.grad = None
                clear_row_gradients(parameters)

        with _explained_failure(self._loss), ledger, running_kernels(self.plan, device):
            if not self.plan.training:
                with torch.no_grad():
                    process.infer()
                return ledger.timeline()
            steps = steps_of(self.plan, self.run_on)
            return _record_steps(ledger, process.train, update, zero_grad, steps, once=self._once)


def _record_steps(
    ledger: Ledger,
    train: Callable[[], object],
    update: Callable[[], object],
    zero_grad: Callable[[], object],
    steps: int,
    *,
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
def running_kernels(plan: Plan, device: str | None = None) -> Iterator[None]:
    """In this block every stage runs the kernels of its device, or all of them those of ``device``."""

    def kind() -> str:
        place = current_place()
        return device_type(device or (place.name if place is not None else "cpu"))

    names = [device] if device else [name for stage in plan.stages for name in stage.devices]
    if all(device_type(name) == "cpu" for name in names):
        yield
        return
    with device_kernels(kind, half=plan.precision != "fp32"):
        yield


@contextmanager
def _explained_failure(loss: Loss) -> Iterator[None]:
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
