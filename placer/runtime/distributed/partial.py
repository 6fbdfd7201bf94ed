"""The names of a model of which this process holds a part."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from placer.runtime.distributed.agreement import name_ranks
from placer.runtime.distributed.job import Seat
from placer.runtime.distributed.part import Holdings
from placer.runtime.module import PlacedModule


class PartialModule(PlacedModule):
    """A placed module with this rank's tensors only, which knows where those of the rest are."""

    seat: Seat
    _holdings: Holdings
    _FIELDS = PlacedModule._FIELDS | frozenset(__annotations__)

    @property
    def tensor_names(self) -> Mapping[str, str]:
        """This rank's name of a tensor -> the first of that tensor's names in the model."""
        names = self._holdings.names[self.seat.device_index]
        return {name: self._holdings.first_name[name] for name in names}

    @property
    def owned_names(self) -> frozenset[str]:
        """First names of the tensors that this rank is to save; each is owned by one rank of the job."""
        if self.seat.replica_index:
            return frozenset()
        index = self.seat.device_index
        return frozenset(n for n, holders in self._holdings.holders.items() if holders[0] == index)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As of ``nn.Module``; tensors of the model that other ranks hold may be there, and are left."""
        own = copy.copy(state_dict)  # with its attributes: torch keeps versions there
        for name in self._holdings.first_name.keys() - self.tensor_names.keys():
            own.pop(name, None)  # type: ignore[attr-defined]
        return super().load_state_dict(own, strict, assign)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise self._explain(error, name) from None

    def get_submodule(self, target: str) -> nn.Module:
        try:
            return super().get_submodule(target)
        except AttributeError as error:
            raise self._explain(error, target) from None

    def get_parameter(self, target: str) -> nn.Parameter:
        try:
            return super().get_parameter(target)
        except AttributeError as error:
            raise self._explain(error, target) from None

    def get_buffer(self, target: str) -> Tensor:
        try:
            return super().get_buffer(target)
        except AttributeError as error:
            raise self._explain(error, target) from None

    def _explain(self, error: AttributeError, path: str) -> AttributeError:
        """``error``, with the ranks of this replica that have what the model has at ``path``."""
        holdings = self.__dict__.get("_holdings")
        if holdings is None:
            return error
        first = self.seat.replica_index * self.seat.num_devices
        ranks = [
            first + index
            for index, names in enumerate(holdings.names)
            if any(f"{name}.".startswith(f"{path}.") for name in names)
        ]
        if not ranks or dist.get_rank() in ranks:
            return error
        return AttributeError(f"{path!r} is on {name_ranks(ranks)}, not on this one: {error}")
