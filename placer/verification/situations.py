"""The situations in which a placed and a plain model are called, and how both are run in one of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from placer.errors import PlacerError
from placer.executor.calls.program_cache import split_rules
from placer.executor.module import PlacedModule, runtime_of
from placer.executor.places.place import CALLER
from placer.executor.scatter import ScatteredBatch, scatter_batch
from placer.executor.stages.statistics import (
    DeferredStatistics,
    defers_statistics,
    update_statistics,
)
from placer.generators import random_state
from placer.plan.types import Plan
from placer.precision import precision_context
from placer.program import (
    Rows,
    copy_module,
    flatten_call,
    flatten_result,
    rebuild_call,
    result_tensors,
    unflatten_output,
    unmarked,
)
from placer.program.call import bind_call, objects_of
from placer.program.objects.python_random import keep_random, python_random_state
from placer.program.objects.restore import Snapshot, module_roots
from placer.spec.layers import match_paths
from placer.verification.inputs import Arguments, fresh
from placer.verification.observation import (
    SMALL,
    Observation,
    Seen,
    Watch,
    attributes,
    counted_hooks,
    identities,
    observe,
    relative_error,
    values_in,
)
from placer.verification.random_layers import find_random_layers

_FASTEST = 0.1  # learning rate of the step after which parameters are compared
_NATIVE = (torch.batch_norm, torch.instance_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoss:
    """A loss of the whole batch: ``function(result, target)``, or ``function(result)`` without a target.

    The target may have marks (`placer.Whole`, `placer.Batched`), which say how a step splits it. With
    ``whole_batch``, a step computes the loss once.
    """

    function: Callable[..., Tensor]
    target: Any = None
    whole_batch: bool = False

    def __call__(self, result: Any) -> Tensor:
        """The loss; the target is moved to the device of the result."""
        if self.target is None:
            return self.function(result)
        (tensor, *_) = result_tensors(result)
        return self.function(
            result, tree_map_only(Tensor, lambda x: x.to(tensor.device), unmarked(self.target))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """One way to call both models: the mode of their modules, with or without gradients, the inputs.

    ``step``: the placed model is trained by `PlacedModule.step`, which has no result to compare.
    """

    modes: Literal["as given", "the other"]
    gradients: bool
    inputs: Literal["the example", "other values", "another batch size"]
    step: bool = False

    def name(self, *, training: bool) -> str:
        """What it is called in a table, for a model that is given in train mode if ``training``."""
        train = training == (self.modes == "as given")
        way = ", step" if self.step else "" if self.gradients else ", no_grad"
        return f"{'train' if train else 'eval'}{way}: {self.inputs}"


SITUATIONS = (
    Situation(modes="as given", gradients=True, inputs="the example"),
    Situation(modes="as given", gradients=True, inputs="other values"),  # the second step
    Situation(modes="as given", gradients=True, inputs="another batch size"),
    Situation(modes="as given", gradients=True, inputs="other values", step=True),
    Situation(modes="as given", gradients=False, inputs="other values"),
    Situation(modes="the other", gradients=True, inputs="other values"),
    Situation(modes="the other", gradients=False, inputs="other values"),
)


class PlainFailure(Exception):
    """The plain model itself fails, on the batch or on a slice of it."""

    def __init__(self, part: str, cause: Exception) -> None:
        super().__init__(f"fails on {part}: {type(cause).__name__}: {cause}")
        self.part = part


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What the plain model does with the whole batch: its result, what it stores, and how it computes it.

    ``drew``: it draws random numbers. ``uses_statistics``: a BatchNorm computes statistics of the batch.
    """

    leaves: Sequence[Any]
    attributes: Observation
    buffers: Mapping[str, Tensor]
    drew: bool
    uses_statistics: bool


def try_plain(plain: nn.Module, arguments: Arguments, precision: str, *, gradients: bool) -> Trial:
    """Call a copy of ``plain``. Raises ``PlainFailure``."""
    twin = copy_module(plain)
    before, statistics = _random_states(twin), _BatchStatistics()
    args, kwargs = fresh(arguments)
    with torch.set_grad_enabled(gradients), statistics:
        output = _call_plain(twin, args, kwargs, precision, "the batch")
    return Trial(
        leaves=flatten_result(output)[0],
        attributes=dict(attributes(twin)),
        buffers=dict(twin.named_buffers()),
        drew=_random_states(twin) != before,
        uses_statistics=statistics.used,
    )


def random_layers(plain: nn.Module, arguments: Arguments, precision: str) -> list[str]:
    """The layers of ``plain`` that draw random numbers."""
    twin = copy_module(plain)
    args, kwargs = fresh(arguments)
    with torch.no_grad(), find_random_layers(twin) as found:
        _call_plain(twin, args, kwargs, precision, "the batch")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The plain model's side of a comparison: the whole batch, or so many ``slices`` one after the other.

    ``because`` says why slices; ``hooks`` whether those of the user can be compared.
    """

    slices: int = 1
    because: str = ""
    hooks: bool = True


def choose_reference(
    plain: nn.Module, placed: PlacedModule, arguments: Arguments, trial: Trial, tolerance: float
) -> Reference:
    """The whole batch, unless the model computes something else on its slices, and may."""
    plan = placed.plan
    slices = len(_scattered(placed, *arguments).slices)
    if slices == 1:
        return Reference()
    rules = {
        "its BatchNorm layers see one slice at a time": trial.uses_statistics,
        "slices draw their random numbers one after the other": trial.drew,
        'the spec\'s "stored" says how values of slices are combined': bool(plan.stored),
        'the spec\'s "inputs" lets slices be computed by themselves': (
            _says_how_inputs_are_split(placed)
            and _mixes_rows(plain, placed, arguments, trial, tolerance)
        ),
    }
    because = next((reason for reason, holds in rules.items() if holds), "")
    return Reference(slices=slices if because else 1, because=because, hooks=False)


def _says_how_inputs_are_split(placed: PlacedModule) -> bool:
    call = runtime_of(placed).staged.call
    return split_rules(placed.plan).says([each.name for each in call.inputs], call.batch_dims)


def _mixes_rows(
    plain: nn.Module, placed: PlacedModule, arguments: Arguments, trial: Trial, tolerance: float
) -> bool:
    """Does the plain model compute something else on slices of the batch than on all of it?"""
    with torch.no_grad():
        batch = _scattered(placed, *fresh(arguments))
        twin = copy_module(plain)
        output, _ = _run_slices(twin, placed, batch, trial)
    pairs = [*zip(flatten_result(output)[0], trial.leaves, strict=True)]
    pairs += [(buffer, trial.buffers[name]) for name, buffer in twin.named_buffers()]
    return any(
        relative_error(part.detach(), whole.detach(), 0.0) > tolerance
        for part, whole in pairs
        if isinstance(part, Tensor) and isinstance(whole, Tensor)
    )


def _scattered(placed: PlacedModule, args: Any, kwargs: Any) -> ScatteredBatch:
    call, plan = runtime_of(placed).staged.call, placed.plan
    leaves = flatten_call(call, args, kwargs)
    return scatter_batch(call, leaves, replicas=plan.replicas, microbatches=plan.microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What was observed, and the learning rate of the step that followed backward; 0 without one."""

    seen: Observation
    rate: float


def run_plain(
    plain: nn.Module,
    placed: PlacedModule,
    arguments: Arguments,
    trial: Trial,
    reference: Reference,
    loss: BatchLoss | None,
    *,
    step: bool,
) -> Step:
    """Call the plain model as ``reference`` says; without a loss there is no backward.

    For a ``step`` only the loss has a backward, not what forward stores, and nothing seen has a graph.
    """

    def call(args: Any, kwargs: Any) -> tuple[Any, dict[Seen, Any]]:
        if reference.slices == 1:
            return _call_plain(plain, args, kwargs, placed.plan.precision, "the batch"), {}
        return _run_slices(plain, placed, _scattered(placed, args, kwargs), trial)

    def train(args: Any, kwargs: Any) -> tuple[Tensor, dict[Seen, Any]]:
        output, joined = call(args, kwargs)
        assert loss is not None
        value = loss(output)
        if value.requires_grad:
            value.backward()
        return value, joined

    hooked = plain if reference.hooks else None
    run = (train, None) if step else (call, loss)
    whole = reference.slices == 1
    return _run(plain, plain, arguments, *run, step=step, hooked=hooked, whole=whole)


def run_placed(
    placed: PlacedModule,
    model: nn.Module,
    arguments: Arguments,
    loss: BatchLoss | None,
    *,
    step: bool,
    hooked: nn.Module | None,
    rate: float,
) -> Step:
    """The same of the placed model, whose attributes ``model`` has, with the plain one's learning rate.

    ``hooked`` is the model that was placed, whose hooks are the caller's own; None: they are not compared.
    """

    def call(args: Any, kwargs: Any) -> tuple[Any, dict[Seen, Any]]:
        return placed(*args, **kwargs), {}

    def train(args: Any, kwargs: Any) -> tuple[Tensor, dict[Seen, Any]]:
        assert loss is not None
        options = {"target": loss.target, "whole_batch": loss.whole_batch}
        return placed.step(*args, loss_fn=loss.function, **options, **kwargs), {}

    run = (train, None) if step else (call, loss)
    return _run(placed, model, arguments, *run, step=step, hooked=hooked, rate=rate)


def _run(
    module: nn.Module,
    model: nn.Module,
    arguments: Arguments,
    call: Callable[[Any, Any], tuple[Any, dict[Seen, Any]]],
    loss_fn: BatchLoss | None,
    *,
    step: bool,
    hooked: nn.Module | None,
    rate: float | None = None,
    whole: bool = True,
) -> Step:
    args, kwargs = fresh(arguments)
    call_given = bind_call(model, args, kwargs)
    bound = call_given.arguments
    module.zero_grad(set_to_none=True)
    watch = Watch(model, hooked, objects_of(call_given))
    inputs = [((name,), value) for name, value in bound.items()]

    def graphs() -> dict[int, Tensor]:
        """Tensors with a graph that a caller can reach besides the result."""
        values = (*values_in("input", inputs), *attributes(model), *watch.changes())
        return {id(x): x for _, x in values if isinstance(x, Tensor) and x.grad_fn is not None}

    before = graphs()
    with (
        torch.set_grad_enabled(step or loss_fn is not None),
        counted_hooks(model, counted=hooked is not None) as counts,
    ):
        output, joined = call(args, kwargs)
        if step:
            loss, output = output, None
        elif loss_fn is not None:
            loss = loss_fn(output)
            live = joined.values() if joined else graphs().values()
            stored = [
                x for x in live if isinstance(x, Tensor) and x.grad_fn and id(x) not in before
            ]
            total = loss + sum(x.float().mean().to(loss.device) for x in stored if x.numel())
            if total.requires_grad:
                total.backward()
    seen = observe(module, model, output, bound, watch)
    if whole and not step:
        seen |= identities(module, output, bound)
    seen |= {
        each: x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for each, x in joined.items()
    } | counts
    if step:
        seen = {each: x.detach() if isinstance(x, Tensor) else x for each, x in seen.items()}
    if not step and loss_fn is None:
        rate = 0.0
    else:
        seen[Seen("loss", "")] = loss.detach()
        rate = _learning_rate(module) if rate is None else rate
        trained = [p for p in module.parameters() if p.grad is not None]
        if trained:
            torch.optim.SGD(trained, lr=rate).step()
    seen |= {Seen("parameter", name): p.detach() for name, p in module.named_parameters()}
    return Step(seen=seen, rate=rate)


def _learning_rate(module: nn.Module) -> float:
    """One that changes no parameter by more than 1 % of the largest, so that the next step is comparable."""
    trained = [p for p in module.parameters() if p.grad is not None and p.numel()]
    largest = max((p.detach().abs().max().item() for p in trained), default=0.0)
    steepest = max(
        (p.grad.to_dense().abs().max().item() for p in trained if p.grad is not None), default=0.0
    )
    rate = SMALL * largest / steepest if steepest else _FASTEST
    return min(rate, _FASTEST) if rate == rate and rate > 0 else _FASTEST


def _run_slices(
    plain: nn.Module, placed: PlacedModule, batch: ScatteredBatch, trial: Trial
) -> tuple[Any, dict[Seen, Any]]:
    """The joined results of the slices of ``batch``, which run one after the other, and what they store.

    Every replica starts from the same buffers. Those of later replicas are not kept, as with
    ``nn.DataParallel``. With deferred statistics, running statistics are updated once, at the end. Every
    slice starts from the same attributes.
    """
    staged, plan = runtime_of(placed).staged, placed.plan
    call = staged.call
    statistics = DeferredStatistics() if defers_statistics(plan) else None
    buffers, start = dict(plain.named_buffers()), _clones(plain)
    snapshot = Snapshot([(p, m) for p, m in module_roots(plain)])
    slices = iter(batch.slices)
    outputs: list[list[Any]] = []
    stored: list[dict[Seen, Any]] = []
    kept: dict[str, Tensor] = {}
    for number, row in enumerate(batch.rows):
        _set_buffers(plain, {name: data.clone() for name, data in start.items()})
        for _ in row:
            own = dict(plain.named_buffers()) if outputs else {}
            if outputs:
                snapshot.restore()
                _set_buffers(plain, {name: b.data for name, b in own.items()})
            args, kwargs = rebuild_call(call, next(slices))
            part = f"slice {len(outputs) + 1} of {len(batch.slices)} of the batch"
            with nullcontext() if statistics is None else statistics.gathering(buffers, CALLER):
                outputs.append(
                    flatten_result(_call_plain(plain, args, kwargs, plan.precision, part))[0]
                )
            stored.append(dict(attributes(plain)))
        if number == 0:
            kept = _clones(plain)
    _set_buffers(plain, kept)
    if statistics is not None:
        statistics.set_counters(plain)
        update_statistics(plain, statistics.take_moments())
    names = [f"result.{name}".rstrip(".") for name in call.result.names]
    if any(len(leaves) != len(names) for leaves in outputs):
        raise PlacerError(
            "the model's result",
            "is an object that holds sizes of the batch, and those of slices cannot be joined",
            "verify it with 1 replica and 1 micro-batch",
        )
    join = _Join(placed, batch.sizes)
    columns = zip(names, zip(*outputs, strict=True), trial.leaves, strict=True)
    leaves = [join(name, column, whole) for name, column, whole in columns]
    held = {
        seen: join(
            seen.name, tuple(found.get(seen) for found in stored), trial.attributes.get(seen)
        )
        for seen in stored[-1]
    }
    return unflatten_output(call, leaves), held


class _Join:
    """Joins what the slices of the batch give, by the rules of the spec and the plain model's own shapes."""

    def __init__(self, placed: PlacedModule, sizes: Sequence[int]) -> None:
        staged = runtime_of(placed).staged
        self._sizes, self._rules = sizes, placed.plan.stored
        names = [f"result.{name}".rstrip(".") for name in staged.call.result.names]
        names += [name for each in staged.stored for name in each.leaf_names]
        self._rows = dict(zip(map(_plain_name, names), staged.rows, strict=False))

    def __call__(self, name: str, column: Sequence[Any], whole: Any) -> Any:
        if not isinstance(column[0], Tensor):
            return whole if list(column) == self._sizes else column[-1]  # a number of rows
        rows = self._rows.get(_plain_name(name), Rows())
        rule: str | None = rows.combination
        for pattern, said in self._rules.items():
            rule = said if match_paths(pattern, [name]) else rule
        if rows.dim is None and rule == "concatenate":
            return torch.cat(list(column)) if column[0].dim() else torch.stack(list(column))
        if rows.dim is None and rule == "sum":
            return sum(column[1:], column[0])
        if rows.dim is None and rule == "mean":
            return sum(
                x * (size / sum(self._sizes)) for x, size in zip(column, self._sizes, strict=True)
            )
        whole = whole if isinstance(whole, Tensor) and whole.dim() == column[0].dim() else column[0]
        for dim, size in enumerate(whole.shape):
            if size != column[0].size(dim):
                blocks = zip(*(x.chunk(rows.blocks, dim) for x in column), strict=True)
                return torch.cat([x for block in blocks for x in block], dim)
        return column[-1]


def _plain_name(name: str) -> str:
    return name.replace("[", ".").replace("]", "").replace("'", "")


def _clones(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def _set_buffers(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.data = values[name]


def _call_plain(plain: nn.Module, args: Any, kwargs: Any, precision: str, part: str) -> Any:
    """The plain model's result under the same autocast as the placed model. Raises ``PlainFailure``."""
    device = next((tensor.device.type for tensor in plain.parameters()), "cpu")
    try:
        with precision_context(precision, device):
            return plain(*args, **kwargs)
    except Exception as error:
        raise PlainFailure(part, error) from error


def draws_alike(plain: nn.Module, placed: PlacedModule) -> bool:
    """Do both draw from the generator of one device? All devices of a CPU share one."""
    tensors = (*plain.parameters(), *placed.parameters())
    devices = {placed.output_device, *(tensor.device for tensor in tensors)}
    if all(device.type == "cpu" for device in devices):
        return True
    return len(devices) == 1 and placed.plan.replicas == 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """In this block, draw random numbers (torch, Python, numpy) from ``seed``; then restore the states."""
    with keep_random(), torch.random.fork_rng(range(torch.cuda.device_count())):
        if torch.accelerator.is_available():
            torch.manual_seed(seed)
        else:  # without torch's notes of where GPUs that are not there were seeded, which take milliseconds
            torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        yield


def _random_states(model: nn.Module) -> tuple[Any, ...]:
    devices = {tensor.device for tensor in model.parameters() if tensor.device.type != "meta"}
    devices.add(torch.device("cpu"))
    states = [random_state(device) for device in sorted(devices, key=str)]
    return *(state.numpy().tobytes() for state in states), python_random_state()


class _BatchStatistics(TorchFunctionMode):
    """Notes whether a batch norm, or an instance norm with running statistics, computes statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm):
            # Both kinds of functions have the switch sixth, the functional ones by these names, too.
            names = ("training", "use_input_stats")
            given = [kwargs[name] for name in names if name in kwargs]
            uses = args[5] if len(args) > 5 else next(iter(given), func is F.instance_norm)
            running = kwargs.get("running_mean", (*args, None)[3 if func in _NATIVE else 1])
            self.used |= bool(uses) and ("batch" in func.__name__ or running is not None)
        return func(*args, **kwargs)


def plan_where(plan: Plan, ran: str) -> str:
    """The note for stages that did not run on the devices that the plan names; "" if all did."""
    wanted = {name.partition(":")[0] for stage in plan.stages for name in stage.devices}
    return (
        "" if wanted == {ran} else f" (all stages ran on {ran}, not on {', '.join(sorted(wanted))})"
    )
