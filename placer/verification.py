"""Compares a training step of a placed model with the same step of the plain model."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from placer.api import SpecSource, compile, example_call
from placer.cost import find_loss, mean_square
from placer.emit import StagedModel
from placer.errors import PlacerError
from placer.executor.module import PlacedModule, runtime_of
from placer.executor.place import CALLER
from placer.executor.scatter import ScatteredBatch, join_results, scatter_batch
from placer.executor.statistics import DeferredStatistics, defers_statistics, update_statistics
from placer.plan.types import Plan
from placer.precision import full_precision, precision_context
from placer.program import (
    IgnoreDeviceMoves,
    flatten_call,
    flatten_result,
    rebuild_call,
    result_tensors,
    unflatten_output,
    unmarked,
)
from placer.program.copying import copy_module
from placer.program.python_random import keep_random
from placer.program.random_layers import find_random_layers

_LEARNING_RATE = 0.1  # of the step after which parameters are compared
_SMALL = 0.01  # share of the largest gradient below which rounding may decide what a gradient is
_NAMED = 5  # how many random layers a hint names
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One tensor of the placed step, compared with that of the plain step.

    ``relative_error`` is the largest absolute difference over the largest absolute expected value. Some
    values are zero but for rounding, such as the gradient of a bias before a norm, and the running mean
    behind another norm. So a gradient is compared with at least 1 % of the largest gradient of the model,
    and a running mean with at least 1 % of the largest standard deviation.
    """

    name: str
    kind: str  # "output", "loss", "gradient", "buffer" or "parameter after a step"
    relative_error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.relative_error <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The verdict: every comparison, and how the reference was run."""

    comparisons: tuple[Comparison, ...]
    reference: str
    # Layers that drew random numbers, if the placed model drew others from the same seed
    random_layers: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """The verdict; if some tensors differ, also those with the largest errors."""
        off = sorted((c for c in self.comparisons if not c.ok), key=lambda c: -c.relative_error)
        lines = [f"Verification({self.summary})"]
        lines += [f"  {c.kind} of {c.name}: relative error {c.relative_error:.2e}" for c in off[:5]]
        lines += [f"  … and {len(off) - 5} more tensors that differ"] * (len(off) > 5)
        lines += [self.hint] if self.hint else []
        return "\n".join(lines)

    @property
    def ok(self) -> bool:
        return all(c.ok for c in self.comparisons)

    @property
    def worst(self) -> Comparison:
        """The comparison with the largest error, relative to its tolerance."""
        return max(self.comparisons, key=lambda c: (c.relative_error / c.tolerance, c.name))

    @property
    def summary(self) -> str:
        count = len(self.comparisons)
        worst = self.worst
        verdict = "EQUAL" if self.ok else "DIFFERENT"
        return (
            f"{verdict}: {count} tensors compared with {self.reference}; worst: {worst.kind} of "
            f"{worst.name}, relative error {worst.relative_error:.2e} "
            f"(tolerance {worst.tolerance:.0e})"
        )

    @property
    def hint(self) -> str:
        """The likely reason if tensors differ, and what to do; "" if none is known."""
        if self.ok or not self.random_layers:
            return ""
        named = ", ".join(name or "the model itself" for name in self.random_layers[:_NAMED])
        more = len(self.random_layers) - _NAMED
        return (
            f"The likely reason: {named}{f' and {more} more' if more > 0 else ''} drew random numbers, and "
            "from one seed every type of device draws others. Verify with all stages on the CPU (--run-on "
            'cpu, or run_on="cpu"), or on these devices without random numbers (dropout with p=0, or a '
            "model in eval mode)."
        )


def verify(
    model: nn.Module,
    spec_or_plan: SpecSource | Plan,
    args: Sequence[Any] | Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Tensor] | None = None,
    target: Any = None,
    run_on: str | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    ignore_device_moves: bool = False,
) -> Verification:
    """Run one training step of ``model``, placed and plain, and compare everything it computes.

    Outputs, the loss, the gradient of every parameter and of inputs that require one, buffers, and parameters
    after one SGD step are compared. The plain model runs the same slices of the batch one
    after the other (one slice: the whole batch), with the same seed and under autocast for the
    spec's ``precision``. ``model`` itself is not changed. The loss is ``loss_fn(output, target)``, or
    ``loss_fn(output)`` without a target, for the whole batch; by default the spec's ``"loss"`` with a random
    target, or else the mean square of all results.
    On a GPU, fp32 is computed without TF32. A GPU draws other random numbers than a CPU from the same
    seed: if tensors differ, the verdict names the layers that drew any.
    The default of ``tolerance`` (relative) depends on the parameters' dtype. With
    ``ignore_device_moves``, the plain model ignores device moves too.
    """
    args, kwargs = example_call(args, kwargs)
    placed = compile(
        copy_module(model),
        spec_or_plan,
        args,
        kwargs,
        run_on=run_on,
        ignore_device_moves=ignore_device_moves,
    )
    plain = copy_module(model)
    wanted = _counted_loss(placed.plan, seed) if loss_fn is None else _loss_on(loss_fn, target)
    with ExitStack() as stack:
        stack.enter_context(full_precision())
        stack.enter_context(_seeded(seed))
        if ignore_device_moves:
            stack.enter_context(IgnoreDeviceMoves())
        drew: list[str] = []
        if not _draws_alike(plain, placed):
            drew = stack.enter_context(find_random_layers(plain))
        theirs, slices = _run_plain(plain, placed, args, kwargs, wanted)
    with full_precision(), _seeded(seed):
        ours = _run_placed(placed, args, kwargs, wanted)
    allowed = tolerance or max(
        (_TOLERANCE.get(p.dtype, 1e-4) for p in plain.parameters()), default=1e-4
    )
    if placed.plan.precision != "fp32":
        allowed = max(allowed, _TOLERANCE[torch.bfloat16])
    return Verification(
        comparisons=tuple(_compare(ours, theirs, allowed)),
        reference="the plain model"
        + (f" on the same {slices} slices of the batch" * (slices > 1))
        + _where(placed),
        random_layers=tuple(drew),
    )


def _counted_loss(plan: Plan, seed: int) -> Callable[[Any], Tensor]:
    """The loss that ``plan`` names, with a random target; the mean square of all results if it names none."""
    if plan.loss is None or plan.loss.spec is None:
        return mean_square
    with _seeded(seed):
        loss = find_loss(plan.loss.spec, values=True)
    return _loss_on(loss, loss.target)


def _loss_on(loss_fn: Callable[..., Tensor], target: Any) -> Callable[[Any], Tensor]:
    """``loss_fn`` with ``target``, which is moved to the device of the result."""
    if target is None:
        return loss_fn
    target = unmarked(target)

    def run(result: Any) -> Tensor:
        (tensor, *_) = result_tensors(result)
        return loss_fn(result, tree_map_only(Tensor, lambda part: part.to(tensor.device), target))

    return run


def _draws_alike(plain: nn.Module, placed: PlacedModule) -> bool:
    """Do both draw from the generator of one device? All devices of a CPU share one."""
    tensors = (*plain.parameters(), *placed.parameters())
    devices = {placed.output_device, *(tensor.device for tensor in tensors)}
    if all(device.type == "cpu" for device in devices):
        return True
    return len(devices) == 1 and placed.plan.replicas == 1


def _where(placed: PlacedModule) -> str:
    """The note for stages that did not run on the devices that the plan names; "" if all did."""
    wanted = {name.partition(":")[0] for stage in placed.plan.stages for name in stage.devices}
    ran = placed.output_device.type
    return (
        "" if wanted == {ran} else f" (all stages ran on {ran}, not on {', '.join(sorted(wanted))})"
    )


@dataclass(frozen=True, slots=True)
class _Step:
    tensors: dict[tuple[str, str], Tensor | None]  # (kind, name) -> value


def _run_placed(
    placed: PlacedModule, args: Any, kwargs: Any, loss_fn: Callable[[Any], Tensor]
) -> _Step:
    args, kwargs = _fresh((args, kwargs))
    output = placed(*args, **kwargs)
    loss = loss_fn(output)
    loss.backward()
    return _collect(placed, output, loss, (args, kwargs))


def _run_plain(
    plain: nn.Module,
    placed: PlacedModule,
    args: Any,
    kwargs: Any,
    loss_fn: Callable[[Any], Tensor],
) -> tuple[_Step, int]:
    """The reference: the plain model on each slice in turn, results joined, one loss, one backward.

    Also returns the number of slices, which is lower than the plan's if the batch has few rows.
    """
    args, kwargs = _fresh((args, kwargs))
    call, plan = runtime_of(placed).staged.call, placed.plan
    leaves = flatten_call(call, args, kwargs)
    batch = scatter_batch(call, leaves, replicas=plan.replicas, microbatches=plan.microbatches)
    if batch.total is None or plan.replicas * plan.microbatches == 1:
        output = _call_plain(plain, args, kwargs, plan.precision)
    else:
        statistics = DeferredStatistics() if defers_statistics(plan) else None
        output = _run_slices(plain, runtime_of(placed).staged, batch, statistics, plan.precision)
    loss = loss_fn(output)
    loss.backward()
    return _collect(plain, output, loss, (args, kwargs)), len(batch.slices)


def _run_slices(
    plain: nn.Module,
    staged: StagedModel,
    batch: ScatteredBatch,
    statistics: DeferredStatistics | None,
    precision: str,
) -> Any:
    """The joined results of the slices of ``batch``, which run one after the other.

    Every replica starts from the same buffers. Those of later replicas are not kept, as with
    ``nn.DataParallel``. With ``statistics``, running statistics are updated once, at the end.
    """
    call = staged.call
    buffers = dict(plain.named_buffers())
    slices = iter(batch.slices)
    outputs: list[Any] = []
    start = {name: b.detach().clone() for name, b in plain.named_buffers()}
    kept: dict[str, Tensor] = {}
    for number, row in enumerate(batch.rows):
        for name, buffer in plain.named_buffers():
            buffer.data = start[name].clone()
        for _ in row:
            args, kwargs = rebuild_call(call, next(slices))
            with nullcontext() if statistics is None else statistics.gathering(buffers, CALLER):
                place = len(outputs) + 1, len(batch.slices)
                outputs.append(_call_plain(plain, args, kwargs, precision, place))
        if number == 0:
            kept = {name: b.detach().clone() for name, b in plain.named_buffers()}
    for name, buffer in plain.named_buffers():
        buffer.data = kept[name]
    if statistics is not None:
        statistics.set_counters(plain)
        update_statistics(plain, statistics.take_moments())
    leaves = [_leaves(output) for output in outputs]
    if any(len(found) != len(call.result.names) for found in leaves):
        raise PlacerError(
            "the model's result",
            "is an object that holds sizes of the batch, and those of slices cannot be joined",
            "verify it with 1 replica and 1 micro-batch",
        )
    return unflatten_output(call, join_results(staged, leaves, batch.sizes))


def _call_plain(
    plain: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    precision: str,
    place: tuple[int, int] | None = None,
) -> Any:
    """The plain model's result under the same autocast as the placed model.

    ``place`` is (number of the slice, number of slices) for error messages; None if it is the whole batch.
    """
    device = next((tensor.device.type for tensor in plain.parameters()), "cpu")
    try:
        with precision_context(precision, device):
            return plain(*args, **kwargs)
    except Exception as error:
        part, remedy = "the batch", ""
        if place is not None:
            part = f"slice {place[0]} of {place[1]} of the batch"
            remedy = "its rows may depend on each other: use 1 replica and 1 micro-batch"
        elif precision != "fp32":
            remedy = f"it was run with precision {precision!r}, as the plan says"
        said = f"fails on {part}: {type(error).__name__}: {error}"
        raise PlacerError("the plain model", said, remedy) from error


def _leaves(output: Any) -> list[Any]:
    """All leaves of a result, including those inside objects."""
    return flatten_result(output)[0]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """In this block, draw random numbers (torch, Python, numpy) from ``seed``; then restore the states."""
    with keep_random(), torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        yield


def _fresh(value: Any) -> Any:
    """Copies of the caller's inputs that are leaves of autograd's graph."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    return tree_map(copied, value)


def _collect(module: nn.Module, output: Any, loss: Tensor, inputs: Any) -> _Step:
    tensors: dict[tuple[str, str], Tensor | None] = {("loss", "loss"): loss.detach()}
    for i, leaf in enumerate(_leaves(output)):
        if isinstance(leaf, Tensor):
            tensors["output", str(i)] = leaf.detach()
    for i, leaf in enumerate(tree_leaves(inputs)):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            tensors["gradient", f"input {i}"] = leaf.grad
    for name, parameter in module.named_parameters():
        grad = parameter.grad
        tensors["gradient", name] = None if grad is None else grad.detach().clone()
    for name, buffer in module.named_buffers():
        tensors["buffer", name] = buffer.detach()
    trained = [p for p in module.parameters() if p.grad is not None]
    if trained:
        torch.optim.SGD(trained, lr=_LEARNING_RATE).step()
    for name, parameter in module.named_parameters():
        tensors["parameter after a step", name] = parameter.detach()
    return _Step(tensors)


def _compare(ours: _Step, theirs: _Step, tolerance: float) -> Iterator[Comparison]:
    largest = max(
        (_largest(t) for (kind, _), t in theirs.tensors.items() if kind == "gradient"), default=0.0
    )
    for kind, name in dict.fromkeys((*theirs.tensors, *ours.tensors)):
        least = 0.0
        if kind == "gradient":
            least = _SMALL * largest
        elif kind == "parameter after a step":
            least = _SMALL * _LEARNING_RATE * largest
        elif kind == "buffer" and name.endswith("running_mean"):
            variance = theirs.tensors.get((kind, f"{name.removesuffix('mean')}var"))
            least = _SMALL * math.sqrt(_largest(variance))
        error = _relative_error(
            ours.tensors.get((kind, name)), theirs.tensors.get((kind, name)), least
        )
        yield Comparison(name=name, kind=kind, relative_error=error, tolerance=tolerance)


def _largest(tensor: Tensor | None) -> float:
    """The largest absolute value; 0 if there is none, or if it is not finite."""
    if tensor is None or not tensor.numel():
        return 0.0
    found: float = tensor.to_dense().abs().max().item()
    return found if math.isfinite(found) else 0.0


def _relative_error(found: Tensor | None, expected: Tensor | None, least: float) -> float:
    """The largest difference relative to the largest of ``expected``, or to ``least`` if that is larger."""
    if found is None or expected is None:
        return 0.0 if found is None and expected is None else float("inf")
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    wide = torch.promote_types(expected.dtype, torch.float64)
    found, expected = (tensor.to_dense().to("cpu", wide) for tensor in (found, expected))
    difference = (found - expected).abs().max().item()
    if difference != difference:
        same = torch.equal(found.isnan(), expected.isnan())
        return (
            0.0 if same and torch.equal(found.nan_to_num(), expected.nan_to_num()) else float("inf")
        )
    scale = max(expected.abs().max().item(), least)
    return difference / scale if scale else (0.0 if difference == 0 else float("inf"))
