"""The names of a model of which this process holds a part."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from placer.runtime.distributed.call_check import name_ranks
from placer.runtime.distributed.job import RankAssignment
from placer.runtime.distributed.ownership import Ownership
from placer.runtime.module import PlacedModule

_EXTRA_STATE = "_extra_state"  # nn.Module's key for what ``get_extra_state`` returns


class PartialModule(PlacedModule):
    """A placed module with this rank's tensors only, which knows where those of the rest are."""

    assignment: RankAssignment
    _ownership: Ownership
    _FIELDS = PlacedModule._FIELDS | frozenset(__annotations__)

    @property
    def tensor_names(self) -> Mapping[str, str]:
        """This rank's name of a tensor -> the first of that tensor's names in the model."""
        names = self._ownership.names[self.assignment.device_index]
        return {name: self._ownership.first_name[name] for name in names}

    @property
    def owned_names(self) -> frozenset[str]:
        """First names of the tensors that this rank is to save; each is owned by one rank of the job."""
        if self.assignment.replica_index:
            return frozenset()
        index = self.assignment.device_index
        return frozenset(n for n, holders in self._ownership.holders.items() if holders[0] == index)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As of ``nn.Module``; what of the model other ranks hold may be there, and is left."""
        if isinstance(state_dict, Mapping):  # else torch says what is wrong
            state_dict = self._own_entries(state_dict)
        return super().load_state_dict(state_dict, strict, assign)

    def _own_entries(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        elsewhere = self._ownership.first_name.keys() - self.tensor_names.keys()
        modules = dict(self.named_modules(remove_duplicate=False)).keys()
        own: OrderedDict[str, Any] = OrderedDict()
        for name, value in state_dict.items():
            path, _, leaf = name.rpartition(".")
            if name not in elsewhere and (leaf != _EXTRA_STATE or path in modules):
                own[name] = value
        metadata = getattr(state_dict, "_metadata", None)  # torch keeps versions of modules there
        if metadata is not None:
            own._metadata = metadata  # type: ignore[attr-defined]
        return own

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
        ownership = self.__dict__.get("_ownership")
        if ownership is None:
            return error
        first = self.assignment.rank - self.assignment.device_index
        ranks = [
            first + index
            for index, names in enumerate(ownership.names)
            if any(f"{name}.".startswith(f"{path}.") for name in names)
        ]
        if not ranks or self.assignment.rank in ranks:
            return error
        return AttributeError(f"{path!r} is on {name_ranks(ranks)}, not on this one: {error}")
