"""Runs a placed and a plain model in every situation, and says whether a caller sees a difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from placer.api import Example, SpecSource, compile, example_call
from placer.cost import find_loss, mean_square
from placer.errors import PlacerError, first_few
from placer.executor.module import PlacedModule, runtime_of
from placer.importing import user_location
from placer.plan.types import Plan
from placer.precision import full_precision
from placer.program import IgnoreDeviceMoves, copy_module
from placer.program.call import bind_call, objects_of
from placer.verification.inputs import Arguments, another_batch_size, other_values
from placer.verification.observation import (
    Comparison,
    Seen,
    Shared,
    compare,
    largest_gradient,
    user_hooks,
)
from placer.verification.situations import (
    SITUATIONS,
    BatchLoss,
    PlainFailure,
    Situation,
    choose_reference,
    draws_alike,
    plan_where,
    random_layers,
    run_placed,
    run_plain,
    seeded,
    try_plain,
)

_NAMED = 5  # how many random layers a sentence names
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was compared in one situation. Without comparisons, ``note`` says why there are none."""

    situation: str
    comparisons: tuple[Comparison, ...] = ()
    slices: int = 1  # on how many slices of the batch the plain model ran
    note: str = ""

    @property
    def ok(self) -> bool:
        return all(c.ok for c in self.comparisons)

    @property
    def counts(self) -> Mapping[str, int]:
        """How many things of each kind were compared."""
        return Counter(c.kind for c in self.comparisons)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The verdict: what was compared in every situation, and what was not."""

    outcomes: tuple[Outcome, ...]
    reference: str
    # Layers whose random numbers the placed model cannot draw from the same seed
    random_layers: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """The verdict, what differs the most, and what was not compared."""
        off = self.different
        shown = [f"  {line}" for line in first_few([f"{c.situation}: {c}" for c in off], 5)]
        hint = "if this is rounding, it is gone in float64: verify model.double(), with such inputs"
        rounded = not self.ok and self.different[0].tolerance > _TOLERANCE[torch.float64]
        return "\n".join(
            [f"Verification({self.summary})", *shown, *self.remarks, *[hint] * rounded]
        )

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Those of all situations."""
        return tuple(c for outcome in self.outcomes for c in outcome.comparisons)

    @property
    def ok(self) -> bool:
        return all(outcome.ok for outcome in self.outcomes)

    @property
    def different(self) -> list[Comparison]:
        """What differs: those of the first such situation, the largest difference first, then the next."""
        return [
            c
            for outcome in self.outcomes
            for c in sorted(outcome.comparisons, key=lambda c: (-c.relative_error, c.kind, c.name))
            if not c.ok
        ]

    @property
    def remarks(self) -> tuple[str, ...]:
        """A sentence for everything that was not compared, or not with the whole batch."""
        notes: dict[str, list[str]] = {}
        for outcome in self.outcomes:
            if outcome.note:
                notes.setdefault(outcome.note, []).append(outcome.situation)
        every = len(self.outcomes)
        return tuple(
            f"{'in every situation' if len(names) == every else '; '.join(names)}: {note}"
            for note, names in notes.items()
        )

    @property
    def worst(self) -> Comparison:
        """The comparison with the largest error, relative to its tolerance."""
        return max(self.comparisons, key=lambda c: c.relative_error / c.tolerance)

    @property
    def summary(self) -> str:
        compared = [outcome for outcome in self.outcomes if outcome.comparisons]
        found = self.worst if self.ok else self.different[0]
        return (
            f"{'EQUAL' if self.ok else 'DIFFERENT'}: {len(self.comparisons)} values compared with "
            f"{self.reference} in {len(compared)} of {len(self.outcomes)} situations; worst: {found}"
            f" (tolerance {found.tolerance:.0e})"
        )


def verify(
    model: nn.Module,
    spec_or_plan: SpecSource | Plan,
    args: Example = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Tensor] | None = None,
    target: Any = None,
    run_on: str | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    ignore_device_moves: bool = False,
    each_situation: Callable[[str], None] = lambda _: None,
) -> Verification:
    """Call ``model`` placed and plain in several situations, and compare everything that a caller can see.

    The situations are train and eval mode, with and without gradients, with the inputs as they are recorded,
    with other values in distinct tensors, and with another batch size; the first two are two training steps.
    In one of them the placed model is trained by `PlacedModule.step`.
    Outputs, the loss, the gradient of every parameter and of inputs that require one, parameters after an
    SGD step, buffers, inputs that forward writes, attributes and containers of the modules, variables that
    forward sets, modes, and the calls and variables of hooks are compared.

    The reference is the plain model on the whole batch, with the same seed and under autocast for the spec's
    ``precision``. It is the same slices of the batch, one after the other, where BatchNorm layers see a slice
    at a time, where slices draw random numbers, and where the spec says how slices are computed.
    `Verification.remarks` says where that is so, and what was not compared. ``model`` itself is not changed.
    The loss is ``loss_fn(output, target)``, or ``loss_fn(output)`` without a target, for the whole batch; by
    default the spec's ``"loss"`` with a random target, or else the mean square of all results. For another
    batch size, and in the other mode, in which results may have another form, it is the mean square.
    On a GPU, fp32 is computed without TF32. A GPU draws other random numbers than a CPU from the same
    seed, so situations in which a model on both draws any are not compared.
    The default of ``tolerance`` (relative) depends on the dtypes of the parameters and the loss. With
    ``ignore_device_moves``, the plain model ignores device moves too. ``each_situation`` is told which one
    begins.
    """
    arguments = example_call(model, args, kwargs)

    def compiled(wanted: SpecSource | Plan) -> _Pair:
        """A placed and a plain copy of the model."""
        given = copy_module(model)
        placed = compile(
            given, wanted, *arguments, run_on=run_on, ignore_device_moves=ignore_device_moves
        )
        return _Pair(plain=copy_module(model), given=given, placed=placed)

    objects = objects_of(bind_call(model, *arguments))
    shared = Shared(objects, model)
    pair = compiled(spec_or_plan)
    plan = pair.placed.plan
    run = _Run(
        given=arguments,
        objects=objects,
        loss=_counted_loss(plan, seed)
        if loss_fn is None
        else BatchLoss(function=loss_fn, target=target),
        training=model.training,
        seed=seed,
        tolerance=tolerance or _default_tolerance(model, plan),
        widened=tolerance is None,
        ignore_device_moves=ignore_device_moves,
    )
    outcomes: list[Outcome] = []
    try:
        same = True  # have the two been left in the same state?
        for number, situation in enumerate(SITUATIONS, start=1):
            name = situation.name(training=model.training)
            each_situation(f"situation {number} of {len(SITUATIONS)}, {name}")
            if not same:
                pair = compiled(plan)
            outcomes.append(run.outcome(pair, situation))
            # What a step stores has no graph any more.
            same = outcomes[-1].ok and bool(outcomes[-1].comparisons) and not situation.step
    finally:
        shared.restore()
    slices = min(outcome.slices for outcome in outcomes if outcome.comparisons)
    return Verification(
        outcomes=tuple(outcomes),
        reference="the plain model"
        + (f" on the same {slices} slices of the batch" * (slices > 1))
        + plan_where(plan, pair.placed.output_device.type),
        random_layers=tuple(run.random_layers),
    )


def _default_tolerance(model: nn.Module, plan: Plan) -> float:
    allowed = max((_TOLERANCE.get(p.dtype, 1e-4) for p in model.parameters()), default=1e-4)
    if plan.precision == "fp32" or allowed == _TOLERANCE[torch.float64]:  # autocast leaves it alone
        return allowed
    return max(allowed, _TOLERANCE[torch.bfloat16])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    plain: nn.Module
    given: nn.Module  # what was placed
    placed: PlacedModule
    # How far each step has moved a parameter at most
    moved: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What the situations of one verification have in common; ``random_layers`` fills while they run."""

    given: Arguments
    objects: Mapping[str, Any]  # the functions and objects among them
    loss: BatchLoss
    training: bool
    seed: int
    tolerance: float
    widened: bool  # where the loss is of a type with a larger tolerance
    ignore_device_moves: bool
    random_layers: list[str] = field(default_factory=list)

    def outcome(self, pair: _Pair, situation: Situation) -> Outcome:
        """Run both models in ``situation`` and compare them. Raises ``PlacerError`` only in the first one."""
        name, first = situation.name(training=self.training), situation is SITUATIONS[0]
        plain, placed = pair.plain, pair.placed
        model = runtime_of(placed).tree
        if situation.modes == "the other":
            plain.train(not self.training)
            placed.train(not self.training)
        shared = Shared(self.objects, model, pair.given)
        try:
            arguments, trial = self._find_inputs(pair, situation, shared)
            if arguments is None:
                return Outcome(situation=name, note="not compared: no input has a row per sample.")
            if trial.drew and not draws_alike(plain, placed):
                return Outcome(situation=name, note=self._random_note(pair, arguments, shared))
            with self._as_plain():
                reference = choose_reference(plain, placed, arguments, trial, self.tolerance)
            shared.restore()
            loss, step = self._loss_of(situation), situation.step
            with self._as_plain():
                theirs = run_plain(plain, placed, arguments, trial, reference, loss, step=step)
        except PlainFailure as failure:
            if first:
                raise self._error(failure, placed.plan) from failure.__cause__
            return Outcome(situation=name, note=f"not compared: the plain model {failure}.")
        shared.restore()
        try:
            with full_precision(), seeded(self.seed):
                hooked = pair.given if reference.hooks else None
                ours = run_placed(
                    placed, model, arguments, loss, step=step, hooked=hooked, rate=theirs.rate
                )
        except PlacerError as error:
            if first:
                raise
            return Outcome(situation=name, note=f"not compared: placer refuses it: {error}")
        pair.moved.append(theirs.rate * largest_gradient(theirs.seen))
        tolerance, computed = self.tolerance, theirs.seen.get(Seen("loss", ""))
        if self.widened and isinstance(computed, Tensor):
            tolerance = max(tolerance, _TOLERANCE.get(computed.dtype, 0.0))
        found = compare(ours.seen, theirs.seen, tolerance, moved=sum(pair.moved), situation=name)
        slices, notes = reference.slices, []
        if slices > 1:
            notes = [f"compared with {slices} slices of the batch: {reference.because}."]
        if not reference.hooks and any(True for _ in user_hooks(plain)):
            notes.append(
                "what hooks do was not compared: they run once for every slice of the batch."
            )
        return Outcome(
            situation=name, comparisons=tuple(found), slices=slices, note=" ".join(notes)
        )

    def _as_plain(self) -> ExitStack:
        """The contexts of a call of the plain model."""
        stack = ExitStack()
        stack.enter_context(full_precision())
        stack.enter_context(seeded(self.seed))
        if self.ignore_device_moves:
            stack.enter_context(IgnoreDeviceMoves())
        return stack

    def _loss_of(self, situation: Situation) -> BatchLoss | None:
        if not situation.gradients:
            return None
        other = situation.inputs == "another batch size" or situation.modes == "the other"
        return BatchLoss(function=mean_square) if other else self.loss

    def _find_inputs(
        self, pair: _Pair, situation: Situation, shared: Shared
    ) -> tuple[Arguments | None, Any]:
        """The first inputs that the plain model takes, and what it does with them; None if there are none.

        Raises ``PlainFailure`` if it fails on all.
        """
        failure: PlainFailure | None = None
        with seeded(self.seed + 1 + SITUATIONS.index(situation)):
            for arguments in self._candidates(pair, situation):
                try:
                    with self._as_plain():
                        precision = pair.placed.plan.precision
                        return arguments, try_plain(
                            pair.plain, arguments, precision, gradients=situation.gradients
                        )
                except PlainFailure as error:
                    failure = failure or error
                finally:
                    shared.restore()
        if failure is not None:
            raise failure
        return None, None

    def _candidates(self, pair: _Pair, situation: Situation) -> Iterable[Arguments]:
        if situation.inputs == "the example":
            return (self.given,)
        if situation.inputs == "other values":
            return other_values(self.given)
        return another_batch_size(runtime_of(pair.placed).staged.call, self.given)

    def _random_note(self, pair: _Pair, arguments: Arguments, shared: Shared) -> str:
        with self._as_plain():
            found = random_layers(pair.plain, arguments, pair.placed.plan.precision)
        shared.restore()
        self.random_layers.extend(name for name in found if name not in self.random_layers)
        named = ", ".join(first_few([name or "the model itself" for name in found], _NAMED))
        return (
            f"not compared: {named} drew random numbers, and from one seed every type of device draws "
            'others. Verify with all stages on the CPU (--run-on cpu, or run_on="cpu"), or without random '
            "numbers (dropout with p=0)."
        )

    @staticmethod
    def _error(failure: PlainFailure, plan: Plan) -> PlacerError:
        remedy = "check the inputs: shapes, dtypes, and values"
        if failure.part != "the batch":
            remedy = "its rows may depend on each other: use 1 replica and 1 micro-batch"
        elif plan.precision != "fp32":
            remedy = f"it was run with precision {plan.precision!r}, as the plan says"
        line = user_location(failure.__cause__) if failure.__cause__ is not None else ""
        return PlacerError("the plain model", f"{failure}{f' ({line})' * bool(line)}", remedy)


def _counted_loss(plan: Plan, seed: int) -> BatchLoss:
    """The loss that ``plan`` names, with a random target; the mean square of all results if it names none."""
    if plan.loss is None or plan.loss.spec is None:
        return BatchLoss(function=mean_square)
    with seeded(seed):
        loss = find_loss(plan.loss.spec, values=True)
    return BatchLoss(function=loss, target=loss.target, whole_batch=plan.loss.whole_batch)
