"""The ledger: live bytes per simulated device, counted storage by storage.

Every storage is tagged with a place when it is made: a copy goes where it is copied to, anything
else where its inputs are, and what has no inputs where the running stage is. An operation on
tensors of two places is an error, as it would be with two real devices. Works on fake tensors and
on real ones alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from placer._torch import READS_DEVICE, DispatchMode, read_device
from placer.cost import cpu_result, workspace_nbytes
from placer.errors import DeviceError
from placer.operands import tensors_in
from placer.runtime.attribution import Where
from placer.runtime.place import CALLER, Place, current_place


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """One storage: where it is, its bytes, and what it was made for."""

    place: str
    nbytes: int
    kind: str  # "parameter", "buffer", "input", "received" (a copy), "workspace", or the phase
    name: str  # of the parameter or buffer (its optimizer's state, too), else of the node
    layer: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A device's peak: its bytes, where the step was, and how far the log had come."""

    nbytes: int = 0
    where: Where = field(default_factory=Where)
    operation: str = ""
    entries: int = 0


class Ledger(DispatchMode):
    """Counts while entered; ``where`` tells, when asked, which part of the model is running.

    ``kernels`` gives the device type whose kernels a place runs: those of a "cpu" take workspaces
    (`placer.cost.workspaces`) that are counted too.
    """

    def __init__(
        self,
        where: Callable[[], Where] = Where,
        *,
        kernels: Callable[[str], str] = lambda place: "",
    ) -> None:
        super().__init__()
        self._kernels = kernels
        self.live: dict[str, int] = {}
        self.peaks: dict[str, Moment] = {}
        self._where = where
        self._here = Where()
        self._tensors: list[LiveTensor] = []
        self._log: list[int] = []  # i: tensor i came; ~i: it went
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}  # id of storage -> tensor
        self._latest = CALLER.name

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is READS_DEVICE:
            return read_device(args[0])
        kwargs = kwargs or {}
        self._here = self._where()
        result = func(*args, **kwargs)
        leaves = tensors_in(args, kwargs)
        place = self._place_of(func, leaves)
        on_cpu = self._kernels(place) == "cpu"
        if on_cpu:
            result = cpu_result(func, args, result)
        fresh = [
            leaf for leaf in tensors_in(result) if id(leaf.untyped_storage()) not in self._known
        ]
        for leaf in fresh:
            self._add_result(leaf, place, func, leaves)
        if on_cpu:
            self._add_workspace(workspace_nbytes(func, args, kwargs, result), place, str(func))
        self._latest = place
        return result

    def _add_result(self, tensor: Tensor, place: str, func: Any, inputs: Sequence[Tensor]) -> None:
        """Count what an operation made; between the model's nodes it is named after its source.

        That is the first of the inputs of its shape: a value or a gradient that was copied to
        another place, or the parameter of the optimizer's state.
        """
        known = (self._entry(x) for x in inputs if x.shape == tensor.shape)
        source = next((entry for entry in known if entry is not None), None)
        if source is None or (self._here.node and source.place == place):
            self.add(tensor, place, operation=str(func))
            return
        kind = "" if source.place == place else "received"
        self.add(
            tensor, place, kind=kind, name=source.name, layer=source.layer, operation=str(func)
        )

    def _place_of(self, func: Any, leaves: Iterable[Tensor]) -> str:
        here = current_place()
        if func is torch.ops.aten._to_copy.default and here is not None:
            return here.name
        found = dict.fromkeys(
            entry.place
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
        return here.name if here is not None else self._latest

    def _entry(self, tensor: Tensor) -> LiveTensor | None:
        known = self._known.get(id(tensor.untyped_storage()))
        return self._tensors[known[1]] if known is not None else None

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

        ``name`` is that of a parameter, whose ``layer`` follows from it, or of what it is a copy of.
        """
        device = place.name if isinstance(place, Place) else place
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        if layer is None:
            layer = name.rpartition(".")[0] if name else self._here.layer
        made = LiveTensor(
            place=device,
            nbytes=storage.nbytes(),
            kind=kind or self._here.phase,
            name=name or self._here.node or operation,
            layer=layer,
            shape=tuple(tensor.shape),
        )
        index = self._come(made, operation)

        def gone(_: Any) -> None:
            del self._known[key]
            self._go(index)

        self._known[key] = (weakref.ref(storage, gone), index)

    def _add_workspace(self, nbytes: int, place: str, operation: str) -> None:
        """Count what the operation that has just run held on ``place`` inside its call."""
        if nbytes:
            made = LiveTensor(
                place=place,
                nbytes=nbytes,
                kind="workspace",
                name=self._here.node or operation,
                layer=self._here.layer,
                shape=(nbytes,),
            )
            self._go(self._come(made, operation))

    def _come(self, made: LiveTensor, operation: str) -> int:
        """``made`` is there from now on; its number."""
        index = len(self._tensors)
        self._tensors.append(made)
        self._log.append(index)
        live = self.live[made.place] = self.live.get(made.place, 0) + made.nbytes
        if live > self.peaks.get(made.place, Moment()).nbytes:
            self.peaks[made.place] = Moment(
                nbytes=live, where=self._here, operation=operation, entries=len(self._log)
            )
        return index

    def _go(self, index: int) -> None:
        self._log.append(~index)
        self.live[self._tensors[index].place] -= self._tensors[index].nbytes

    def live_at(self, device: str, moment: Moment) -> list[LiveTensor]:
        """All that was live on ``device`` at ``moment``, the largest first."""
        alive: dict[int, None] = {}
        for entry in self._log[: moment.entries]:
            if entry >= 0:
                alive[entry] = None
            else:
                alive.pop(~entry, None)
        found = [self._tensors[i] for i in alive if self._tensors[i].place == device]
        return sorted(found, key=lambda tensor: -tensor.nbytes)
