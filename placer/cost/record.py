"""Run a captured model once on fake tensors, and record what every node makes, saves and frees.

The run is forward, a stand-in loss, backward. A dispatch mode sees every storage come; a weak
reference sees it go; the saved-tensor hooks see who keeps it for backward; hooks on the autograd
nodes tell whose backward is running.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from placer.cost.kernels import device_kernels
from placer.errors import CaptureError

_INPUT = -1


@dataclass(slots=True, eq=False)
class RecordedStorage:
    """One storage of the run: which node made it in which phase, who used, saved and freed it."""

    nbytes: int
    made_by: int
    backward: bool
    users: set[int] = field(default_factory=set)
    savers: set[int] = field(default_factory=set)
    saved_nbytes: list[tuple[int, int]] = field(default_factory=list)  # saver, of what it saved
    freed_by: int | None = (
        None  # the node in whose backward it went; None: it did not, or in forward
    )
    parameter_gradient: bool = False
    of_weight: bool = False  # it waits to be added to what a weight's other readers give
    fixed: bool = False  # made of weights alone
    live: bool = True
    sent: list[tuple[int, int, int]] = field(default_factory=list)  # parts: (from, to node, bytes)


@dataclass(slots=True)
class NodeTally:
    """Sums for one node over the run; ``events`` are the changes of live bytes in its backward.

    An event of no bytes: what was saved for backward is read there.
    """

    forward_flops: int = 0
    backward_flops: int = 0
    forward_traffic: int = 0
    backward_traffic: int = 0
    forward_transient: int = 0
    events: list[tuple[RecordedStorage, int]] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """Watches one run; ``position`` and ``backward`` say which node is running, and which way."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__()
        self.tallies = [NodeTally() for _ in range(num_nodes)]
        self.storages: list[RecordedStorage] = []
        self.saving: set[int] = set()  # nodes that save something for backward, or a weight
        self.position = _INPUT
        self.backward = False
        self._known: dict[int, tuple[weakref.ref[Any], RecordedStorage | None]] = {}
        self._own_live = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if self.position == _INPUT:
            return result
        tally = self.tallies[self.position]
        for tensor in inputs:
            stored = self.storage(tensor)
            if stored is not None and not self.backward:
                stored.users.add(self.position)
        count = flop_registry.get(func._overloadpacket)
        flops = 0 if count is None else count(*args, **kwargs, out_val=result)
        moved = () if getattr(func, "is_view", False) else (*inputs, *outputs)
        traffic = sum(x.numel() * x.element_size() for x in moved)
        if self.backward:
            tally.backward_flops += flops
            tally.backward_traffic += traffic
        else:
            tally.forward_flops += flops
            tally.forward_traffic += traffic
        of_weights = bool(inputs) and all(self._is_fixed(tensor) for tensor in inputs)
        for tensor in outputs:
            if id(_key(tensor)) not in self._known:
                self.add(tensor).fixed = of_weights
        return result

    def _is_fixed(self, tensor: Tensor) -> bool:
        _, record = self._known.get(id(_key(tensor)), (None, None))
        return record is None or record.fixed

    def storage(self, tensor: Tensor) -> RecordedStorage | None:
        """The record of the tensor's storage; None for weights and what is not recorded."""
        known = self._known.get(id(_key(tensor)))
        return known[1] if known is not None else None

    def ignore(self, tensor: Tensor) -> None:
        """Leave the tensor's storage (a weight) out of the record."""
        self._remember(tensor, None)

    def add(self, tensor: Tensor) -> RecordedStorage:
        """Record the tensor's storage as made now, by the running node."""
        made = RecordedStorage(_key(tensor).nbytes(), self.position, self.backward)
        self.storages.append(made)
        self._remember(tensor, made)
        if self.position != _INPUT:
            self._event(made, made.nbytes)
        return made

    def _remember(self, tensor: Tensor, record: RecordedStorage | None) -> None:
        storage = _key(tensor)
        key = id(storage)
        if key in self._known:
            return

        def gone(_: Any) -> None:
            self._known.pop(key, None)
            if record is not None:
                record.live = False
                if self.backward:
                    record.freed_by = self.position
                self._event(record, -record.nbytes)

        self._known[key] = (weakref.ref(storage, gone), record)

    def _event(self, record: RecordedStorage, change: int) -> None:
        if not 0 <= self.position < len(self.tallies):
            return
        tally = self.tallies[self.position]
        if self.backward:
            tally.events.append((record, change))
        elif record.made_by == self.position:
            self._own_live += change
            tally.forward_transient = max(tally.forward_transient, self._own_live)

    def save(self, tensor: Tensor) -> None:
        """Note that the running node saves ``tensor`` for backward."""
        self.saving.add(self.position)
        stored = self.storage(tensor)
        if stored is not None:
            stored.savers.add(self.position)
            nbytes = tensor.numel() * tensor.element_size()
            stored.saved_nbytes.append((self.position, min(nbytes, stored.nbytes)))

    def read(self, record: RecordedStorage) -> None:
        """Note that the running node's backward reads what was saved."""
        self._event(record, 0)

    def start_node(self, position: int) -> None:
        self.position = position
        self._own_live = 0


def _key(tensor: Tensor) -> Any:
    if tensor.layout != torch.strided:
        raise CaptureError(
            "the model",
            f"makes a tensor of layout {tensor.layout}, whose bytes depend on its values, which "
            "planning does not have",
            "hand it to forward as an input, or make it dense",
        )
    return tensor.untyped_storage()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A finished run: what was recorded, and each node's result size and readers.

    ``saving`` are the nodes that saved anything for backward, be it only a weight.
    """

    storages: tuple[RecordedStorage, ...]
    saving: frozenset[int]
    tallies: tuple[NodeTally, ...]
    output_nbytes: tuple[int, ...]
    output_storages: tuple[tuple[RecordedStorage, ...], ...]  # what a node's result is held in


def stand_in_loss(leaves: Sequence[Any]) -> Tensor:
    """A scalar that depends on every floating-point result: the sum of their mean squares.

    Like a usual loss it needs a gradient of the size of the results.
    """
    terms = [
        leaf.square().mean()
        for leaf in leaves
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    return torch.stack([term.float() for term in terms]).sum() if terms else torch.zeros(())


def record_run(
    graph: fx.Graph,
    order: Sequence[str],
    model: nn.Module,
    inputs: Sequence[Tensor],
    constants: dict[str, Tensor],
    *,
    training: bool,
    run_context: Callable[[], Any],
    kernels: Sequence[str],
    half: bool,
    offloads: bool = False,
    visible: Callable[[Sequence[Any]], list[Any]] = list,
) -> Recording:
    """Record one run of ``graph`` on ``inputs`` with the weights of ``model`` (all of them fake).

        A loss depends on the ``visible`` ones of the result's leaves, and the caller holds all of them.
        Call it under the fake mode that the tensors belong to. ``run_context`` makes the context that
        each node runs in (autocast, with ``half``); ``kernels`` are the device types, per node and of
    the loss, whose kernels run. With ``offloads`` nothing is kept for backward, as when all of it
    goes to the host at once, and no backward is run.
    """
    position = {name: i for i, name in enumerate(order)}
    recorder = Recorder(len(order) + 1)
    for tensor in (*model.parameters(), *model.buffers(), *constants.values()):
        recorder.ignore(tensor)
    for tensor in inputs:
        recorder.add(tensor)
    output_nbytes = [0] * (len(order) + 1)
    output_storages: list[tuple[RecordedStorage, ...]] = [()] * (len(order) + 1)
    owner = _BackwardOwners(recorder)

    def pack(tensor: Tensor) -> Tensor:
        if not recorder.backward:
            recorder.save(tensor)
        return tensor.new_empty(0) if offloads else tensor.detach()

    def unpack(tensor: Tensor) -> Tensor:
        stored = recorder.storage(tensor)
        if stored is not None and recorder.backward:
            recorder.read(stored)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
    chosen: Any = nullcontext()
    if set(kernels) != {"cpu"}:
        chosen = device_kernels(lambda: kernels[recorder.position], half=half)
    with torch.set_grad_enabled(training), recorder, hooks, chosen:
        values: dict[str, Any] = {}
        leaves = iter(inputs)
        last_reader = _last_readers(graph)
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node.name] = next(leaves)
                continue
            if node.op == "output":
                break
            recorder.start_node(position[node.name])
            with run_context():
                result = _run_node(node, model, values, constants)
            values[node.name] = result
            output_nbytes[position[node.name]] = _nbytes(result)
            found = [recorder.storage(x) for x in tree_leaves(result) if isinstance(x, Tensor)]
            output_storages[position[node.name]] = tuple(s for s in found if s is not None)
            owner.claim(result, position[node.name])
            del result
            for dead in last_reader.get(node.name, ()):
                del values[dead]
        recorder.start_node(len(order))
        result_leaves = fx.node.map_arg(node.args[0], lambda n: values[n.name])
        values.clear()
        under_loss = visible(list(result_leaves)) if training else []
        held = {id(leaf) for leaf in under_loss}
        others = [x for x in result_leaves if isinstance(x, Tensor) and id(x) not in held]
        for stored in map(recorder.storage, others):
            if stored is not None:
                stored.users.add(len(order))  # it goes to the caller, who computes no loss from it
        loss = stand_in_loss(under_loss)
        del held, others, under_loss, result_leaves
        owner.claim(loss, len(order))
        for stored in recorder.storages:
            if stored.live and not stored.savers and stored.made_by != _INPUT:
                stored.savers.add(stored.made_by)
                recorder.saving.add(stored.made_by)
        if training and loss.requires_grad and not offloads:
            recorder.backward = True
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(owner.mark_gradient)
            _backward(loss)
        recorder.position = _INPUT
    return Recording(
        storages=tuple(recorder.storages),
        saving=frozenset(recorder.saving),
        tallies=tuple(recorder.tallies),
        output_nbytes=tuple(output_nbytes),
        output_storages=tuple(output_storages),
    )


def _backward(loss: Tensor) -> None:
    try:
        loss.backward()
    except Exception as error:
        raise CaptureError(
            "the model",
            f"backward of a loss over all results fails: {type(error).__name__}: {error}",
            'detach the results that have no derivative, or plan with "training": false',
        ) from error


def _run_node(node: fx.Node, model: nn.Module, values: dict[str, Any], constants: Any) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n.name])
    if node.op == "get_attr":
        if node.name in constants:
            return constants[node.name]
        owner, _, leaf = str(node.target).rpartition(".")
        return getattr(model.get_submodule(owner), leaf)
    if node.op == "call_module":
        return model.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _last_readers(graph: fx.Graph) -> dict[str, list[str]]:
    """Node -> the values that nobody reads after it."""
    seen: set[str] = set()
    dying: dict[str, list[str]] = defaultdict(list)
    for node in reversed(list(graph.nodes)):
        for source in (*node.all_input_nodes, *(() if node.op == "output" else (node,))):
            if source.name not in seen:
                seen.add(source.name)
                dying[node.name].append(source.name)
    return dying


def _nbytes(value: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_leaves(value) if isinstance(x, Tensor))


class _BackwardOwners:
    """Knows which node each autograd node belongs to, and tells the recorder when it runs."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._claimed: dict[Any, int] = {}

    def claim(self, result: Any, position: int) -> None:
        """All autograd nodes between ``result`` and what is claimed already belong to ``position``."""
        stack = [
            leaf.grad_fn
            for leaf in tree_leaves(result)
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None
        ]
        while stack:
            node = stack.pop()
            if node is None or node in self._claimed:
                continue
            self._claimed[node] = position
            node.register_prehook(self._starter(position))
            node.register_hook(self._sender(node, position))
            stack.extend(parent for parent, _ in node.next_functions if parent is not None)

    def _starter(self, position: int) -> Callable[[Any], None]:
        def start(_: Any) -> None:
            if self._recorder.backward and self._recorder.position != position:
                self._recorder.start_node(position)

        return start

    def _sender(self, node: Any, position: int) -> Callable[[Any, Any], None]:
        """Notes which part of a storage the backward of ``node`` hands on to which other node."""
        parents = [parent for parent, _ in node.next_functions]
        targets = [self._claimed.get(parent) for parent in parents]
        weights = [hasattr(parent, "variable") for parent in parents]  # AccumulateGrad

        def send(grad_inputs: Any, _: Any) -> None:
            for grad, target, of_weight in zip(grad_inputs, targets, weights, strict=False):
                if isinstance(grad, Tensor) and target is not None and target != position:
                    stored = self._recorder.storage(grad)
                    if stored is not None:
                        nbytes = grad.numel() * grad.element_size()
                        stored.sent.append((position, target, nbytes))
                        stored.of_weight |= of_weight

        return send

    def mark_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        stored = self._recorder.storage(parameter.grad)
        if stored is not None:
            stored.parameter_gradient = True
