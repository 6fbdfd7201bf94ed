"""Run a captured model once on fake tensors, and record what every node makes, saves and frees.

The run is forward, a stand-in loss, backward. `placer.cost.storages` sees storages come and go; the
saved-tensor hooks see who keeps them for backward; `placer.cost.owners` whose backward is running.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from placer.cost.kernels import device_kernels
from placer.cost.owners import BackwardOwners
from placer.cost.storages import OUTSIDE, NodeTally, RecordedStorage, StorageRecorder
from placer.errors import CaptureError, PlacerError
from placer.program import result_tensors
from placer.program.fake_mode import detach_fake


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


class NodeFailed(Exception):
    """The node of that name raised what this was raised from."""

    def __init__(self, node: str) -> None:
        super().__init__(node)
        self.node = node


def stand_in_loss(output: Any) -> Tensor:
    """The sum of the mean squares of the floating-point tensors in ``output``, in place of a user's loss.

    Of objects it reads what `result_tensors` finds. Its gradient has the size of the results, as usual.
    """
    terms = [x.square().mean() for x in result_tensors(output) if x.is_floating_point()]
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
    the loss, whose kernels run ("" for none in particular). With ``offloads`` nothing is kept for
    backward, as when all of it goes to the host at once, and no backward is run. Raises
    ``NodeFailed``, and ``CaptureError`` when the backward fails.
    """
    recorder = StorageRecorder(kernels)
    for tensor in (*model.parameters(), *model.buffers(), *constants.values()):
        recorder.ignore(tensor)
    for tensor in inputs:
        recorder.add(tensor)
    run = _Run(graph, order, model, constants, recorder, run_context)
    saving = _saving_hooks(recorder, keeps=not offloads)
    chosen: AbstractContextManager[Any] = nullcontext()
    if "cuda" in kernels:
        chosen = device_kernels(lambda: kernels[recorder.position], half=half)
    with torch.set_grad_enabled(training), recorder, saving, chosen:
        leaves = run.forward(inputs)
        loss = run.loss(leaves, visible(leaves) if training else [])
        del leaves
        run.end_forward(loss)
        if training and loss.requires_grad and not offloads:
            run.backward(loss)
        recorder.position = OUTSIDE
    return Recording(
        storages=tuple(recorder.storages),
        saving=frozenset(recorder.saving),
        tallies=tuple(recorder.tallies),
        output_nbytes=tuple(run.output_nbytes),
        output_storages=tuple(run.output_storages),
    )


def _saving_hooks(
    recorder: StorageRecorder, *, keeps: bool
) -> torch.autograd.graph.saved_tensors_hooks:
    """Tell the recorder what is saved for backward, and when it is read; ``keeps``: it stays live."""

    def pack(tensor: Tensor) -> Tensor:
        if not recorder.backward:
            recorder.save(tensor)
        # A result would refer to its own node, and would not be freed.
        return detach_fake(tensor) if keeps else tensor.new_empty(0)

    def unpack(tensor: Tensor) -> Tensor:
        stored = recorder.storage(tensor)
        if stored is not None and recorder.backward:
            recorder.read(stored)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class _Run:
    """Runs a graph node by node, and tells the recorder which; holds no value longer than readers do."""

    def __init__(
        self,
        graph: fx.Graph,
        order: Sequence[str],
        model: nn.Module,
        constants: dict[str, Tensor],
        recorder: StorageRecorder,
        run_context: Callable[[], Any],
    ) -> None:
        self._graph = graph
        self._position = {name: i for i, name in enumerate(order)}
        self._loss = len(order)  # the loss's position
        self._model = model
        self._constants = constants
        self._recorder = recorder
        self._owners = BackwardOwners(recorder)
        self._run_context = run_context
        self.output_nbytes = [0] * (len(order) + 1)
        self.output_storages: list[tuple[RecordedStorage, ...]] = [()] * (len(order) + 1)

    def forward(self, inputs: Sequence[Tensor]) -> list[Any]:
        """Run every node; the leaves of the result."""
        values: dict[str, Any] = {}
        leaves = iter(inputs)
        last_reader = last_readers(self._graph)
        for node in self._graph.nodes:
            if node.op == "placeholder":
                values[node.name] = next(leaves)
                continue
            if node.op == "output":
                break
            self._record_node(node, values)
            for dead in last_reader.get(node.name, ()):
                del values[dead]
        self._recorder.start_node(self._loss)
        return list(fx.node.map_arg(node.args[0], lambda n: values[n.name]))

    def _record_node(self, node: fx.Node, values: dict[str, Any]) -> None:
        position = self._position[node.name]
        self._recorder.start_node(position)
        with self._run_context():
            try:
                result = run_node(node, self._model, values, self._constants)
            except PlacerError:
                raise
            except Exception as error:
                raise NodeFailed(node.name) from error
        values[node.name] = result
        self.output_nbytes[position] = _nbytes(result)
        found = [self._recorder.storage(x) for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.output_storages[position] = tuple(s for s in found if s is not None)
        self._owners.claim(result, position)

    def loss(self, leaves: Sequence[Any], under_loss: Sequence[Any]) -> Tensor:
        """A loss over those leaves; the others go to the caller, who computes no loss from them."""
        visible = {id(leaf) for leaf in under_loss}
        others = (x for x in leaves if isinstance(x, Tensor) and id(x) not in visible)
        for stored in map(self._recorder.storage, others):
            if stored is not None:
                stored.users.add(self._loss)
        return stand_in_loss(under_loss)

    def end_forward(self, loss: Tensor) -> None:
        """What is live now without having been saved is kept by the node that made it."""
        self._owners.claim(loss, self._loss)
        for stored in self._recorder.storages:
            if stored.live and not stored.savers and stored.made_by != OUTSIDE:
                stored.savers.add(stored.made_by)
                self._recorder.saving.add(stored.made_by)

    def backward(self, loss: Tensor) -> None:
        """Raises ``CaptureError`` when a result has no backward."""
        self._recorder.backward = True
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._owners.mark_gradient)
        try:
            loss.backward()
        except Exception as error:
            raise CaptureError(
                "the model",
                f"backward of a loss over all results fails: {type(error).__name__}: {error}",
                'detach the results that have no derivative, or plan with "training": false',
            ) from error


def run_node(node: fx.Node, model: nn.Module, values: dict[str, Any], constants: Any) -> Any:
    """What ``node`` computes from ``values`` with the weights of ``model``."""
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


def last_readers(graph: fx.Graph) -> dict[str, list[str]]:
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
