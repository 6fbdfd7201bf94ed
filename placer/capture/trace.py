"""Symbolic tracing that keeps the innermost submodule it cannot see through as one node."""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten

from placer.capture.call import BoundCall, flat_forward
from placer.capture.types import TENSOR

# Containers of torch.nn with layers inside: fx would keep each as one node, we look inside.
_TRACED_CONTAINERS = (
    nn.Sequential,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@dataclass(slots=True, kw_only=True)
class Trace:
    """What one successful symbolic trace of a model found."""

    graph: fx.Graph
    layer_of: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    out_spec: TreeSpec


class TraceFailure(Exception):
    """Tracing stopped inside the module ``layer``; the cause is ``__cause__``."""

    def __init__(self, layer: str, reason: str, location: str) -> None:
        super().__init__(layer, reason, location)
        self.layer = layer
        self.reason = reason
        self.location = location


class Untraceable(Exception):
    """The program does something here that a graph cannot express."""


def trace_model(model: nn.Module, bound: BoundCall, leaves: Mapping[str, str]) -> Trace:
    """Trace ``model`` once, with the modules in ``leaves`` kept as single nodes.

    Raises ``TraceFailure`` that names the innermost module whose forward could not be traced.
    """
    tracer = _Tracer(bound, frozenset(leaves))
    try:
        graph = tracer.trace(model)
    except Exception as error:
        layer = tracer.failed_in if tracer.failed_in is not None else ""
        raise TraceFailure(layer, describe(error), locate(error)) from error
    assert tracer.out_spec is not None
    constants = {
        node.name: tracer.burned_in[node.target]
        for node in graph.nodes
        if node.op == "get_attr" and node.target in tracer.burned_in
    }
    return Trace(
        graph=graph, layer_of=tracer.layer_of, constants=constants, out_spec=tracer.out_spec
    )


def find_opaque_modules(model: nn.Module) -> dict[str, str]:
    """Submodules that must stay whole before any trace: path -> reason in a sentence."""
    opaque: dict[str, str] = {}
    for path, module in model.named_modules():
        if not path or is_torch_leaf(module):
            continue
        if any(getattr(module, hooks, None) for hooks in _HOOKS):
            opaque[path] = "it has hooks, which must run around the whole module"
        elif torch.nn.utils.parametrize.is_parametrized(module):
            opaque[path] = "it has parametrized parameters, which must be computed inside it"
        elif isinstance(module, torch.jit.ScriptModule):
            opaque[path] = "it is TorchScript, which cannot be traced into"
    return opaque


def is_torch_leaf(module: nn.Module) -> bool:
    """Is ``module`` a layer of ``torch.nn`` that is one node of the graph by nature?"""
    return type(module).__module__.startswith(("torch.nn", "torch.ao.nn")) and not isinstance(
        module, _TRACED_CONTAINERS
    )


class _Proxy(fx.Proxy):
    """A proxy that records the in-place operators, which ``fx.Proxy`` turns into copies."""

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


def _record_inplace(name: str) -> None:
    function = getattr(operator, name)

    def inplace(self: _Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    setattr(_Proxy, f"__{name}__", inplace)


INPLACE_OPERATORS: dict[Callable[..., Any], Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod,
    operator.ipow: operator.pow,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
    operator.ixor: operator.xor,
}
for _function in INPLACE_OPERATORS:
    _record_inplace(_function.__name__)


class _StateProxy(_Proxy):
    """A parameter or buffer: its shape is a fact of the model, so plain integers come back."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, tensor: Tensor) -> None:
        super().__init__(node, tracer)
        self.tensor = tensor

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def ndim(self) -> int:
        return self.tensor.ndim

    @property
    def requires_grad(self) -> bool:
        return self.tensor.requires_grad

    def size(self, dim: int | None = None) -> Any:
        return self.tensor.shape if dim is None else self.tensor.size(dim)

    def dim(self) -> int:
        return self.tensor.dim()

    def numel(self) -> int:
        return self.tensor.numel()

    def __len__(self) -> int:
        return len(self.tensor)


class _Tracer(fx.Tracer):
    """``fx.Tracer`` from flat tensors to flat leaves, that remembers who called what."""

    def __init__(self, bound: BoundCall, leaves: frozenset[str]) -> None:
        super().__init__()
        self.bound = bound
        self.leaves = leaves
        self.stack: list[str] = [""]
        self.failed_in: str | None = None
        self.layer_of: dict[str, str] = {}
        self.burned_in: dict[str, Tensor] = {}
        self.out_spec: TreeSpec | None = None
        self.state_names: dict[int, str] | None = None
        self.modes = _ambient_modes()

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        self.state_names = {
            id(tensor): name
            for name, tensor in (*self.root.named_buffers(), *self.root.named_parameters())
        }
        taken: set[str] = set()
        proxies = []
        for leaf_name, constant in zip(self.bound.leaf_names, self.bound.constants, strict=True):
            if constant is TENSOR:
                name = _identifier(leaf_name, taken)
                proxies.append(self.create_proxy("placeholder", name, (), {}))

        def flatten(result: Any) -> list[Any]:
            leaves, self.out_spec = tree_flatten(result)
            return leaves

        return flat_forward(self.bound, flatten), [self.root, *proxies]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.leaves or is_torch_leaf(m)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            return super().call_module(m, forward, args, kwargs)
        self.stack.append(path)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            if self.failed_in is None:
                self.failed_in = path
            raise
        finally:
            self.stack.pop()

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: Any = None, type_expr: Any = None
    ) -> fx.Node:
        if kind not in ("placeholder", "output") and (changed := _ambient_modes() - self.modes):
            raise Untraceable(f"it computes under {' and '.join(sorted(changed))}")
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        if kind not in ("placeholder", "output"):
            self.layer_of[node.name] = target if kind == "call_module" else self.stack[-1]
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            assert self.state_names is not None
            if id(a) in self.state_names:
                return self.create_node("get_attr", self.state_names[id(a)], (), {})
            node = super().create_arg(a)
            self.burned_in[node.target] = a
            return node
        return super().create_arg(a)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if not isinstance(attr_val, Tensor) or self.state_names is None:
            return attr_val
        name = self.state_names.get(id(attr_val))
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            node = self.create_node("get_attr", name, (), {})
            parameter_proxy_cache[name] = _StateProxy(node, self, attr_val)
        return parameter_proxy_cache[name]


def _ambient_modes() -> frozenset[str]:
    """The modes that a context manager in forward may switch and that a graph does not record."""
    modes = {"torch.no_grad" if not torch.is_grad_enabled() else "torch.enable_grad"}
    if torch.is_inference_mode_enabled():
        modes.add("torch.inference_mode")
    for device_type in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device_type):
            modes.add(f"torch.autocast({device_type!r}, {torch.get_autocast_dtype(device_type)})")
        else:
            modes.add(f"torch.autocast({device_type!r}, enabled=False)")
    return frozenset(modes)


def _identifier(leaf_name: str, taken: set[str]) -> str:
    name = "".join(c if c.isalnum() else "_" for c in leaf_name)
    if not name.isidentifier():
        name = f"arg_{name}"
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def describe(error: BaseException) -> str:
    """Why tracing stopped, in a sentence without the insides of torch."""
    text = str(error).strip().split("\n")[0]
    if isinstance(error, Untraceable):
        return text
    if "inputs to control flow" in text:
        return "its Python control flow depends on the value of a tensor or of a size"
    if "Proxy object cannot be iterated" in text:
        return "it iterates over a tensor, whose length is not known in a graph"
    if "'len' is not supported" in text:
        return "it takes the len() of a tensor, which is not known in a graph"
    return f"it cannot be traced symbolically ({type(error).__name__}: {text})"


def locate(error: BaseException) -> str:
    """``file.py:line`` of the innermost frame outside torch and placer, or ``""``."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        name = frame.filename.replace("\\", "/")
        if "/torch/" not in name and "/placer/capture/" not in name and not name.startswith("<"):
            return f"{name}:{frame.lineno}"
    return ""
