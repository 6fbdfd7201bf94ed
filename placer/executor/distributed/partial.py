"""The names of a model of which this process holds a part."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from placer.executor.distributed.job.assignment import RankAssignment
from placer.executor.distributed.job.call_check import name_ranks
from placer.executor.distributed.job.ownership import Ownership
from placer.executor.module import PlacedModule

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

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of the original, of what this rank holds.

        A ``state_dict`` of the model's own finds the names of the whole model, those of other ranks
        with empty tensors on ``meta``: it may rename or delete what is not here.
        """

        def add_others(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
            for name in self._names_elsewhere():
                state.setdefault(prefix + name, torch.empty(0, device="meta"))

        if type(self._tree).state_dict is nn.Module.state_dict:
            return super().state_dict(*args, **kwargs)
        with self._tree.register_state_dict_post_hook(add_others):
            state = super().state_dict(*args, **kwargs)
        for name in [n for n, value in state.items() if isinstance(value, Tensor)]:
            if state[name].is_meta:
                del state[name]
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As of the original; what of the model other ranks hold may be there, and is left."""
        with self._tree.register_load_state_dict_pre_hook(self._leave_others):
            return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, *args: Any) -> None:
        with self._tree.register_load_state_dict_pre_hook(self._leave_others):
            super()._load_from_state_dict(*args)

    def _leave_others(self, part: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        """Delete what other ranks hold from ``state``, when the model's own code is done with it."""
        elsewhere = self._names_elsewhere()
        modules = dict(part.named_modules(remove_duplicate=False)).keys()
        for entry in [entry for entry in state if entry.startswith(prefix)]:
            name = entry[len(prefix) :]
            path, _, leaf = name.rpartition(".")
            if name in elsewhere or (leaf == _EXTRA_STATE and path not in modules):
                del state[entry]

    def _names_elsewhere(self) -> Collection[str]:
        return self._ownership.first_name.keys() - self.tensor_names.keys()

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
