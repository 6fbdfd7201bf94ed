"""Updates running statistics once per batch instead of once per micro-batch (``batch_norm: "deferred"``).

Each micro-batch is normalised by its own statistics. These are collected, and when the last
micro-batch of the last replica has run, the running statistics are updated once from all of them::

    micro-batch 0   norm(x0) -> 4 values, mean, variance ─┐
    micro-batch 1   norm(x1) -> 4 values, mean, variance ─┼─> 10 values, mean, variance -> one update
    micro-batch 2   norm(x2) -> 2 values, mean, variance ─┘

Kim et al., torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models (arXiv:2004.09910,
2020), do this in a layer. Here every call of ``batch_norm`` or ``instance_norm`` with running
statistics is intercepted, whichever module makes it. Moments are combined by the pairwise formula of
Chan, Golub and LeVeque (Algorithms for Computing the Sample Variance, The American Statistician 37(3),
1983), which is free of cancellation. Layers that are recomputed in backward are not counted again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from placer._torch import STOP_RECOMPUTING
from placer.executor.places.place import Place, on
from placer.executor.places.transfer import transfer
from placer.plan.types import Plan
from placer.space import track


def defers_statistics(plan: Plan) -> bool:
    """Whether ``plan`` updates running statistics once for several slices of a batch."""
    return plan.batch_norm == "deferred" and plan.replicas * plan.microbatches > 1


class NormCall(NamedTuple):
    """A call of a norm in one forward, known by the buffers that it updates."""

    mean: str  # the names of the buffers
    var: str
    number: int  # how many calls in the same forward updated them before
    per_instance: bool  # whether each row has its own, which are averaged (instance_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Mean and sum of squared deviations per channel, of ``count`` values (rows, if per instance)."""

    place: Place
    count: int
    mean: Tensor
    deviations: Tensor
    momentum: float  # the weight of these moments in the running statistics

    def joined(self, other: Moments, *, per_instance: bool) -> Moments:
        """The moments of the values of both, on ``self.place`` and with its momentum."""
        if not self.count or not other.count:
            return other if other.count else self
        mean, added = transfer((other.mean, other.deviations), other.place, self.place)
        total = self.count + other.count
        delta = mean - self.mean
        if not per_instance:
            added = added + delta.square() * (self.count * other.count / total)
        return Moments(
            place=self.place,
            count=total,
            mean=self.mean + delta * (other.count / total),
            deviations=self.deviations + added,
            momentum=self.momentum,
        )


def join_moments(call: NormCall, parts: Iterable[Moments]) -> Moments:
    """The moments of all values that ``call`` normalised, on the place of the first of ``parts``."""
    with torch.no_grad():
        return reduce(lambda a, b: a.joined(b, per_instance=call.per_instance), parts)


class DeferredStatistics:
    """Collects the statistics of one batch, from which running statistics are updated later."""

    def __init__(self) -> None:
        self._moments: dict[NormCall, dict[Place, Moments]] = {}
        self._counters: dict[str, tuple[Place, Tensor]] = {}

    def clear(self) -> None:
        """Forget the statistics of a batch that failed."""
        self._moments.clear()
        self._counters.clear()

    @contextmanager
    def gathering(self, buffers: Mapping[str, Tensor], place: Place) -> Iterator[None]:
        """Collect statistics in this block, which runs a stage or the model for one micro-batch.

        Norms in the block do not update ``buffers``, which are the running statistics on ``place``.
        """
        with _NormRecorder(buffers, partial(self._add, place)):
            yield
        for name, tensor in buffers.items():
            # A batch counts once: keep the count after the first micro-batch of the first replica.
            if name.rpartition(".")[2] == "num_batches_tracked" and name not in self._counters:
                with on(place):
                    self._counters[name] = place, tensor.detach().clone()

    def _add(
        self, place: Place, call: NormCall, count: int, mean: Tensor, var: Tensor, momentum: float
    ) -> None:
        with torch.no_grad():
            wide = torch.promote_types(mean.dtype, torch.float32)
            freedom = count if call.per_instance else count - 1
            var = var.to(wide) if freedom > 0 else torch.zeros_like(var, dtype=wide)
            found = Moments(
                place=place,
                count=count,
                mean=mean.to(wide),
                deviations=var * freedom,
                momentum=momentum,
            )
        here = self._moments.setdefault(call, {})
        here[place] = join_moments(call, (here[place], found)) if place in here else found

    def take_moments(self) -> dict[NormCall, Moments]:
        """Return and forget the moments of every call, on the place of the first replica's stage."""
        found = {call: join_moments(call, m.values()) for call, m in self._moments.items()}
        self._moments.clear()
        return found

    def set_counters(self, model: nn.Module) -> None:
        """Make ``num_batches_tracked`` in ``model`` count one batch instead of its micro-batches."""
        for name, (place, counted) in self._counters.items():
            with on(place), torch.no_grad():
                model.get_buffer(name).copy_(counted)
        self._counters.clear()


def update_statistics(model: nn.Module, moments: Mapping[NormCall, Moments]) -> None:
    """Update the running statistics of ``model`` in place, in the order of a layer's calls."""
    for call in sorted(moments, key=lambda call: call.number):
        found = moments[call]
        if not found.count:
            continue
        divisor = found.count if call.per_instance else found.count - 1
        with on(found.place), torch.no_grad():
            for name, value in ((call.mean, found.mean), (call.var, found.deviations / divisor)):
                buffer = model.get_buffer(name)
                buffer.lerp_(value.to(buffer), found.momentum)


class _NormRecorder(TorchFunctionMode):
    """Makes norms write their input's statistics into zeros instead of the running statistics.

    The norm runs with a momentum of 1, so it writes the statistics as it computes them itself. ``found``
    is called with the call, the number of values, their mean and variance, and the momentum.
    """

    def __init__(
        self,
        buffers: Mapping[str, Tensor],
        found: Callable[[NormCall, int, Tensor, Tensor, float], None],
    ) -> None:
        super().__init__()
        self._names = {id(tensor): name for name, tensor in buffers.items()}
        self._found = found
        self._numbers: Counter[str] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is track:
            return self._note_tracked(*args)
        if func not in _NORMS:
            return func(*args, **kwargs)
        learns, parameters = _NORMS[func]
        given = {**_DEFAULTS, **dict(zip(parameters, args, strict=False)), **kwargs}
        running = given["running_mean"], given["running_var"]
        mean, var = (self._names.get(id(tensor)) for tensor in running)
        if not given[learns] or mean is None or var is None:
            return func(*args, **kwargs)
        own = torch.zeros_like(running[0]), torch.zeros_like(running[1])
        anew = {"running_mean": own[0], "running_var": own[1], "momentum": 1.0}
        stopped: Exception | None = None
        try:
            result = func(**{name: {**given, **anew}[name] for name in parameters if name in given})
        except STOP_RECOMPUTING as error:  # raised when the norm, which has run, saves its tensors
            stopped = error
        rows, *others = given["input"].shape
        per_instance = learns == "use_input_stats"
        call = NormCall(mean, var, self._numbers[mean], per_instance)
        count = rows if per_instance else rows * prod(others[1:])
        self._numbers[mean] += 1
        self._found(call, count, *own, given["momentum"])
        if stopped is not None:
            raise stopped
        return result

    def _note_tracked(self, running_mean: Tensor, running_var: Tensor, *found: Any) -> None:
        """Statistics of a batch norm over the shards of a value, which knows the mean and variance of all."""
        mean, var = (self._names.get(id(tensor)) for tensor in (running_mean, running_var))
        if mean is None or var is None:
            track(running_mean, running_var, *found)
            return
        *statistics, count = found
        self._found(NormCall(mean, var, self._numbers[mean], False), count, *statistics)
        self._numbers[mean] += 1


# For each norm: the argument that makes it use its input's statistics, and all arguments in order.
_COMMON = ("input", "running_mean", "running_var", "weight", "bias")
_OPERATOR = ("input", "weight", "bias", "running_mean", "running_var")
_NORMS: dict[Any, tuple[str, tuple[str, ...]]] = {
    F.batch_norm: ("training", (*_COMMON, "training", "momentum", "eps")),
    F.instance_norm: ("use_input_stats", (*_COMMON, "use_input_stats", "momentum", "eps")),
    torch.batch_norm: ("training", (*_OPERATOR, "training", "momentum", "eps", "cudnn_enabled")),
    torch.instance_norm: (
        "use_input_stats",
        (*_OPERATOR, "use_input_stats", "momentum", "eps", "cudnn_enabled"),
    ),
}
_DEFAULTS = {
    **dict.fromkeys(("running_mean", "running_var", "weight", "bias")),
    "training": False,
    "use_input_stats": True,
    "momentum": 0.1,
    "eps": 1e-5,
}
