"""Runs a stage's forward on fake tensors, to find which layer created which autograd node."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from placer.executor.attribution import Attribution
from placer.executor.distributed.failures.failing_nodes import (
    FailureSite,
    Trace,
    match_layers,
    number_of,
    parameter_names,
    reachable,
    trace_of,
)
from placer.executor.distributed.failures.layer_failure import LayerFailure
from placer.executor.distributed.messages.crossings import CrossingFinder, CrossingValue
from placer.executor.distributed.messages.pipeline import Microbatch
from placer.executor.execute import MicrobatchRun, PlacedMicrobatch
from placer.schedule import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeForward:
    """The autograd graph of a stage's forward, and the layer of each node ("" if it has none)."""

    trace: Trace
    layers: Sequence[str]


class _AttributionMode(TorchDispatchMode):
    """Attributes every operation of a forward to its node of the model."""

    def __init__(self, attribution: Attribution) -> None:
        super().__init__()
        self._attribution = attribution

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._attribution.where()
        return func(*args, **(kwargs or {}))


def find_failure_site(
    finder: CrossingFinder, layer_of: Mapping[str, str], part: nn.Module, failure: LayerFailure
) -> FailureSite:
    """The layer whose code failed on this rank; ``layer_of`` has the layer of each node of the model.

    ``part`` has the rank's modules. For a backward the layer is found by `run_fake_forward`.
    """
    if failure.node:
        layer = layer_of.get(failure.node)
        return FailureSite(layers=(layer,) if layer else ())
    failing = failure.failing
    if failing is None or failing.modules:
        return FailureSite(layers=failing.modules if failing else ())
    names = {name for name, _ in part.named_parameters(remove_duplicate=False)}
    try:
        found = run_fake_forward(finder, failure.stage_index, failure.given, layer_of, names)
    except Exception:  # report the first failure, without its layer
        return FailureSite()
    return match_layers(failing, found.trace, found.layers)


def run_fake_forward(
    finder: CrossingFinder,
    index: int,
    given: Microbatch,
    layer_of: Mapping[str, str],
    names: Collection[str],
) -> FakeForward:
    """Run stage ``index`` on fake tensors with the shapes of ``given``; raises what the stage raises.

    ``names`` are the names of parameters in the rank's part.
    """
    crossings = given.crossings
    staged = crossings.staged
    attribution = Attribution([staged.stages[index]], layer_of)
    roots: list[Any] = []

    def keep(_: int, result: list[Any]) -> None:
        roots.extend(leaf for leaf in result if isinstance(leaf, Tensor) and leaf.requires_grad)

    with (
        finder.on_fakes(staged) as (replica, part),
        torch.enable_grad(),
        _AttributionMode(attribution),
    ):
        run = MicrobatchRun(
            PlacedMicrobatch(
                replica=replica,
                trees=[part] * len(staged.stages),
                leaves=given.leaves,
                inputs={
                    name: torch.empty_like(x, device=x.device).requires_grad_(x.requires_grad)
                    for name, x in given.inputs.items()
                },
            ),
            0,
            local=frozenset((index,)),
            split=set(),
        )
        for name in staged.stages[index].inputs:
            if name in crossings.values:
                value = crossings.values[name]
                run.put(name, value.rebuild(_like(value, finder.device)), replica.places[0])
        run.do(Action(stage_index=index, kind="F", microbatch_index=0), keep)
        made = reachable([*roots, *run.roots(index)])
        layers = [attribution.layer_of_node(number_of(node)) for node in made]
        return FakeForward(trace=trace_of(made, parameter_names(part, names)), layers=layers)


def _like(value: CrossingValue, device: torch.device) -> dict[int, Tensor]:
    return {
        position: torch.empty(
            spec.shape, dtype=spec.dtype, device=device, requires_grad=spec.requires_grad
        )
        for position, spec in value.tensors.items()
    }
