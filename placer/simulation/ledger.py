"""Records the timeline of a run: every storage that is allocated and freed on each simulated device.

A storage belongs to a place. A copy belongs to the place that it is copied to, any other result to the
place of the operation's inputs, and a result of an operation without inputs to the place of the running
stage. An operation on tensors of two places is an error, as it would be with two real devices. Works on
fake and on real tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from placer.cost import (
    BLAS_NBYTES,
    TimelineMode,
    cpu_result,
    cuda_workspaces,
    nbytes_of_storage,
    uses_blas,
)
from placer.errors import DeviceError
from placer.executor.places.place import CALLER, HOST, Place, current_place
from placer.executor.task import current_task
from placer.operands import tensors_in
from placer.timeline import PINNED, Block, StepPosition


class Ledger(TimelineMode):
    """A dispatch mode that records a timeline; ``where()`` returns the part of the model that is running.

    ``kernels(place)`` is the type of device whose kernels run on a place. The workspaces of those of
    "cuda" (`placer.cost.cuda_workspaces`) are counted too.
    """

    def __init__(
        self,
        where: Callable[[], StepPosition] = StepPosition,
        *,
        kernels: Callable[[str], str] = lambda place: "",
    ) -> None:
        super().__init__(current_task)
        self._kernels = kernels
        self._where = where
        self._here = StepPosition()
        self._latest = CALLER.name
        # Places, per thread, that have cuBLAS's workspace
        self._blas: set[tuple[str, bool]] = set()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator and count the memory that it allocates."""
        self._here = self._where()
        result = func(*args, **kwargs)
        leaves = tensors_in(args, kwargs)
        place = self._place_of(func, leaves, kwargs)
        kernels = self._kernels(place)
        if kernels == "cpu":
            result = cpu_result(func, args, result)
        elif kernels == "cuda" and uses_blas(func):
            self._open_blas(place, str(func))
        fresh = [leaf for leaf in tensors_in(result) if not self.is_known(leaf)]
        workspaces = cuda_workspaces(func, args, result) if fresh and kernels == "cuda" else ()
        for made, leaf in enumerate(fresh, start=1):
            self._add_result(leaf, place, func, leaves)
            for found in workspaces:
                if found.after == made:
                    block = self._block(found.nbytes, place, str(func), "workspace")
                    self._count_briefly(replace(block, elastic=found.elastic))
        self._latest = place
        return result

    def _open_blas(self, place: str, operation: str) -> None:
        """Count cuBLAS's workspace, which it takes once in the forward thread and once in backward's."""
        thread = (place, self._here.phase in ("backward", "recompute"))
        if thread not in self._blas:
            self._blas.add(thread)
            self._allocate(self._block(BLAS_NBYTES, place, operation, "workspace"))

    def _add_result(self, tensor: Tensor, place: str, func: Any, inputs: Sequence[Tensor]) -> None:
        """Count a result of an operation.

        A copy to another place, and a tensor made outside the model's nodes, gets the name of its source,
        which is the first input of the same shape: the value or gradient that was copied, or the
        parameter to which an optimizer's state belongs. One on ``meta`` takes no memory.
        """
        if tensor.device.type == "meta":
            return
        known = (self._entry(x) for x in inputs if x.shape == tensor.shape)
        source = next((entry for entry in known if entry is not None), None)
        if source is None or (self._here.node and source.device == place):
            self.add(tensor, place, operation=str(func))
            return
        kind = "" if source.device == place else "received"
        if place == HOST.name and self._kernels(source.device) == "cuda":
            kind = PINNED
        self.add(
            tensor, place, kind=kind, name=source.name, layer=source.layer, operation=str(func)
        )

    def _place_of(self, func: Any, leaves: Sequence[Tensor], kwargs: Mapping[str, Any]) -> str:
        here = current_place()
        copies = func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None
        # Not the backward of a cast, which names its device too
        if copies and here is not None and kwargs.get("dtype") in (None, leaves[0].dtype):
            return here.name
        found = dict.fromkeys(
            entry.device
            for leaf in leaves
            if leaf.dim() and (entry := self._entry(leaf)) is not None
        )
        if len(found) > 1:
            names = " and ".join(found)
            raise DeviceError(
                str(func),
                f"an operation mixes tensors of {names}",
                "this placement would fail on real devices; report it with the model",
            )
        if found:
            return next(iter(found))
        # A result of scalars only, such as the optimizer's state of one
        scalars = {entry.device for leaf in leaves if (entry := self._entry(leaf)) is not None}
        if len(scalars) == 1:
            return scalars.pop()
        return here.name if here is not None else self._latest

    def place_of(self, tensor: Tensor) -> str | None:
        """The name of the tensor's place; None if it is not counted."""
        entry = self._entry(tensor)
        return None if entry is None else entry.device

    def _entry(self, tensor: Tensor) -> Block | None:
        number = self.block_of(tensor)
        return None if number is None else self._recorder.blocks[number]

    def add(
        self,
        tensor: Tensor,
        place: str | Place,
        *,
        kind: str = "",
        name: str = "",
        layer: str | None = None,
        operation: str = "",
    ) -> None:
        """Count the tensor's storage on ``place`` from now until it is freed.

        ``name`` is that of a parameter or of the tensor's source. Without ``layer``, it is taken from the
        name, or if there is none, it is the layer that is running.
        """
        if self.is_known(tensor):
            return
        if layer is None:
            layer = name.rpartition(".")[0] if name else self._here.layer
        device = place.name if isinstance(place, Place) else place
        block = Block(
            device=device,
            nbytes=nbytes_of_storage(tensor),
            kind=kind or self._here.phase,
            name=name or self._here.node or operation,
            layer=layer,
            shape=tuple(tensor.shape),
            where=self._here,
            operation=operation,
        )
        self._count(tensor, block)

    def _block(self, nbytes: int, place: str, operation: str, kind: str) -> Block:
        """Memory that belongs to no tensor."""
        return Block(
            device=place,
            nbytes=nbytes,
            kind=kind,
            name=self._here.node or operation,
            layer=self._here.layer,
            shape=(nbytes,),
            where=self._here,
            operation=operation,
        )
