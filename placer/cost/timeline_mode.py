"""A dispatch mode that records the timeline of a run: when the storages of tensors are allocated and freed.

A storage is found when an operator returns a tensor that uses it; a weak reference reports when it is freed.
Two kinds of runs are recorded in this way: runs of a captured model (`placer.cost.storages`), from which the
costs of its nodes are derived, and dry runs of a placed model (`placer.simulation.ledger`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from placer._torch import DispatchMode
from placer.errors import CaptureError
from placer.timeline import Block, Recorder, Task, Timeline


class TimelineMode(DispatchMode):
    """Records a timeline. Subclasses say which storages count, and describe them as blocks.

    ``task()`` returns what the process does.
    """

    def __init__(self, task: Callable[[], Task | None] = lambda: None) -> None:
        super().__init__()
        self._recorder = Recorder(task)
        # id of a storage -> (the storage, the number of its block)
        self._known: dict[int, tuple[weakref.ref[Any], int | None]] = {}

    def timeline(self) -> Timeline:
        """The events that have been recorded so far."""
        return self._recorder.timeline()

    @property
    def num_events(self) -> int:
        """The number of events that have been recorded."""
        return self._recorder.num_events

    def ignore(self, tensor: Tensor) -> None:
        """Never count the tensor's storage."""
        storage = _storage_of(tensor)
        if id(storage) not in self._known:
            self._remember(storage, None)

    def is_known(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage is already counted or ignored."""
        return id(_storage_of(tensor)) in self._known

    def block_of(self, tensor: Tensor) -> int | None:
        """The number of the block for the tensor's storage; None if the storage is not counted."""
        known = self._known.get(id(_storage_of(tensor)))
        return None if known is None else known[1]

    def _count(self, tensor: Tensor, block: Block) -> int:
        """Record ``block`` for the tensor's storage from now until it is freed. Returns its number."""
        number = self._allocate(block)
        self._remember(_storage_of(tensor), number)
        return number

    def _count_briefly(self, block: Block) -> None:
        """Record ``block`` for memory that the running operation allocates and frees before it returns."""
        if block.nbytes:
            self._free(self._allocate(block))

    def _remember(self, storage: Any, number: int | None) -> None:
        key = id(storage)

        def gone(_: Any) -> None:
            self._known.pop(key, None)
            if number is not None:
                self._free(number)

        self._known[key] = (weakref.ref(storage, gone), number)

    def _allocate(self, block: Block) -> int:
        return self._recorder.allocate(block)

    def _free(self, number: int) -> None:
        self._recorder.free(number)


def nbytes_of_storage(tensor: Tensor) -> int:
    """The bytes of the tensor's storage. Raises ``CaptureError`` for a sparse tensor, which has none."""
    nbytes: int = _storage_of(tensor).nbytes()
    return nbytes


def _storage_of(tensor: Tensor) -> Any:
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
