"""Shares one capture of a model, its costs and its dry runs among everything that a test does with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from placer import api
from placer.cost import CostTable, estimate
from placer.plan.types import Plan
from placer.planner import build
from placer.program import Program, SplitRules
from placer.simulation import judge, simulate
from placer.simulation.simulate import DryRun
from placer.spec import PlacementSpec

Call = tuple[Program, list[Tensor]]


@contextmanager
def captured_once() -> Iterator[None]:
    """A model that is used again with the same inputs is captured only once.

    Nor are the costs of its nodes for a size of micro-batch counted twice, or the same plan run twice
    without data. For the small models of tests, these take most of the time of ``make_plan``,
    ``compile``, ``auto_spec`` and ``simulate``. In between, the test must not change the model, except
    for its mode and its trained weights.
    """
    capture, estimate_costs = api.lower_call, estimate.estimate_costs
    run = simulate.dry_run
    captures = dict[Any, tuple[Any, Call]]()
    costs = dict[Any, tuple[Program, CostTable]]()
    runs = dict[Any, tuple[Any, DryRun]]()

    def look_up(
        model: nn.Module,
        args: Sequence[Any] | Tensor,
        kwargs: Mapping[str, Any] | None,
        wanted: PlacementSpec | Plan,
        **options: Any,
    ) -> Call:
        leaves = tree_leaves((args, kwargs))
        state = [module.training for module in model.modules()]
        state += [parameter.requires_grad for parameter in model.parameters()]
        parts = wanted.batch_dims, wanted.stored, wanted.replicas, wanted.microbatches
        rules = SplitRules.of(*parts)
        options["rewrites"] = getattr(wanted, "rewrites", options.get("rewrites", ()))
        key = id(model), str(options), str(rules), wanted.precision, *state, *map(id, leaves)
        if key not in captures:  # kept with what the ids are of, so that they stay theirs
            captures[key] = (model, leaves), capture(model, args, kwargs, wanted, **options)
        return captures[key][1]

    def look_up_costs(captured: Program, inputs: Sequence[Tensor], **fields: Any) -> CostTable:
        shapes = [(x.shape, x.stride(), x.dtype, x.requires_grad) for x in inputs]
        key = id(captured), str(shapes), str(sorted(fields.items()))
        if key not in costs:
            costs[key] = captured, estimate_costs(captured, inputs, **fields)
        return costs[key][1]

    def look_up_run(
        program: Program, plan: Plan, inputs: Any, loss: Any = None, **options: Any
    ) -> DryRun:
        shapes = [(x.shape, x.stride(), x.dtype, x.requires_grad) for x in inputs]
        target = tree_leaves(loss.target) if loss else []
        kind = loss and (
            id(loss.function),
            loss.name,
            loss.assumed,
            loss.whole_batch,
            *map(id, target),
        )
        key = id(program), judge._run_key(plan), str(shapes), kind, str(sorted(options.items()))
        if key not in runs:
            runs[key] = (program, loss), run(program, plan, inputs, loss, **options)
        return runs[key][1]

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(api, "lower_call", look_up))
        for module in (estimate, build):  # whichever calls it
            if hasattr(module, "estimate_costs"):
                patches.enter_context(mock.patch.object(module, "estimate_costs", look_up_costs))
        for module in (judge, simulate):
            patches.enter_context(mock.patch.object(module, "dry_run", look_up_run))
        yield
