"""Judge one model: capture, plan for 2 and 4 stages from meta, and compare placed with eager.

A model passes when

- a plan for 2 and one for 4 stages is made from an instance on ``meta`` (a model that cannot be
  built under ``torch.device("meta")`` is built on the CPU and moved there),
- under both plans, in train mode, the loss, every parameter's gradient, every output and every
  buffer equal eager's; and in eval mode every output does,
- a capture after a plain forward in the same process has the fingerprint of the one from ``meta``; or,
  of a model that keeps something of its first call, one placed after that call equals eager,
- it has at least five pieces, so at least four places to cut,
- of two stages none has more than 60% of the seconds of forward and backward (the plan's own
  figures), or no cut of the program's order does better by more than a hundredth.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import placer
import placer.api
import placer.simulation.judge
from benchmarks.loss import LOSS, MEAN_SQUARE
from benchmarks.zoo.compare import Failed, compare, infer, is_tensor, jitter, seeded, train
from benchmarks.zoo.subject import Call, Subject, Verdict, convert, to_meta, with_rows
from placer.cost import CostEstimates
from placer.errors import PlacerError
from placer.machine.devices import device_kind
from placer.partition.stage_cost.score import stage_seconds
from placer.partition.stage_cost.tables import build_tables
from placer.partition.units import program_order, unit_graph
from placer.program import Program, lower

LARGEST_SHARE = 0.60
LEAST_PIECES = 5
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_HUGE = 25_000_000  # parameters above which float32 is tried first: half the memory and time
# A CPU is slow at arithmetic and its links are as fast as its memory, so that transfers do not drown the
# work of these small inputs, as they would between two real GPUs.
_DEVICE = "cpu"


def judge(subject: Subject) -> Verdict:
    """The verdict on ``subject``; errors of the model or of placer are part of it, not raised."""
    started = time.process_time()
    found, problem = _attempt(subject, _HUGE)
    if "differs from eager" in problem and found["dtype"] == "float32":
        # Normalising a few values amplifies rounding; float64 tells it from a wrong result.
        found, problem = _attempt(subject, None)
    return Verdict(
        name=subject.name,
        passed=not problem,
        problem=problem,
        seconds=round(time.process_time() - started, 1),
        **found,
    )


def _attempt(subject: Subject, most_float64: int | None) -> tuple[dict[str, Any], str]:
    """The findings, and the problem or ``""``; models up to ``most_float64`` parameters run in float64."""
    found: dict[str, Any] = {}
    try:
        with _shared_passes():
            _judge(subject, most_float64, found)
    except Failed as failure:
        return found, str(failure)
    return found, ""


def _judge(subject: Subject, most_float64: int | None, found: dict[str, Any]) -> None:
    with _phase("build"):
        train_call = seeded(lambda: subject.call(True))
        eval_call = seeded(lambda: subject.call(False))
        empty = _on_meta(subject)
    dtype = torch.float32
    parameters = sum(p.numel() for p in empty.parameters())
    if subject.float64 and (most_float64 is None or parameters <= most_float64):
        dtype = _widest(subject, eval_call)
    found["dtype"] = str(dtype).removeprefix("torch.")
    train_call, eval_call = convert(train_call, dtype), convert(eval_call, dtype)

    empty = _as(empty, dtype).train()
    plans = {}
    meta_args, meta_kwargs = to_meta(train_call)
    for stages in (2, 4):
        with _phase(f"plan for {stages} stages from meta"):
            plans[stages] = placer.make_plan(empty, _spec(stages), meta_args, meta_kwargs)
    with _phase("capture from meta"):
        program = placer.api.lower(empty, meta_args, meta_kwargs)
    found["nodes"] = len(program.order)
    found["pieces"] = len(unit_graph(program))
    found["whole"] = tuple(w.layer for w in program.captured.whole_modules)
    found["reasons"] = tuple(
        f"{w.reason} ({w.location.rpartition('/')[2]})" for w in program.captured.whole_modules
    )
    found["largest_share"] = round(_largest_share(plans[2]), 3)
    found["largest_share_4"] = round(_largest_share(plans[4]), 3)
    found["best_share"] = found["largest_share"]
    if found["largest_share"] > LARGEST_SHARE:
        found["best_share"] = round(_best_share(program, meta_args, meta_kwargs), 3)
    del empty

    tolerance = _TOLERANCE[dtype]
    with _phase("eager, train"):
        used = _fresh(subject, dtype).train()
        expected = train(used, train_call)
    with _phase("capture after a forward"):
        started = time.process_time()
        again = _fingerprint(used, train_call)
        found["capture_seconds"] = round(time.process_time() - started, 1)
    if again != plans[2].fingerprint:
        with _phase("place after a forward"):
            placed = placer.compile(used, _spec(2), *train_call, run_on="cpu")
            compare(train(placed, train_call), train(used, train_call), tolerance)
        del placed
    del used
    jittered = functools.cache(lambda: train(jitter(_fresh(subject, dtype)).train(), train_call))
    model = _fresh(subject, dtype).train()
    for stages in (2, 4):
        with _phase(f"place on {stages} stages"):
            placed = placer.compile(model, plans[stages], *train_call, run_on="cpu")
        with _phase(f"train on {stages} stages"):
            compare(train(placed, train_call), expected, tolerance, jittered)
        del placed
    del expected, jittered
    model.zero_grad()

    model.eval()
    eager = _fresh(subject, dtype).eval()
    with _phase("eager, eval"):
        outputs = infer(eager, eval_call)
    for stages in (2, 4):
        with _phase(f"place for inference on {stages} stages"):
            same_program = plans[stages].fingerprint == _fingerprint(model, eval_call)
            spec = plans[stages] if same_program else {**_spec(stages), "training": False}
            placed = placer.compile(model, spec, *eval_call, run_on="cpu")
        with _phase(f"eval on {stages} stages"):
            compare(infer(placed, eval_call), outputs, tolerance)
        if stages == 2:
            found["other_batch"] = _other_batch(eager, placed, eval_call, tolerance)
    _check_split(subject, found)


def _fingerprint(model: nn.Module, call: Call) -> str:
    return placer.api.lower(model, *call).fingerprint


def _check_split(subject: Subject, found: dict[str, Any]) -> None:
    if subject.may_be_whole:
        return
    if found["pieces"] < LEAST_PIECES:
        raise Failed(f"split: {found['pieces']} pieces, at least {LEAST_PIECES} are asked for")
    share, best = found["largest_share"], found["best_share"]
    if share > LARGEST_SHARE and best < share - 0.01:
        raise Failed(f"split: a stage has {share:.0%} of the cost, {best:.0%} is possible")


@contextmanager
def _phase(name: str) -> Iterator[None]:
    try:
        yield
    except Failed as failure:
        raise Failed(f"{name}: {failure}") from failure
    except PlacerError as error:
        raise Failed(f"{name}: {type(error).__name__}: {error}".replace("\n", " ")) from error
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise Failed(f"{name}: traceback: {type(error).__name__}: {first}") from error


@contextmanager
def _shared_passes() -> Iterator[None]:
    """Capture each model once per mode, and estimate each program once; results stay the same."""
    captures: dict[Any, tuple[nn.Module, Any, Program]] = {}
    costs: dict[int, tuple[Program, CostEstimates]] = {}

    @functools.wraps(lower)
    def capture_once(
        model: nn.Module, args: Any, kwargs: Any = None, rewrites: Any = (), **options: Any
    ) -> Program:
        shapes = str([(t.shape, t.dtype) for t in tree_leaves((args, kwargs)) if is_tensor(t)])
        key = (id(model), model.training, shapes, str(rewrites), str(options))
        if key not in captures:
            captures[key] = (model, args, lower(model, args, kwargs, rewrites, **options))
        return captures[key][2]

    def estimates_once(program: Program) -> CostEstimates:
        if id(program) not in costs:
            costs[id(program)] = (program, CostEstimates(program))
        return costs[id(program)][1]

    placer.api.lower = capture_once
    placer.simulation.judge.CostEstimates = estimates_once  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        placer.api.lower = lower
        placer.simulation.judge.CostEstimates = CostEstimates  # type: ignore[misc]


def _spec(stages: int) -> dict[str, Any]:
    devices = [f"{_DEVICE}:{i}" for i in range(stages)]
    return {"devices": devices, "objective": "bottleneck", **LOSS}  # even stages


def _on_meta(subject: Subject) -> nn.Module:
    try:
        with torch.device("meta"):
            return seeded(subject.build)
    except Exception:  # libraries fail here in many ways of their own
        return seeded(subject.build).to("meta")


def _fresh(subject: Subject, dtype: torch.dtype) -> nn.Module:
    """A new instance, because what a forward leaves in a model may change the next one."""
    return _as(seeded(subject.build), dtype)


def _as(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    return model.double() if dtype == torch.float64 else model


def _widest(subject: Subject, call: Call) -> torch.dtype:
    """float64 if the model runs in it; some have float32 in their code."""
    args, kwargs = convert(call, torch.float64)
    with _phase("build"):
        model = _fresh(subject, torch.float64).eval()
    try:
        with torch.no_grad():
            seeded(lambda: model(*args, **kwargs))
    except Exception:
        return torch.float32
    return torch.float64


def _largest_share(plan: placer.Plan) -> float:
    seconds = [stage.forward_seconds + stage.backward_seconds for stage in plan.stages]
    return max(seconds) / sum(seconds) if sum(seconds) else 1.0


def _best_share(program: Program, args: Any, kwargs: Any) -> float:
    """The least largest share over all cuts of the program's order of units into two stages."""
    inputs = [t for t in tree_leaves((args, kwargs)) if is_tensor(t)]
    costs = CostEstimates(program)(inputs, kernels=_DEVICE, loss=MEAN_SQUARE)
    units = unit_graph(program)
    order = program_order(units)
    cuts = [0, *itertools.accumulate(len(units.nodes[unit]["nodes"]) for unit in order)]
    tables = build_tables(costs, [i for unit in order for i in units.nodes[unit]["nodes"]], cuts)
    kind = device_kind(_DEVICE, None)
    seconds = sum(stage_seconds(tables, kind))
    last = len(cuts) - 2
    pairs = [(seconds[0, x], seconds[x + 1, last]) for x in range(last)]
    return min((float(max(a, b) / (a + b)) for a, b in pairs if a + b), default=1.0)


def _other_batch(model: nn.Module, placed: nn.Module, call: Call, tolerance: float) -> str:
    """With three rows instead of the captured two, it equals eager or raises an error that says why not."""
    call = with_rows(call, 3)
    try:
        expected = infer(model, call)
    except Exception:
        return "eager fails"
    try:
        compare(infer(placed, call), expected, tolerance)
    except PlacerError as error:
        return f"refused: {error.problem}"
    except Failed as failure:
        return f"DIFFERENT: {failure}"
    except Exception as error:
        return f"TRACEBACK: {type(error).__name__}: {error}".splitlines()[0]
    return "equal"


def as_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict as plain values."""
    return dataclasses.asdict(verdict)
