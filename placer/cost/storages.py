"""Record every storage of a run: which node made it, which used and saved it, and when it was freed.

A dispatch mode sees when a storage is made; a weak reference reports when it is freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from placer._torch import DispatchMode
from placer.cost.operations import Operation, operations_of
from placer.cost.workspaces import cpu_result, workspace_nbytes
from placer.errors import CaptureError
from placer.operands import nbytes_of, tensors_in

OUTSIDE = -1  # the position of what is made before the first node runs: inputs


@dataclass(slots=True, eq=False)
class RecordedStorage:
    """One storage of the run; nodes are given by position."""

    nbytes: int
    made_by: int
    backward: bool  # made in backward
    users: set[int] = field(default_factory=set)
    savers: set[int] = field(default_factory=set)
    saved_nbytes: list[tuple[int, int]] = field(
        default_factory=list
    )  # (saver, bytes that it saved)
    freed_by: int | None = None  # node in whose backward it was freed; None: not freed in backward
    parameter_gradient: bool = False
    of_weight: bool = False  # a gradient to be added to those of a weight's other readers
    fixed: bool = False  # made from weights alone
    live: bool = True
    sent: list[tuple[int, int, int]] = field(default_factory=list)  # (from node, to node, bytes)
    sum_for: int | None = None  # it is a sum of gradients that were all sent to this node


@dataclass(slots=True)
class NodeTally:
    """The operations of one node, and its live bytes.

    ``events`` are the changes of live bytes in its backward, in order. An event of 0 bytes is a read
    of what was saved for backward.
    """

    forward: list[Operation] = field(default_factory=list)
    backward: list[Operation] = field(default_factory=list)
    forward_transient: int = 0
    events: list[tuple[RecordedStorage, int]] = field(default_factory=list)


class StorageRecorder(DispatchMode):
    """Records the storages of one run. ``position`` and ``backward`` say which node runs, in which pass.

    ``kernels`` are the device types, per node, whose kernels run.
    """

    def __init__(self, kernels: Sequence[str]) -> None:
        super().__init__()
        self.tallies = [NodeTally() for _ in kernels]
        self._kernels = kernels
        self.storages: list[RecordedStorage] = []
        self.saving: set[int] = set()  # nodes that save something for backward, if only a weight
        self.position = OUTSIDE
        self.backward = False
        self._known: dict[int, tuple[weakref.ref[Any], RecordedStorage | None]] = {}
        self._own_live = 0

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, and record the storages that it reads, makes and needs as workspace."""
        result = func(*args, **kwargs)
        on_cpu = self.position != OUTSIDE and self._kernels[self.position] == "cpu"
        if on_cpu:
            result = cpu_result(func, args, result)
        if self.position == OUTSIDE:
            return result
        inputs, outputs = tensors_in(args, kwargs), tensors_in(result)
        tally = self.tallies[self.position]
        for tensor in inputs:
            stored = self.storage(tensor)
            if stored is not None and not self.backward:
                stored.users.add(self.position)
        ran = operations_of(func, args, kwargs, result, inputs, outputs)
        (tally.backward if self.backward else tally.forward).extend(ran)
        of_weights = bool(inputs) and all(self._is_fixed(tensor) for tensor in inputs)
        for tensor in outputs:
            if id(_key(tensor)) not in self._known:
                made = self.add(tensor)
                made.fixed = of_weights
                if self.backward and func is torch.ops.aten.add.Tensor:
                    made.sum_for = self._common_home(inputs)
        if on_cpu:
            self._add_workspace(workspace_nbytes(func, args, kwargs, result))
        return result

    def _add_workspace(self, nbytes: int) -> None:
        """Record the workspace of the operation that has just run."""
        if nbytes:
            made = RecordedStorage(nbytes, self.position, self.backward)
            self._event(made, nbytes)
            self._event(made, -nbytes)

    def _common_home(self, gradients: list[Tensor]) -> int | None:
        """The node, other than the running one, to which all of ``gradients`` were sent, or None."""
        homes = []
        for tensor in gradients:
            stored = self.storage(tensor)
            sent = () if stored is None else (to for _, to, _ in stored.sent)
            homes.append({*sent, *(() if stored is None else (stored.sum_for,))} - {None})
        common = set.intersection(*homes) - {self.position}
        return max(common, default=None)

    def _is_fixed(self, tensor: Tensor) -> bool:
        _, record = self._known.get(id(_key(tensor)), (None, None))
        return record is None or record.fixed

    def storage(self, tensor: Tensor) -> RecordedStorage | None:
        """The record of the tensor's storage; None for weights and storages that are not recorded."""
        known = self._known.get(id(_key(tensor)))
        return known[1] if known is not None else None

    def ignore(self, tensor: Tensor) -> None:
        """Do not record the tensor's storage: it is a weight's."""
        self._remember(tensor, None)

    def add(self, tensor: Tensor) -> RecordedStorage:
        """Record that the running node has made the tensor's storage."""
        made = RecordedStorage(_key(tensor).nbytes(), self.position, self.backward)
        self.storages.append(made)
        self._remember(tensor, made)
        if self.position != OUTSIDE:
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
        """Record that the running node saves ``tensor`` for backward."""
        self.saving.add(self.position)
        if self.position != OUTSIDE and id(_key(tensor)) not in self._known:
            self.add(tensor).fixed = True  # a constant that no operation made
        stored = self.storage(tensor)
        if stored is not None:
            stored.users.add(self.position)
            stored.savers.add(self.position)
            stored.saved_nbytes.append((self.position, min(nbytes_of(tensor), stored.nbytes)))

    def read(self, record: RecordedStorage) -> None:
        """Record that the running node's backward reads a saved storage."""
        self._event(record, 0)

    def start_node(self, position: int) -> None:
        """The node at ``position`` runs from now on."""
        self.position = position
        self._own_live = 0


def _key(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError) as error:
        if tensor.layout == torch.strided:
            raise
        raise CaptureError(
            "the model",
            f"makes a tensor of layout {tensor.layout}, whose bytes depend on its values, which "
            "planning does not have",
            "hand it to forward as an input, or make it dense",
        ) from error
