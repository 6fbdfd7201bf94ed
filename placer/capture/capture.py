"""Capture a model: trace, keep whole what cannot be traced, check by a run on fake tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from placer.capture.alias import Aliasing, NodeFailure, analyze_aliasing
from placer.capture.call import BoundCall, bind_call, make_call_format
from placer.capture.fingerprint import fingerprint_graph
from placer.capture.restore import unchanged
from placer.capture.trace import (
    INPLACE_OPERATORS,
    Trace,
    TraceFailure,
    describe,
    find_opaque_modules,
    is_torch_leaf,
    locate,
    trace_model,
)
from placer.capture.types import Capture, WholeModule
from placer.errors import CaptureError


def capture_model(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Capture:
    """The graph of ``model`` called with ``args`` and ``kwargs``, in the mode (train or eval) it is in.

    Allocates nothing; the model and the inputs may be on any device, ``meta`` included. A submodule
    that cannot be traced becomes one node (``whole_modules`` says why) and the trace starts again,
    so there are at most as many traces as modules. Raises ``CaptureError``.
    """
    _check_model(model)
    bound = bind_call(model, args, kwargs)
    opaque = find_opaque_modules(model)
    whole = {path: WholeModule(layer=path, reason=why, location="") for path, why in opaque.items()}
    while True:
        try:
            with unchanged(model):
                trace = trace_model(model, bound, {path: w.reason for path, w in whole.items()})
            aliasing = _validate(model, trace, bound)
            break
        except TraceFailure as failure:
            if not failure.layer or failure.layer in whole:
                raise CaptureError(
                    failure.layer or type(model).__name__,
                    f"cannot be captured: {failure.reason}"
                    + (f" ({failure.location})" if failure.location else ""),
                    "move this code into a submodule, which is then kept whole on one device",
                ) from failure.__cause__
            whole[failure.layer] = WholeModule(
                layer=failure.layer, reason=failure.reason, location=failure.location
            )
    return _assemble(model, trace, aliasing, bound, tuple(whole.values()))


def _validate(model: nn.Module, trace: Trace, bound: BoundCall) -> Aliasing:
    try:
        aliasing = analyze_aliasing(model, trace.graph, trace.constants, bound.tensors)
    except NodeFailure as failure:
        error = failure.__cause__
        assert error is not None
        node = failure.node
        layer = trace.layer_of.get(node.name, "")
        if node.op == "call_module":
            layer = _parent(layer)
        reason = f"its graph does not run: {describe(error)} at {node.format_node()}"
        raise TraceFailure(layer, reason, locate(error)) from error
    for node in trace.graph.nodes:
        if node.name in aliasing.scalar_inplace:
            node.target = INPLACE_OPERATORS[node.target]
    return aliasing


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise CaptureError(type(model).__name__, "is not a torch.nn.Module", "pass a module")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise CaptureError(
                name,
                "is not initialized yet, so the model's shapes are unknown (a lazy module)",
                "run the model once on a small input before you hand it to placer",
            )


def _assemble(
    model: nn.Module,
    trace: Trace,
    aliasing: Aliasing,
    bound: BoundCall,
    whole: tuple[WholeModule, ...],
) -> Capture:
    graph = trace.graph
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    modules = dict(model.named_modules(remove_duplicate=False))
    kept = {node.target for node in nodes if node.op == "call_module"}
    return Capture(
        model=model,
        graph=graph,
        order=tuple(node.name for node in nodes),
        layer_of={node.name: trace.layer_of[node.name] for node in nodes},
        state_of={node.name: _state_of(node, modules, trace.constants) for node in nodes},
        mutated_state_of=aliasing.mutated_state_of,
        together=aliasing.together,
        constants=trace.constants,
        call=make_call_format(bound, trace.out_spec),
        whole_modules=tuple(
            w for w in whole if w.layer in kept and not is_torch_leaf(modules[w.layer])
        ),
        fingerprint=fingerprint_graph(model, graph),
        training=model.training,
    )


def _state_of(
    node: fx.Node, modules: Mapping[str, nn.Module], constants: Mapping[str, Tensor]
) -> tuple[str, ...]:
    if node.op == "get_attr":
        return () if node.name in constants else (str(node.target),)
    if node.op != "call_module":
        return ()
    module, path = modules[str(node.target)], str(node.target)
    named = (
        *module.named_parameters(prefix=path, remove_duplicate=False),
        *module.named_buffers(prefix=path, remove_duplicate=False),
    )
    return tuple(name for name, _ in named)
