"""Run a captured model once on fake tensors, and record its timeline.

The run consists of forward, the loss and backward, all on one device. `placer.cost.storages` records
when storages are allocated and freed, and which nodes use them; saved-tensor hooks report which node saves
them for backward, and `placer.cost.attribution` which node's backward is running.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from placer._torch import without_torch_function
from placer.cost.attribution import BackwardAttribution
from placer.cost.kernels import device_kernels
from placer.cost.loss import Loss
from placer.cost.storages import OUTSIDE, NodeOperations, NodeRun, StorageRecorder, StorageUses
from placer.errors import CaptureError, PlacerError, first_line
from placer.importing import user_location
from placer.operands import nbytes_of, tensors_of_tree
from placer.program.alias import NodeFailure
from placer.program.failure import with_own_lines
from placer.program.fake.mode import detach_fake
from placer.program.fake.row_gradients import row_gradient
from placer.space import Alone, Cuts, exchanging
from placer.timeline import Timeline

# In the error of torch.func's transforms when they are called under saved-tensor hooks.
_NO_HOOKS = "don't yet support saved tensor hooks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The record of a run. Sequences over nodes have one entry per position, and one for the loss.

    ``uses`` maps the number of a block of ``timeline`` to what nodes do with its storage. ``runs``
    says which node ran during which events. ``saving`` are the positions of nodes that saved something
    for backward, if only a weight.
    """

    order: tuple[str, ...]  # the names of the nodes
    timeline: Timeline
    uses: Mapping[int, StorageUses]
    runs: tuple[NodeRun, ...]
    saving: frozenset[int]
    operations: tuple[NodeOperations, ...]
    output_nbytes: tuple[int, ...]
    output_blocks: tuple[tuple[int, ...], ...]  # the blocks of each node's result
    loss: str  # its name
    row_gradients: Mapping[str, int]  # bytes of the sparse gradients, by the names of parameters
    weights: tuple[int, ...]  # how many weights with gradients each node is the first to read


def record_run(
    graph: fx.Graph,
    order: Sequence[str],
    model: nn.Module,
    inputs: Sequence[Any],
    constants: dict[str, Tensor],
    *,
    training: bool,
    run_context: Callable[[], Any],
    kernels: Sequence[str],
    half: bool,
    loss: Loss,
    unflatten: Callable[[Sequence[Any]], Any],
    rows: int | None,
    offloads: bool = False,
    cast_once: Collection[str] = (),
    cuts: Cuts | None = None,
) -> Recording:
    """Record one run of ``graph`` on ``inputs`` with the weights of ``model``; all tensors are fake.

    Call it under the fake mode of the tensors. ``order`` gives the nodes' positions. ``run_context`` makes
    the context in which each node runs (autocast; ``half`` says that its type is half precision). ``kernels``
    are device types, per node and for the loss, whose kernels run: "cpu", "cuda", or "" for CPU kernels
    without their workspaces. ``loss`` gets the result, which ``unflatten`` makes of the graph's leaves, and a
    target for so many ``rows``. With ``offloads``, nothing is kept for backward, as if all saved tensors went
    to the host at once, and no backward is run. An earlier micro-batch of the step has cast the weights of
    the names ``cast_once``. ``cuts`` are those of a program that is split in space; a shard in the middle is
    run. Raises ``NodeFailure`` if a node fails, and ``CaptureError`` if the loss or the backward fails.
    """
    known = (p for name, p in model.named_parameters() if name in cast_once and p.requires_grad)
    recorder = StorageRecorder(order, kernels, known)
    for tensor in (*model.parameters(), *model.buffers(), *constants.values()):
        recorder.ignore(tensor)
    for tensor in tensors_of_tree(inputs):
        if not recorder.is_known(tensor):
            recorder.add(tensor)
    saving = _saving_hooks(recorder, keeps=not offloads)
    run = _Run(graph, order, model, constants, recorder, saving, run_context)
    chosen: AbstractContextManager[Any] = nullcontext()
    if "cuda" in kernels:
        chosen = device_kernels(lambda: kernels[recorder.position], half=half)
    exchange = None if cuts is None else Alone(cuts.shards, cuts.middle, recorder.note_sent)
    with torch.set_grad_enabled(training), recorder, saving, chosen, exchanging(exchange):
        result = unflatten(run.forward(inputs))
        name = loss.name_for(result)
        value = run.loss(loss, result, rows) if training else torch.zeros(())
        del result
        run.end_forward(value)
        if training and value.requires_grad and not offloads:
            run.backward(value)
        row_gradients = run.row_gradients()
        recorder.start_node(OUTSIDE)
    return Recording(
        order=tuple(order),
        timeline=recorder.timeline(),
        uses=recorder.uses,
        runs=tuple(recorder.runs),
        saving=frozenset(recorder.saving),
        operations=tuple(recorder.operations),
        output_nbytes=tuple(run.output_nbytes),
        output_blocks=tuple(run.output_blocks),
        loss=name,
        row_gradients=row_gradients,
        weights=run.weights(),
    )


def _saving_hooks(
    recorder: StorageRecorder, *, keeps: bool
) -> torch.autograd.graph.saved_tensors_hooks:
    """Saved-tensor hooks that tell the recorder what is saved for backward, and when backward reads it.

    With ``keeps``, saved tensors stay alive on the device.
    """

    def pack(tensor: Tensor) -> Tensor:
        if not recorder.backward:
            recorder.save(tensor)
        # Detached: a result that autograd saves would otherwise keep its own graph alive.
        return detach_fake(tensor) if keeps else tensor.new_empty(0)

    def unpack(tensor: Tensor) -> Tensor:
        if recorder.backward:
            recorder.read_saved(tensor)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class NodeRunner(fx.Interpreter):
    """Runs a captured graph with the weights of ``model``; frees each result after its last reader."""

    def __init__(self, graph: fx.Graph, model: nn.Module, constants: Mapping[str, Tensor]) -> None:
        super().__init__(model, graph=graph)
        self.extra_traceback = False
        self._constants = constants

    def results(self, inputs: Sequence[Any]) -> list[Any]:
        """The leaves of the graph's result."""
        leaves = list(self.run(*inputs, enable_io_processing=False))
        self.env.clear()
        return leaves

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        result = self.run_operation(n)
        return result if n.users else None

    def run_operation(self, node: fx.Node) -> Any:
        """The result of ``node``."""
        if node.name in self._constants:
            return self._constants[node.name]
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        return getattr(self, node.op)(node.target, args, kwargs)


class _Run(NodeRunner):
    """Runs a graph node by node and tells the recorder which."""

    def __init__(
        self,
        graph: fx.Graph,
        order: Sequence[str],
        model: nn.Module,
        constants: dict[str, Tensor],
        recorder: StorageRecorder,
        saving: torch.autograd.graph.saved_tensors_hooks,
        run_context: Callable[[], Any],
    ) -> None:
        super().__init__(graph, model, constants)
        self._position = {name: i for i, name in enumerate(order)}
        self._loss = len(order)  # the loss's position
        self._recorder = recorder
        self._attribution = BackwardAttribution(recorder)
        self._saving = saving
        self._run_context = run_context
        self.output_nbytes = [0] * (len(order) + 1)
        self.output_blocks: list[tuple[int, ...]] = [()] * (len(order) + 1)

    def forward(self, inputs: Sequence[Any]) -> list[Any]:
        """Run every node. Returns the leaves of the result, which are alive until the loss has run."""
        leaves = self.results(inputs)
        self._recorder.start_node(self._loss)
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        for uses in map(self._recorder.uses_of, tensors):
            if uses is not None:
                uses.users.add(self._loss)
        return leaves

    def run_operation(self, node: fx.Node) -> Any:
        position = self._position[node.name]
        self._recorder.start_node(position)
        with self._run_context():
            try:
                result = self._run_saving(node)
            except PlacerError:
                raise
            except Exception as error:
                raise NodeFailure(node) from error
        tensors = tensors_of_tree(result)
        with without_torch_function():  # otherwise torch-function modes would see every access
            self.output_nbytes[position] = nbytes_of(*tensors)
            found = [self._recorder.block_of(tensor) for tensor in tensors]
        self.output_blocks[position] = tuple(block for block in found if block is not None)
        self._attribution.claim(result, position)
        return result

    def _run_saving(self, node: fx.Node) -> Any:
        try:
            return super().run_operation(node)
        except RuntimeError as error:
            if _NO_HOOKS not in str(error):
                raise
        # What such a node saves is found by what is still alive after forward.
        self._saving.__exit__(None, None, None)
        try:
            return super().run_operation(node)
        finally:
            self._saving.__enter__()

    def loss(self, loss: Loss, result: Any, rows: int | None) -> Tensor:
        """Run ``loss`` with a target for so many ``rows``. Raises ``CaptureError`` if it fails."""
        try:
            return loss(result, loss.with_rows(rows))
        except PlacerError:
            raise
        except Exception as error:
            place = user_location(error)
            raise CaptureError(
                f"loss {loss.name}",
                f"fails on results without data: {type(error).__name__}: {first_line(error)}"
                + (f" ({place})" if place else ""),
                _remedy(loss),
            ) from with_own_lines(error)

    def end_forward(self, loss: Tensor) -> None:
        """Count each storage that is still alive but that no hook reported as saved by its producer."""
        self._attribution.claim(loss, self._loss)
        self._recorder.save_alive()

    def row_gradients(self) -> dict[str, int]:
        """Bytes of gradients that are sparse, by parameter; the recorder learns what they are."""
        named = dict(self.module.named_parameters())
        parts = {name: row_gradient(p) for name, p in named.items()}
        for uses in map(self._recorder.uses_of, itertools.chain(*parts.values())):
            if uses is not None:
                uses.parameter_gradient = True
        sparse = {
            name: found for name, found in parts.items() if found and named[name].grad is None
        }
        return {name: nbytes_of(*found) for name, found in sparse.items()}

    def weights(self) -> tuple[int, ...]:
        """How many weights with gradients each node was the first to read."""
        return tuple(self._attribution.weights[i] for i in range(self._loss + 1))

    def backward(self, loss: Tensor) -> None:
        """Run the backward of ``loss``. Raises ``CaptureError`` if it fails."""
        self._recorder.start_backward()
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._attribution.mark_gradient)
        try:
            loss.backward()
        except Exception as error:
            raise CaptureError(
                "the model",
                f"backward of a loss over all results fails: {type(error).__name__}: {error}",
                'detach the results that have no derivative, or plan with "training": false',
            ) from error


def _remedy(loss: Loss) -> str:
    """What to do about a ``loss`` that fails."""
    target = () if loss.spec is None else loss.spec.target
    called = f"it is called as loss(result{'' if loss.target is None else ', target'})"
    if not target:
        return (
            f"{called}: try that with a result of the model and a target of the shape that is given"
        )
    return (
        f'{called}; the target is {", ".join(target)}, by "loss" in the spec or --target: write the '
        "target of these inputs"
    )
