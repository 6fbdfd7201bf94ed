"""Make programs: capture a model, and rewrite what was captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from pydantic import JsonValue
from torch import Tensor, fx, nn

from placer.errors import CaptureError, PlanError, first_line
from placer.program.alias import Aliasing, NodeFailure, analyze_aliasing
from placer.program.call import objects_of
from placer.program.capture import capture_model
from placer.program.objects.paths import spell
from placer.program.state import StateNames, state_of
from placer.program.types import Captured, NodeInfo, Program, example_numbers, read_state
from placer.spec.rewrite import Rewrite

Pass: TypeAlias = Callable[[Program, Mapping[str, JsonValue]], Program]
"""A change of a program, with its settings: a pure function, which calls `with_graph`."""

_PASSES: dict[str, Pass] = {}


def register_rewrite(name: str) -> Callable[[Pass], Pass]:
    """A decorator that registers a pass under ``name``, by which plans name it."""

    def register(function: Pass) -> Pass:
        _PASSES[name] = function
        return function

    return register


def lower(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    rewrites: Sequence[Rewrite] = (),
    **options: Any,
) -> Program:
    """The program of ``model`` called with ``args`` and ``kwargs``, after ``rewrites`` in this order.

    ``options`` are those of `capture_model`. Raises ``CaptureError`` as it does, and ``PlanError`` for a
    rewrite that is not registered.
    """
    captured = capture_model(model, args, kwargs, **options)
    program = make_program(captured, captured.graph, captured.layer_of, captured.aliasing)
    _refuse_shared_memory(program)
    return rewritten(program, rewrites)


def _refuse_shared_memory(program: Program) -> None:
    """Raise ``CaptureError`` if a tensor that is trained or written shares memory with another.

    A placed model has copies, each with memory of its own.
    """
    captured, model = program.captured, program.model
    named = dict([*model.named_parameters(), *model.named_buffers()])
    written = {name for name, tensor in named.items() if tensor.requires_grad}
    written.update(name for node in program.nodes.values() for name in node.writes)
    for name, path in captured.constant_paths.items():
        named[spell(path)] = captured.constants[name]
    stored = {each.path for each in captured.stored if each.kind == "write"}
    for each in captured.state:
        if isinstance(tensor := each.read(model, example_numbers(captured.call)), Tensor):
            named[each.name] = tensor
            written.update([each.name] * (each.path in stored))
    shared = StateNames(named.items())
    for name in sorted(written & named.keys()):
        for other in shared.of(named[name]):
            if named[other] is not named[name]:
                raise CaptureError(
                    name,
                    f"shares memory with {other}; in a placed model each has its own, and what is written to "
                    "one is not seen in the other",
                    "assign the same tensor to both, or compute one from the other in forward",
                )


def rewritten(program: Program, rewrites: Sequence[Rewrite]) -> Program:
    """``program`` with just these ``rewrites`` of what was captured. Raises ``PlanError`` as `lower` does."""
    if program.rewrites == tuple(rewrites):
        return program
    captured = program.captured
    program = make_program(captured, captured.graph, captured.layer_of, captured.aliasing)
    for each in rewrites:
        if each.name not in _PASSES:
            raise PlanError(
                "plan /rewrites",
                f"{each.name!r} is no rewrite of this placer",
                "import the module that registers it, or plan again",
            )
        made = _PASSES[each.name](program, each.settings)
        program = replace(made, rewrites=(*program.rewrites, each))
    return program


def with_graph(program: Program, graph: fx.Graph, layer_of: Mapping[str, str]) -> Program:
    """``program`` with another graph, which has the same placeholders and as many results.

    ``layer_of`` has the module's path for each of its nodes. Nodes that are in both graphs keep their names.
    Raises ``CaptureError`` if the graph does not run.
    """
    captured = program.captured
    inputs = [each.on_meta() for each in captured.call.inputs]
    try:
        aliasing = analyze_aliasing(
            captured.model,
            graph,
            captured.constants,
            [*inputs, *read_state(captured, None)],
            guess=captured.conditions.guess,
            arguments=objects_of(captured.call),
        )
    except NodeFailure as failure:
        raise CaptureError(
            layer_of.get(failure.node.name, "") or type(captured.model).__name__,
            f"the rewritten graph does not run at {failure.node.format_node()}: "
            f"{first_line(failure.__cause__)}",
            "this is a defect of the rewrite; please report it with the model",
        ) from failure.__cause__
    return make_program(captured, graph, layer_of, aliasing, program.rewrites)


def make_program(
    captured: Captured,
    graph: fx.Graph,
    layer_of: Mapping[str, str],
    aliasing: Aliasing,
    rewrites: tuple[Rewrite, ...] = (),
) -> Program:
    """The program with ``graph``, whose nodes belong to the modules ``layer_of`` and share memory as said."""
    modules = dict(captured.model.named_modules(remove_duplicate=False))
    draws = set(aliasing.rng_nodes)
    given = {node.name for node in graph.nodes if node.op == "placeholder"}
    return Program(
        captured=captured,
        graph=graph,
        nodes={
            node.name: NodeInfo(
                layer=layer_of[node.name],
                reads=state_of(node, modules, captured.constants),
                writes=aliasing.mutated_state_of.get(node.name, ()),
                draws=node.name in draws,
            )
            for node in graph.nodes
            if node.op not in ("placeholder", "output")
        },
        colocated=aliasing.colocated,
        written_inputs=tuple(sorted(given & set().union(*aliasing.mutated_values_of.values()))),
        rewrites=rewrites,
    )
