"""Record what a model computes: run it once on fake tensors and write down every torch call.

Python runs as always, so control flow, containers and attributes need no care. Three things are
watched: torch functions and methods (a ``TorchFunctionMode``), calls of modules (a layer of
``torch.nn``, or a module that must stay whole, becomes one node), and arithmetic on sizes
(``placer.capture.sizes``). Tensors are known by identity: each has the node that made it.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property
from torch.utils._pytree import SUPPORTED_NODES, TreeSpec, tree_flatten, tree_iter

from placer.capture.call import BoundCall, flat_forward
from placer.capture.failure import (
    ForwardFailure,
    TraceFailure,
    Untraceable,
    describe,
    locate,
    locate_caller,
)
from placer.capture.fake import FakeWorld, GuessData
from placer.capture.leaves import is_torch_leaf
from placer.capture.restore import Snapshot
from placer.capture.sizes import SizeFloat, SizeInt, plain
from placer.capture.targets import (
    ApplyFunction,
    BuildTree,
    CallMethod,
    Modes,
    UnderModes,
    call_module,
)
from placer.capture.types import TENSOR

_CPU = torch.device("cpu")
_PLAIN = (
    str,
    int,
    float,
    bool,
    complex,
    bytes,
    type(None),
    type(...),
    torch.dtype,
    torch.layout,
    torch.memory_format,
    enum.Enum,
)
_SIZES = ("size", "numel", "nelement", "stride", "storage_offset")
_READS = (
    "item",
    "tolist",
    "numpy",
    "__array__",
    "__bool__",
    "__int__",
    "__float__",
    "__complex__",
    "__index__",
    "__contains__",
)
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "backward", "grad")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What one run of a model on fake tensors did."""

    graph: fx.Graph
    layer_of: dict[str, str]
    location_of: dict[str, str]
    constants: dict[str, Tensor]
    out_spec: TreeSpec
    side_effects: tuple[tuple[str, str], ...]  # attributes of the root that forward changed


def record_model(
    world: FakeWorld,
    model: nn.Module,
    twin: nn.Module,
    bound: BoundCall,
    inputs: Sequence[Tensor],
    whole: frozenset[str],
) -> Recording:
    """Run ``twin``, the fake copy of ``model``, on fake ``inputs`` and write down what it does.

    Modules whose paths are in ``whole`` become single nodes, and so do the layers of ``torch.nn``.
    The twin is as before afterwards. Raises ``TraceFailure`` naming the innermost module that
    cannot be recorded, and ``ForwardFailure`` when the model fails by itself.
    """
    recorder = _Recorder(world, model, twin, bound, whole)
    snapshot = Snapshot(twin)
    try:
        with _ambient(world), recorder.watching():
            leaves = recorder.run(inputs)
        effects = []
        for path, attribute in snapshot.changes():
            if not path:
                effects.append((path, attribute))
            elif not any(path == w or path.startswith(w + ".") for w in recorder.kept):
                raise TraceFailure(path, f"its forward changes its attribute {attribute!r}", "")
    except (ForwardFailure, TraceFailure):
        raise
    except Exception as error:
        layer = recorder.failed_in or ""
        raise TraceFailure(layer, describe(error), locate(error)) from error
    finally:
        snapshot.restore()
    graph, names = _named_anew(recorder.finish(leaves))
    assert recorder.out_spec is not None
    return Recording(
        graph=graph,
        layer_of={names[k]: v for k, v in recorder.layer_of.items() if k in names},
        location_of={names[k]: v for k, v in recorder.location_of.items() if k in names},
        constants={names[k]: v for k, v in recorder.constants.items() if k in names},
        out_spec=recorder.out_spec,
        side_effects=tuple(effects),
    )


def _named_anew(graph: fx.Graph) -> tuple[fx.Graph, dict[str, str]]:
    """The same graph with names that count only the nodes it has, and old name -> new name.

    Erased nodes took numbers too, and how many there were may differ from run to run (einops works
    a pattern out once per process). The same graph must always have the same names.
    """
    fresh = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
        name = node.name if node.op == "placeholder" else None
        copies[node] = fresh.create_node(node.op, node.target, args, kwargs, name, node.type)
    return fresh, {old.name: new.name for old, new in copies.items()}


@contextmanager
def _ambient(world: FakeWorld) -> Iterator[None]:
    """Gradients on (a capture inside ``torch.no_grad`` serves training too), fakes on the CPU."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(world.mode)
        stack.enter_context(_CPU)
        yield


class _Recorder(TorchFunctionMode):
    def __init__(
        self,
        world: FakeWorld,
        model: nn.Module,
        twin: nn.Module,
        bound: BoundCall,
        whole: frozenset[str],
    ) -> None:
        super().__init__()
        self.world = world
        self.twin = twin
        self.bound = bound
        self.whole = whole
        self.graph = fx.Graph()
        self.stack = [""]
        self.failed_in: str | None = None
        self.paused = False
        self.kept: set[str] = set()
        self.layer_of: dict[str, str] = {}
        self.location_of: dict[str, str] = {}
        self.constants: dict[str, Tensor] = {}
        self.out_spec: TreeSpec | None = None
        self.nodes: dict[int, fx.Node] = {}
        self.alive: list[Tensor] = []  # keeps the ids in nodes valid
        self.pure: set[fx.Node] = set()
        self.sizes: dict[tuple[fx.Node, str, Any], fx.Node] = {}
        self.modes = Modes(True, False, ())
        self.saved_hooks: Any = None
        self.paths = {id(module): path for path, module in twin.named_modules()}
        self.twins = dict(zip(map(id, model.modules()), twin.modules(), strict=True))
        self.state = {
            id(tensor): name for name, tensor in (*twin.named_buffers(), *twin.named_parameters())
        }
        self.attributes = {
            id(value): f"{path}.{name}".lstrip(".")
            for path, module in twin.named_modules()
            for name, value in module.__dict__.items()
            if isinstance(value, Tensor)
        }

    # -- running ---------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Modules, custom autograd functions and torch functions report here, in this thread."""
        thread = threading.get_ident()
        original_call = nn.Module.__call__
        original_apply = torch.autograd.Function.__dict__["apply"]

        def module_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.paused or threading.get_ident() != thread:
                return original_call(module, *args, **kwargs)
            return self.call(original_call, module, args, kwargs)

        def function_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if self.paused or threading.get_ident() != thread:
                return original_apply.__get__(None, cls)(*args, **kwargs)
            return self.apply(original_apply.__get__(None, cls), cls, args, kwargs)

        self.modes = Modes.current()
        self.saved_hooks = _saved_tensor_hooks()
        nn.Module.__call__ = module_call  # type: ignore[method-assign]
        torch.autograd.Function.apply = classmethod(function_apply)
        try:
            with self:
                yield
        finally:
            nn.Module.__call__ = original_call  # type: ignore[method-assign]
            torch.autograd.Function.apply = original_apply

    def run(self, inputs: Sequence[Tensor]) -> list[Any]:
        names = (
            name
            for name, constant in zip(self.bound.leaf_names, self.bound.constants, strict=True)
            if constant is TENSOR
        )
        taken: set[str] = set()
        for leaf_name, tensor in zip(names, inputs, strict=True):
            node = self.graph.placeholder(_identifier(leaf_name, taken))
            self.bind(tensor, node)

        def flatten(result: Any) -> list[Any]:
            leaves, self.out_spec = tree_flatten(result)
            return [self.argument(leaf) for leaf in leaves]

        return flat_forward(self.bound, flatten)(self.twin, *inputs)

    def finish(self, leaves: list[Any]) -> fx.Graph:
        self.graph.output(leaves)
        for node in reversed(self.graph.nodes):
            if node in self.pure and not node.users:
                self.graph.erase_node(node)
        self.graph.lint()
        return self.graph

    # -- what reports ----------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self.get_property(func, args[0])
        if name == "__set__":
            return self.set_property(func, *args)
        method = is_tensor_method_or_property(func)
        if method and name in _READS:
            return self.read(func, args, kwargs)
        if method and name in _HOOKS:
            raise Untraceable(f"it calls {name}() on an intermediate tensor")
        if method and name in _SIZES:
            return self.size(func, name, args, kwargs)
        if method and name == "cuda":
            args, kwargs, func, name = (args[0], _CPU), {}, torch.Tensor.to, "to"
        value = func(*_executable(args), **_executable(kwargs))
        if value is NotImplemented or not self.is_recorded(value, args, kwargs):
            return value
        if method:
            self.bind(value, self.node("call_method", name, args, kwargs))
        elif func is torch.Tensor.__getitem__:
            self.bind(value, self.node("call_function", operator.getitem, args, kwargs))
        else:
            self.bind(value, self.node("call_function", func, args, kwargs))
        return value

    def is_recorded(self, value: Any, args: Any, kwargs: Any) -> bool:
        if any(isinstance(leaf, Tensor) for leaf in tree_iter(value)):
            return True
        # Without a result it was called for its effect, on a tensor if the effect concerns us.
        return value is None and any(isinstance(x, Tensor) for x in tree_iter((args, kwargs)))

    def call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        module = self.twins.get(id(module), module)
        path = self.paths.get(id(module))
        if path is None:  # made in forward, such as nn.Softmax(dim=1)(x): a part of its caller
            return original(module, *args, **kwargs)
        if path in self.whole or is_torch_leaf(module):
            self.kept.add(path)
            return self.call_whole(original, path, module, args, kwargs)
        self.stack.append(path)
        try:
            return original(module, *args, **kwargs)
        except Exception:
            if self.failed_in is None:
                self.failed_in = path
            raise
        finally:
            self.stack.pop()

    def call_whole(
        self, original: Callable[..., Any], path: str, module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        node_args, node_kwargs = self.argument(args), self.argument(kwargs)
        guess = GuessData()
        self.paused = True
        try:
            with guess:
                value = original(module, *_executable(args), **_executable(kwargs))
        except Exception as error:
            raise ForwardFailure(path) from error
        finally:
            self.paused = False
        if guess.guessed and any(isinstance(x, bool | int | float) for x in tree_iter(value)):
            raise Untraceable(f"{path} returns a number that depends on the values of tensors")
        if Modes.current() != self.modes:
            reference = self.node("get_attr", path, (), {}, layer=path)
            node = self.node(
                "call_function", call_module, (reference, *node_args), node_kwargs, layer=path
            )
        else:
            node = self.node("call_module", path, node_args, node_kwargs, layer=path)
        self.bind(value, node)
        return value

    def apply(self, original: Callable[..., Any], cls: Any, args: Any, kwargs: Any) -> Any:
        if kwargs:
            raise Untraceable(f"it applies {cls.__name__} with keyword arguments")
        node_args = self.argument(args)
        self.paused = True
        try:
            value = original(*_executable(args))
        finally:
            self.paused = False
        self.bind(value, self.node("call_function", ApplyFunction(cls), node_args, {}))
        return value

    def get_property(self, func: Any, tensor: Tensor) -> Any:
        value, name = func(tensor), func.__self__.__name__
        if name == "shape":
            return self.shape(tensor, value)
        if isinstance(value, Tensor) and name not in ("grad", "_base"):
            self.bind(value, self.node("call_function", getattr, (tensor, name), {}))
        return value

    def set_property(self, func: Any, tensor: Tensor, value: Any) -> None:
        name = func.__self__.__name__
        if name != "requires_grad":
            raise Untraceable(f"it assigns to the attribute {name!r} of a tensor")
        func(tensor, value)
        self.bind(tensor, self.node("call_method", "requires_grad_", (tensor, value), {}))

    def read(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return func(*_executable(args), **_executable(kwargs))
        except Exception as error:
            raise Untraceable("its Python code depends on the value of a tensor") from error

    # -- sizes -----------------------------------------------------------------------------------

    def shape(self, tensor: Tensor, shape: torch.Size) -> torch.Size:
        return torch.Size([self.dimension(tensor, "size", i, n) for i, n in enumerate(shape)])

    def size(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        value = func(*_executable(args), **_executable(kwargs))
        if isinstance(value, torch.Size):
            return self.shape(tensor, value)
        if isinstance(value, tuple):
            return tuple(self.dimension(tensor, name, i, n) for i, n in enumerate(value))
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        dim = dim % tensor.dim() if isinstance(dim, int) and tensor.dim() else None
        return self.dimension(tensor, name, dim, value)

    def dimension(self, tensor: Tensor, name: str, dim: Any, value: int) -> int:
        source = self.node_of(tensor)
        if source.op == "get_attr":  # the shape of a parameter is a fact of the model
            return value
        key = source, name, dim
        if key not in self.sizes:
            args = (tensor,) if dim is None else (tensor, plain(dim))
            self.sizes[key] = self.node("call_method", name, args, {}, pure=True)
        size: int = self.number(self.sizes[key], value)
        return size

    def record_number(self, function: Callable[..., Any], args: tuple[Any, ...], value: Any) -> Any:
        if self.paused or isinstance(value, bool) or not isinstance(value, int | float):
            return value
        return self.number(self.node("call_function", function, args, {}, pure=True), value)

    def number(self, node: fx.Node, value: Any) -> Any:
        number: Any = SizeInt(value) if isinstance(value, int) else SizeFloat(value)
        number.node, number.recorder = node, self
        return number

    # -- nodes -----------------------------------------------------------------------------------

    def node(
        self,
        op: str,
        target: Any,
        args: Any,
        kwargs: Any,
        *,
        pure: bool = False,
        layer: str | None = None,
    ) -> fx.Node:
        node_args, node_kwargs = self.argument(tuple(args)), self.argument(dict(kwargs))
        if not pure and op != "get_attr":
            op, target = self.under_modes(op, target)
        node = self.graph.create_node(op, target, node_args, node_kwargs)
        if pure or op == "get_attr":
            self.pure.add(node)
        self.layer_of[node.name] = self.stack[-1] if layer is None else layer
        self.location_of[node.name] = locate_caller()
        return node

    def under_modes(self, op: str, target: Any) -> tuple[str, Any]:
        if _saved_tensor_hooks() != self.saved_hooks:
            raise Untraceable(
                "it computes under saved-tensor hooks (such as activation checkpointing)"
            )
        modes = Modes.current()
        if modes == self.modes:
            return op, target
        if modes.inference:
            raise Untraceable("it computes under torch.inference_mode")
        function = CallMethod(target) if op == "call_method" else target
        return "call_function", UnderModes(function, modes, self.modes)

    def bind(self, value: Any, node: fx.Node) -> None:
        """Remember that ``node`` made every tensor in ``value``."""
        if isinstance(value, Tensor):
            self.nodes[id(value)] = node
            self.alive.append(value)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self.bind_item(item, node, operator.getitem, key)
        elif isinstance(value, tuple | list):
            for index, item in enumerate(value):
                self.bind_item(item, node, operator.getitem, index)
        elif dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                self.bind_item(getattr(value, field.name), node, getattr, field.name)

    def bind_item(self, item: Any, node: fx.Node, function: Callable[..., Any], key: Any) -> None:
        if isinstance(item, Tensor | Mapping | tuple | list) or dataclasses.is_dataclass(item):
            child = self.graph.call_function(function, (node, key))
            self.pure.add(child)
            self.layer_of[child.name] = self.layer_of.get(node.name, "")
            self.location_of[child.name] = self.location_of.get(node.name, "")
            self.bind(item, child)

    def node_of(self, tensor: Tensor) -> fx.Node:
        if id(tensor) in self.nodes:
            return self.nodes[id(tensor)]
        if id(tensor) in self.state:
            node = self.node("get_attr", self.state[id(tensor)], (), {})
        else:
            original = self.world.original(tensor)
            if original is None:
                if type(tensor) not in (Tensor, nn.Parameter):
                    raise Untraceable("it uses a tensor from code that cannot be recorded")
                original = tensor  # a real tensor from outside the model, such as a global
            path = self.attributes.get(id(tensor), f"_constant_{len(self.constants)}")
            node = self.node("get_attr", path, (), {})
            self.constants[node.name] = original
        self.bind(tensor, node)
        return node

    def argument(self, value: Any) -> Any:
        """``value`` as an argument of a node: tensors and recorded numbers become their nodes."""
        if isinstance(value, fx.Node):
            return value
        if isinstance(value, SizeInt | SizeFloat):
            return value.node if value.recorder is self else plain(value)
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, torch.device):
            return _CPU  # stands for the device of the stage, see Capture.graph
        if isinstance(value, slice):
            return slice(*map(self.argument, (value.start, value.stop, value.step)))
        if isinstance(value, np.generic):
            return value.item()
        if type(value) in (list, dict) or type(value) in (tuple, torch.Size):
            return self.container(value)
        if isinstance(value, range):
            return value
        if type(value) in SUPPORTED_NODES or isinstance(value, tuple):
            leaves, spec = tree_flatten(value)
            target = BuildTree(spec, type(value))
            return self.node("call_function", target, self.argument(tuple(leaves)), {}, pure=True)
        raise Untraceable(f"it passes an object of type {type(value).__qualname__} to an operation")

    def container(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self.argument(item) for key, item in value.items()}
        items = [self.argument(item) for item in value]
        return items if isinstance(value, list) else tuple(items)


def _executable(value: Any) -> Any:
    """``value`` for the run on fakes: plain numbers, and every device is the CPU."""
    if isinstance(value, SizeInt | SizeFloat):
        return plain(value)
    if isinstance(value, torch.device):
        return _CPU
    if type(value) in (tuple, list):
        return type(value)(map(_executable, value))
    if isinstance(value, torch.Size):
        return tuple(map(_executable, value))
    if type(value) is dict:
        return {
            key: _CPU if key == "device" and item is not None else _executable(item)
            for key, item in value.items()
        }
    if isinstance(value, slice):
        return slice(*map(_executable, (value.start, value.stop, value.step)))
    return value


def _saved_tensor_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _identifier(leaf_name: str, taken: set[str]) -> str:
    name = "".join(c if c.isalnum() else "_" for c in leaf_name)
    if not name.isidentifier():
        name = f"arg_{name}"
    while name in taken:
        name += "_"
    taken.add(name)
    return name
