"""A stage's forward run again without data, to learn which layer made which node of autograd's graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from placer.runtime.attribution import Attribution
from placer.runtime.distributed.boundary import BoundaryFinder
from placer.runtime.distributed.faults import LayerFailure
from placer.runtime.distributed.stage import Microbatch, Run, StageModule
from placer.runtime.distributed.suspects import (
    Culprit,
    Trace,
    match_layers,
    number_of,
    parameter_names,
    reachable,
    trace_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The graph of a stage's forward, and the layer of each of its nodes ("" where there is none)."""

    trace: Trace
    layers: Sequence[str]


class _Listener(TorchDispatchMode):
    """Has every operation of a forward attributed to its node of the model."""

    def __init__(self, attribution: Attribution) -> None:
        super().__init__()
        self._attribution = attribution

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._attribution.where()
        return func(*args, **(kwargs or {}))


def find_culprit(
    finder: BoundaryFinder, layer_of: Mapping[str, str], part: nn.Module, failure: LayerFailure
) -> Culprit:
    """Whose code failed on this rank, which has ``part``; ``layer_of`` gives a node's layer.

    A backward is traced to its layer by `rehearse`.
    """
    if failure.node:
        layer = layer_of.get(failure.node)
        return Culprit(layers=(layer,) if layer else ())
    suspects = failure.suspects
    if suspects is None or suspects.modules:
        return Culprit(layers=suspects.modules if suspects else ())
    names = {name for name, _ in part.named_parameters(remove_duplicate=False)}
    try:
        found = rehearse(finder, failure.stage_index, failure.given, layer_of, names)
    except Exception:  # it is the first failure that is to be told
        return Culprit()
    return match_layers(suspects, found.trace, found.layers)


def rehearse(
    finder: BoundaryFinder,
    index: int,
    given: Microbatch,
    layer_of: Mapping[str, str],
    names: Collection[str],
) -> Rehearsal:
    """Run stage ``index`` for a micro-batch of the shapes of ``given``; raises what the stage raises.

    ``names`` are those of the parameters in the rank's part.
    """
    crossings = given.crossings
    assert crossings is not None
    last = index == len(crossings.boundaries)
    after = None if last else crossings.wires[index]
    attribution = Attribution([crossings.staged.stages[index]], layer_of)
    results: list[Any] = []

    def keep(_: Microbatch, result: Any) -> Tensor:
        results.extend(tree_leaves(result))
        return torch.zeros((), requires_grad=True)

    with finder.on_fakes(crossings.staged) as (replica, part):
        stage = StageModule(index, replica, part, after)
        inputs = {
            name: torch.empty_like(x, device=x.device).requires_grad_(x.requires_grad)
            for name, x in given.inputs.items()
        }
        wires = [
            torch.empty(wire.numel, dtype=wire.dtype, device=finder.device).requires_grad_(
                wire.requires_grad
            )
            for wire in (crossings.wires[index - 1] if index else ())
        ]
        again = Microbatch(inputs=inputs, crossings=crossings, inputs_here=given.inputs_here)
        stage.run = Run(microbatches=[again], loss_of=keep)
        with torch.enable_grad(), _Listener(attribution):
            sent = stage(*wires, microbatch=0)
        roots = [x for x in (results if last else sent) if isinstance(x, Tensor) and x.grad_fn]
        made = reachable(roots)
        layers = [attribution.layer_of_node(number_of(node)) for node in made]
        return Rehearsal(trace=trace_of(made, parameter_names(part, names)), layers=layers)
