"""Estimate the costs of a captured model for one micro-batch, in one run on fake tensors."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple, Protocol, TypedDict, Unpack

import torch
from torch import Tensor, nn

from placer.cost.adjust import with_fewer_rows
from placer.cost.expand import expand
from placer.cost.loss import ASSUMED, Loss
from placer.cost.measured import Measured, measured
from placer.cost.record import Recording, record_run
from placer.cost.types import CostTable, StateTensor
from placer.cost.work import Work
from placer.errors import CaptureError, first_line
from placer.operands import nbytes_of
from placer.precision import precision_context
from placer.program import FakeConverter, Program, first_names, named_state, read_state, rows_of
from placer.program.alias import NodeFailure
from placer.program.blocks import Shortened, shorten
from placer.program.call import describe_shapes, objects_of
from placer.space import cuts_of, own_parts


class CostOptions(TypedDict, total=False):
    """How a micro-batch is run to find its costs."""

    training: bool  # whether the loss and backward run too; True by default
    precision: str  # "fp32" by default
    # The device type whose kernels run, "cpu" or "cuda", for all nodes or by node name; by default the
    # kernels of a CPU, without their workspaces.
    kernels: str | Mapping[str, str]
    loss: Loss  # `ASSUMED` by default
    keeps_casts: bool  # whether an earlier micro-batch has cast the weights; False by default


def estimate_costs(
    program: Program, inputs: Sequence[Tensor], **options: Unpack[CostOptions]
) -> CostTable:
    """Bytes and FLOPs of every node of ``program`` for a micro-batch shaped like ``inputs``.

    ``inputs`` are the tensor inputs of one micro-batch of one replica, on any device, including ``meta``.
    Nothing is allocated, because the run is on fake CPU tensors. Raises ``CaptureError`` if the model does
    not run on such a micro-batch.
    """
    return _estimate(program, _shortened(program), inputs, _key(inputs, **options))


def _estimate(
    program: Program, short: Shortened | None, inputs: Sequence[Tensor], key: _Key
) -> CostTable:
    found = _measure(program, short, inputs, key)
    return _table(program, inputs, found, training=key.training)


def _measure(
    program: Program, short: Shortened | None, inputs: Sequence[Tensor], key: _Key
) -> Measured:
    """What a run shows: of a few of the blocks that repeat, if that tells what the others cost."""
    if short is not None and len(set(_kernels_of(program, key.kernels))) == 1:
        with suppress(CaptureError):  # if it is not the blocks' fault, the whole program fails too
            ran = measured(_record(program, inputs, key, short), training=key.training)
            found = expand(ran, short)
            if found is not None:
                return found
    return measured(_record(program, inputs, key), training=key.training)


def _shortened(program: Program) -> Shortened | None:
    return None if cuts_of(program) else shorten(program)


class Estimate(Protocol):
    """Finds the costs of a captured model for some micro-batch."""

    def __call__(
        self, inputs: Sequence[Tensor], *, offloads: bool = False, **options: Unpack[CostOptions]
    ) -> CostTable:
        """Like `estimate_costs`.

        With ``offloads``, another forward measures the nodes while saved tensors move to the host at once.
        """


class CostEstimates:
    """`estimate_costs` for one captured model, with a cache.

    A search for a plan asks for the same micro-batch many times with other budgets, devices or schedules,
    which the costs do not depend on.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._short = cache(partial(_shortened, program))
        self._tables: dict[_Key, CostTable] = {}
        self._scaled: dict[_Key, CostTable] = {}

    def scaled(
        self, inputs: Sequence[Tensor], *, offloads: bool = False, **options: Unpack[CostOptions]
    ) -> CostTable:
        """Scales the table of the next larger batch that is known; if there is none, runs the model."""
        key = _key(inputs, offloads=offloads, **options)
        if key not in self._tables and key not in self._scaled:
            shares = ((_share(key, other), other) for other in self._tables)
            found = max(((s, o) for s, o in shares if s is not None), default=None)
            if found is None:
                return self(inputs, offloads=offloads, **options)
            self._scaled[key] = with_fewer_rows(self._tables[found[1]], found[0])
        return self._tables.get(key) or self._scaled[key]

    def __call__(
        self, inputs: Sequence[Tensor], *, offloads: bool = False, **options: Unpack[CostOptions]
    ) -> CostTable:
        key = _key(inputs, offloads=offloads, **options)
        if key not in self._tables:
            if key.offloads:
                plain = self(inputs, **options)
                sent = _measure(self._program, self._short(), inputs, key)
                self._tables[key] = _with_offloaded_transients(plain, sent)
            else:
                self._tables[key] = _estimate(self._program, self._short(), inputs, key)
        return self._tables[key]


class _Key(NamedTuple):
    """Everything that the costs of a micro-batch depend on."""

    shapes: tuple[tuple[int, ...], ...]
    kinds: tuple[tuple[torch.dtype, bool], ...]
    kernels: str | tuple[tuple[str, str], ...]
    training: bool = True
    precision: str = "fp32"
    offloads: bool = False
    loss: Loss = ASSUMED
    keeps_casts: bool = False


def _key(
    inputs: Sequence[Tensor], *, kernels: str | Mapping[str, str] = "", **options: Any
) -> _Key:
    shapes = tuple((*t.shape, *t.stride()) for t in inputs)
    kinds = tuple((t.dtype, t.requires_grad) for t in inputs)
    of_nodes = kernels if isinstance(kernels, str) else tuple(sorted(kernels.items()))
    key = _Key(shapes, kinds, of_nodes, **options)
    return key if key.training else key._replace(offloads=False, keeps_casts=False)


def _share(few: _Key, many: _Key) -> float | None:
    """The rows of ``few`` divided by those of ``many``; None if the keys also differ in something else."""
    if few._replace(shapes=()) != many._replace(shapes=()):
        return None
    shares = set()
    for a, b in zip(few.shapes, many.shapes, strict=True):
        if a != b and (not a or a[1:] != b[1:] or a[0] >= b[0]):
            return None
        if a != b:
            shares.add(a[0] / b[0])
    return shares.pop() if len(shares) == 1 else None


def _record(
    program: Program, inputs: Sequence[Tensor], key: _Key, short: Shortened | None = None
) -> Recording:
    """Run the program once on fake tensors, or what is left of it in ``short``.

    Raises ``CaptureError`` if it does not run.
    """
    ran = short or program
    kernels = _kernels_of(program, key.kernels)
    converter = FakeConverter()
    model = converter.module(program.model, objects_of(program.call))
    constants = {name: converter.tensor(t) for name, t in program.captured.constants.items()}
    rows = batch_rows(program, inputs)
    state = read_state(program.captured, rows)
    cuts = cuts_of(program)
    try:
        with converter.running(program.captured.conditions.guess):
            given = [converter.tensor(x) if isinstance(x, Tensor) else x for x in (*inputs, *state)]
            return record_run(
                ran.graph,
                ran.order,
                model,
                given if cuts is None else own_parts(program, given, cuts.middle),
                constants,
                training=key.training,
                run_context=partial(precision_context, key.precision, "cpu"),
                offloads=key.offloads,
                cast_once=_read_once(program) if key.keeps_casts else (),
                kernels=kernels[: len(ran.order) + 1],  # all alike if it is shortened
                half=key.precision != "fp32",
                loss=key.loss,
                unflatten=program.call.result.unflatten,
                rows=rows,
                cuts=cuts,
            )
    except NodeFailure as failure:
        raise _does_not_run(program, failure, inputs, key.precision) from failure.__cause__


def _read_once(program: Program) -> set[str]:
    """The parameters that a single node reads. Other stages read copies of the rest, and cast them anew."""
    alias = first_names(program.model)
    reads = Counter(alias[name] for node in program.nodes.values() for name in node.reads)
    return {name for name, count in reads.items() if count == 1}


def batch_rows(program: Program, inputs: Sequence[Tensor]) -> int | None:
    """The rows of a batch of ``inputs``; None if no input is batched."""
    return rows_of(program.call.batch_dims, [tensor.shape for tensor in inputs])


def _with_offloaded_transients(table: CostTable, sent: Measured) -> CostTable:
    """``table`` with ``forward_transient_offloaded`` from ``sent``, a run with ``offloads``."""
    nodes = tuple(
        replace(node, forward_transient_offloaded=other.forward_transient)
        for node, other in zip(table.nodes, sent.nodes, strict=True)
    )
    return replace(table, nodes=nodes)


def _does_not_run(
    program: Program, failure: NodeFailure, inputs: Sequence[Tensor], precision: str
) -> CaptureError:
    error = failure.__cause__
    remedy = "if that is too few rows, give a larger batch, fewer micro-batches or fewer replicas"
    if precision != "fp32":
        remedy += f"; it was run with precision {precision!r}, which not all operations support"
    if program.captured.fixed_batch_reason:
        remedy = (
            f"the batch size decides what is computed ({program.captured.fixed_batch_reason}): "
            "use 1 replica and 1 micro-batch"
        )
    return CaptureError(
        program.nodes[failure.node.name].layer or "the model",
        f"does not run on a micro-batch of {describe_shapes(inputs)}: "
        f"{type(error).__name__}: {first_line(error)}",
        remedy,
    )


def _kernels_of(program: Program, kernels: str | tuple[tuple[str, str], ...]) -> list[str]:
    """The device type of every node and of the loss, which is on the last node's device."""
    if isinstance(kernels, str):
        return [kernels] * (len(program.order) + 1)
    kernel_of = dict(kernels)
    found = [kernel_of[name] for name in program.order]
    return [*found, found[-1] if found else ""]


def _table(
    program: Program, inputs: Sequence[Tensor], found: Measured, *, training: bool
) -> CostTable:
    readers, input_readers = _readers(program)
    given: list[Any] = [*inputs, *read_state(program.captured, batch_rows(program, inputs))]
    if cuts := cuts_of(program):
        on_meta = [x.to("meta") if isinstance(x, Tensor) else x for x in given]
        given = own_parts(program, on_meta, cuts.middle)
    return CostTable(
        names=program.order,
        nodes=found.nodes,
        values=found.values,
        results=found.results,
        gradients=found.gradients,
        added=found.added,
        readers=readers,
        input_readers=input_readers,
        input_nbytes=tuple(nbytes_of(x) if isinstance(x, Tensor) else 0 for x in given),
        state=_state(program, found.row_gradients, training=training),
        saving=found.saving,
        loss=found.loss,
        work=Work(
            program.order,
            [mine.forward for mine in found.operations],
            [mine.backward for mine in found.operations],
            [(mine.forward_sent, mine.backward_sent) for mine in found.operations],
        ),
    )


_Positions = tuple[int, ...]


def _readers(program: Program) -> tuple[tuple[_Positions, ...], tuple[_Positions, ...]]:
    """Positions of the readers of each node's result and of each input; the output counts as the loss."""
    position = {name: i for i, name in enumerate(program.order)}
    loss = len(program.order)
    of_node: list[set[int]] = [set() for _ in program.order]
    of_input: dict[str, set[int]] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            of_input[node.name] = set()
            continue
        reader = loss if node.op == "output" else position[node.name]
        for source in node.all_input_nodes:
            if source.op == "placeholder":
                of_input[source.name].add(reader)
            else:
                of_node[position[source.name]].add(reader)
    return (
        tuple(tuple(sorted(found)) for found in of_node),
        tuple(tuple(sorted(found)) for found in of_input.values()),
    )


def _state(
    program: Program, row_gradients: Mapping[str, int], *, training: bool
) -> tuple[StateTensor, ...]:
    """The parameters and buffers of the model, in its order."""
    alias = first_names(program.model)
    readers = defaultdict[str, set[int]](set)
    for node, name in enumerate(program.order):
        for used in program.nodes[name].reads:
            readers[alias[used]].add(node)
    return tuple(
        StateTensor(
            nbytes=nbytes_of(tensor),
            readers=tuple(sorted(readers[name])),
            is_buffer=not isinstance(tensor, nn.Parameter),
            trained=training and isinstance(tensor, nn.Parameter) and tensor.requires_grad,
            row_gradient_nbytes=row_gradients.get(name),
        )
        for name, tensor in named_state(program.model)
        if alias[name] == name
    )
