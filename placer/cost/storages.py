"""Record a run of a captured model: its timeline, and what its nodes do with every storage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from placer.cost.cpu_results import cpu_result
from placer.cost.operations import Operation, operations_of
from placer.cost.timeline_mode import TimelineMode, nbytes_of_storage
from placer.operands import nbytes_of, tensors_in
from placer.timeline import Block, StepPosition

OUTSIDE = -1  # position of the producer of inputs, which exist before the first node runs


@dataclass(slots=True, eq=False)
class StorageUses:
    """What nodes (given by position) do with a storage, which is a block of the timeline."""

    users: set[int] = field(default_factory=set)  # nodes that read it in forward
    savers: set[int] = field(default_factory=set)
    # (saver, bytes that it saved)
    saved_nbytes: list[tuple[int, int]] = field(default_factory=list)
    parameter_gradient: bool = False
    of_weight: bool = False  # a gradient to be added to those of a weight's other readers
    fixed: bool = False  # made from weights alone
    sent: list[tuple[int, int, int]] = field(default_factory=list)  # (from node, to node, bytes)
    sum_for: int | None = None  # it is a sum of gradients that were all sent to this node


@dataclass(slots=True)
class NodeOperations:
    """The operations of one node."""

    forward: list[Operation] = field(default_factory=list)
    backward: list[Operation] = field(default_factory=list)
    # Bytes that a shard sends to the others, if the program is split in space:
    forward_sent: int = 0
    backward_sent: int = 0
    cast_nbytes: int = 0  # copies of weights in half precision that no node before it needed


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRun:
    """A node's forward or a part of its backward: from event ``start`` to the start of the next run."""

    position: int
    backward: bool
    start: int


class StorageRecorder(TimelineMode):
    """Records one run. `start_node` and `start_backward` tell it which node runs and in which pass.

    ``order`` has the names of the nodes by position; the loss comes last and has no name.
    ``kernels`` are the device types, per node and for the loss, whose kernels run. The weights in
    ``cast_once`` were cast by an earlier micro-batch: `NodeOperations.cast_nbytes` has the bytes.
    """

    def __init__(
        self, order: Sequence[str], kernels: Sequence[str], cast_once: Iterable[Tensor] = ()
    ) -> None:
        super().__init__()
        self._names, self._kernels = [*order, ""], kernels
        self._weights = {id(weight) for weight in cast_once}
        self._not_cast = set(self._weights)
        self.operations = [NodeOperations() for _ in kernels]
        self.uses: dict[int, StorageUses] = {}  # by the number of the storage's block
        self.saving: set[int] = set()  # nodes that save something for backward, if only a weight
        self.runs: list[NodeRun] = []
        self.position = OUTSIDE
        self.backward = False
        self._where = StepPosition()

    def start_node(self, position: int) -> None:
        """The node at ``position`` runs from now on; with `OUTSIDE`, recording ends."""
        self.position = position
        self.runs.append(NodeRun(position=position, backward=self.backward, start=self.num_events))
        phase = "backward" if self.backward else "forward"
        self._where = (
            StepPosition()
            if position == OUTSIDE
            else StepPosition(phase=phase, node=self._names[position])
        )

    def start_backward(self) -> None:
        """The backward of the loss runs from now on."""
        self.backward = True
        self.start_node(self.position)

    def note_sent(self, nbytes: int) -> None:
        """The running node sends so many bytes to other shards."""
        mine = self.operations[self.position]
        if self.backward:
            mine.backward_sent += nbytes
        else:
            mine.forward_sent += nbytes

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, and record the storages that it reads, and makes."""
        result = func(*args, **kwargs)
        if self.position == OUTSIDE:
            return result
        if (
            not self.backward
            and func is torch.ops.aten._to_copy.default
            and id(args[0]) in self._weights
        ):
            self._note_cast(args[0], result)
            return result
        if self._kernels[self.position] == "cpu":
            result = cpu_result(func, args, result)
        inputs, outputs = tensors_in(args, kwargs), tensors_in(result)
        read = [self.uses_of(tensor) for tensor in inputs]
        if not self.backward:
            for uses in read:
                if uses is not None:
                    uses.users.add(self.position)
        mine = self.operations[self.position]
        ran = operations_of(func, args, kwargs, result, inputs, outputs)
        (mine.backward if self.backward else mine.forward).extend(ran)
        of_weights = bool(read) and all(uses is None or uses.fixed for uses in read)
        for tensor in outputs:
            if not self.is_known(tensor):
                made = self.add(tensor)
                made.fixed = of_weights
                if self.backward and func is torch.ops.aten.add.Tensor:
                    made.sum_for = self._common_home(read)
        return result

    def _note_cast(self, weight: Tensor, cast: Tensor) -> None:
        """``cast`` is there before the micro-batch begins."""
        self.ignore(cast)
        if id(weight) in self._not_cast:
            self._not_cast.discard(id(weight))
            self.operations[self.position].cast_nbytes += nbytes_of(cast)

    def _common_home(self, gradients: Iterable[StorageUses | None]) -> int | None:
        """The node that all of ``gradients`` were sent to, if it is not the running one; otherwise None."""
        homes: list[set[int]] = []
        for uses in gradients:
            homes.append(set() if uses is None else {to for _, to, _ in uses.sent})
            if uses is not None and uses.sum_for is not None:
                homes[-1].add(uses.sum_for)
        common = set.intersection(*homes) - {self.position}
        return max(common, default=None)

    def uses_of(self, tensor: Tensor) -> StorageUses | None:
        """The uses of the tensor's storage; None for weights and storages that are not recorded."""
        number = self.block_of(tensor)
        return None if number is None else self.uses[number]

    def add(self, tensor: Tensor) -> StorageUses:
        """Record that the running node has made the tensor's storage, which must be new."""
        block = Block(
            device="",  # one device for all nodes
            nbytes=nbytes_of_storage(tensor),
            kind=self._where.phase,
            name=self._where.node,
            layer="",
            shape=tuple(tensor.shape),
            where=self._where,
        )
        uses = self.uses[self._count(tensor, block)] = StorageUses()
        return uses

    def save(self, tensor: Tensor) -> None:
        """Record that the running node saves ``tensor`` for backward."""
        self.saving.add(self.position)
        if self.position != OUTSIDE and not self.is_known(tensor):
            self.add(tensor).fixed = True  # a constant that no operation made
        uses = self.uses_of(tensor)
        if uses is not None:
            uses.users.add(self.position)
            uses.savers.add(self.position)
            nbytes = min(nbytes_of(tensor), nbytes_of_storage(tensor))
            uses.saved_nbytes.append((self.position, nbytes))

    def read_saved(self, tensor: Tensor) -> None:
        """Record that the running node's backward reads ``tensor``, which forward saved."""
        number = self.block_of(tensor)
        if number is not None:
            self._recorder.read(number)

    def save_alive(self) -> None:
        """Record that every live storage that no node saves is saved by its producer."""
        position = {name: i for i, name in enumerate(self._names)}
        for number, block in self.timeline().kept().items():
            uses = self.uses[number]
            if block.where.phase and not uses.savers:
                uses.savers.add(position[block.where.node])
                self.saving.add(position[block.where.node])
