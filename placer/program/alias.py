"""Find the nodes that share memory or draw random numbers, by running the graph once on fake tensors."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
import torch
from torch import Tensor, fx, nn

from placer._torch import storage_key, without_torch_function
from placer.operands import tensors_of_tree
from placer.program.fake.converter import FakeConverter, Guess
from placer.program.state import StateNames


@dataclass(frozen=True, slots=True, kw_only=True)
class Aliasing:
    """What nodes write and share, by name. The fields are those of `placer.program.Program`."""

    mutated_state_of: dict[str, tuple[str, ...]]
    mutated_values_of: dict[str, tuple[str, ...]]  # node -> earlier nodes whose memory it writes
    colocated: tuple[tuple[str, ...], ...]
    rng_nodes: tuple[str, ...]


class NodeFailure(Exception):
    """A node of the graph raised an exception, which is ``__cause__``."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(node.name)
        self.node = node


def analyze_aliasing(
    model: nn.Module,
    graph: fx.Graph,
    constants: Mapping[str, Tensor],
    inputs: Sequence[Any],
    *,
    guess: Guess,
    arguments: Mapping[str, Any],
) -> Aliasing:
    """Run ``graph`` on fake copies of the inputs and of the model's state; nothing is allocated.

    ``arguments`` are as of `FakeConverter.module`.

    ::

        y = conv(x)        allocates a storage S
        v = y.view(-1)     a view: reads S, returns S
        s = y.sum()        reads S
        y.relu_()          writes S  -> {conv, v, s, relu_} must be on one stage
        t = y.mean()       reads S after the last write: may be on another stage

    If an input, a parameter or a buffer is written, all nodes that use its storage must be on one stage,
    including later ones, because each stage has its own copy of the tensor. Raises ``NodeFailure`` if a node
    does not run.
    """
    converter = FakeConverter()
    fake_model = converter.module(model, arguments)
    interpreter = _AliasInterpreter(
        fake_model, graph, {name: converter.tensor(t) for name, t in constants.items()}
    )
    fakes = [x if isinstance(x, int | float) else converter.inputs([x])[0] for x in inputs]
    observed = converter.mode.observed_by(interpreter.writes)
    with torch.enable_grad(), converter.running(guess), observed:
        interpreter.run(*fakes)
    return Aliasing(
        mutated_state_of=interpreter.written_state,
        mutated_values_of=interpreter.written_values,
        colocated=_groups(interpreter, interpreter.state),
        rng_nodes=tuple(interpreter.rng_nodes),
    )


class _WriteLog:
    """Records which storages operators write, by their schemas, and which operators draw random numbers."""

    def __init__(self, names: StateNames) -> None:
        self.written: set[int] = set()
        self.state: set[str] = set()  # the names of parameters and buffers among them
        self.drew = False
        self._names = names

    def __call__(self, func: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        self.drew = self.drew or torch.Tag.nondeterministic_seeded in func.tags
        for index, name in written_arguments(func):
            value = args[index] if index < len(args) else kwargs.get(name)
            self.written.update(_storages(value))
            with without_torch_function():
                self.state.update(n for x in tensors_of_tree(value) for n in self._names.of(x))
        return run()


@functools.cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that the operator writes."""
    arguments = list(enumerate(func._schema.arguments))
    written = [(i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write]
    if func._schema.name in _BATCH_NORMS:
        # They write running statistics (arguments 3 and 4), which their schemas do not declare.
        written += [(i, a.name) for i, a in arguments[3:5]]
    return tuple(written)


_BATCH_NORMS = ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm")


class _AliasInterpreter(fx.Interpreter):
    """Runs the graph and notes which storages each node uses, and which of them it writes."""

    def __init__(self, model: nn.Module, graph: fx.Graph, constants: Mapping[str, Tensor]) -> None:
        # All values stay alive, because storages are identified by address and addresses are reused.
        super().__init__(model, garbage_collect_values=False, graph=graph)
        self.constants = constants
        self.named = [*model.named_buffers(), *model.named_parameters()]
        self.writes = _WriteLog(StateNames(self.named))
        self.touched: dict[str, set[int]] = {}  # node -> storages that it reads or returns
        self.written: dict[str, set[int]] = {}  # node -> earlier storages that it writes
        # Node -> names of what it writes of parameters and buffers
        self.written_state: dict[str, tuple[str, ...]] = {}
        self.rng_nodes: list[str] = []
        self.known: set[int] = set()  # storages so far
        self.given: set[int] = set()  # storages of inputs and constants
        self.values: dict[int, list[str]] = defaultdict(list)  # storage -> nodes that return it
        # Node -> earlier nodes with what it writes
        self.written_values: dict[str, tuple[str, ...]] = {}
        self.state = {storage_key(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self.known |= self.state

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "get_attr" and n.name in self.constants:
            value: Any = self.constants[n.name]
            self.touched[n.name] = set(_storages(value))
            self.known.update(self.touched[n.name])
            self.given.update(self.touched[n.name])
            for key in self.touched[n.name]:
                self.values[key].append(n.name)
            return value
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        reads = set(_storages((args, kwargs)))
        modules = [x for x in args if isinstance(x, nn.Module)]  # of `targets.call_module`
        if n.op == "call_module":
            modules.append(self.fetch_attr(str(n.target)))
        own = [x for module in modules for x in (*module.parameters(), *module.buffers())]
        own = [x for x in own if x.layout == torch.strided]
        before = _storages(own)
        reads.update(before)
        self.writes.written.clear()
        self.writes.state.clear()
        self.writes.drew = False
        try:
            value = getattr(self, n.op)(n.target, args, kwargs)
        except Exception as error:
            raise NodeFailure(n) from error
        if self.writes.drew:
            self.rng_nodes.append(n.name)
        gives = set(_storages(value))
        for tensor, was, now in zip(own, before, _storages(own), strict=True):
            if now != was:  # `weight.data = …`: to write it, and what is now there is the state
                self.state.add(now)
                gives.add(now)
                self.known.add(now)
                self.writes.written.update((was, now))
                self.writes.state.update(name for name, x in self.named if x is tensor)
        if n.op == "placeholder":
            self.given |= gives
        if n.op not in ("placeholder", "output"):
            self.touched[n.name] = reads | gives
            self.written[n.name] = self.writes.written & self.known
            if self.writes.state:
                self.written_state[n.name] = tuple(sorted(self.writes.state))
            values = {x for key in self.written[n.name] for x in self.values.get(key, ())}
            if values:
                self.written_values[n.name] = tuple(sorted(values))
        self.known |= gives
        for key in gives - self.state:
            self.values[key].append(n.name)
        return value


def _groups(run: _AliasInterpreter, state: set[int]) -> tuple[tuple[str, ...], ...]:
    """Groups of nodes that must be on one stage; ``state`` are storages of parameters and buffers."""
    order = list(run.touched)
    last_write: dict[int, int] = {}
    touching: dict[int, list[int]] = defaultdict(list)
    for index, name in enumerate(order):
        for key in run.touched[name]:
            touching[key].append(index)
        for key in run.written.get(name, ()):
            last_write[key] = index
    groups = nx.utils.UnionFind(range(len(order)))
    for key, last in sorted(last_write.items(), key=lambda item: item[1]):
        everywhere = key in state or key in run.given
        members = [i for i in touching[key] if everywhere or i <= last]
        groups.union(*members)
    ordered = sorted(sorted(group) for group in groups.to_sets() if len(group) > 1)
    return tuple(tuple(order[i] for i in group) for group in ordered)


def _storages(value: Any) -> list[int]:
    with without_torch_function():  # otherwise torch-function modes would see every access
        return [storage_key(x) for x in tensors_of_tree(value) if x.layout == torch.strided]
