"""`DistributedModule`, this rank's part of a placed model in a job with one process per device."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from placer.errors import PlacerError
from placer.executor.distributed.checks import (
    refuse_joint_optimizers,
    refuse_partial_clipping,
    refuse_sharding,
    refuse_wrappers,
)
from placer.executor.distributed.job.join import name_ranks
from placer.executor.distributed.reduction.optimizer_hooks import update_pieces
from placer.executor.distributed.runtime import DistributedRuntime, runtime_of_rank
from placer.executor.module import PlacedModule, make_placed

_EXTRA_STATE = "_extra_state"  # nn.Module's key for what ``get_extra_state`` returns


class DistributedModule(PlacedModule):
    """One rank's stages and tensors of a placed model, with the original's class and names.

    See `placer.executor.distributed`. Errors name the ranks that have what this one lacks.
    """

    __slots__ = ()

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return runtime_of_rank(self).device

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks of the job: a row for each replica, with a column for each of its devices."""
        return runtime_of_rank(self).mesh

    @property
    def replica_index(self) -> int:
        """The replica that this rank belongs to, which is its row of the mesh."""
        return runtime_of_rank(self).assignment.replica_index

    @property
    def num_replicas(self) -> int:
        """The number of replicas in the job."""
        return self.plan.replicas

    @property
    def stage_indices(self) -> tuple[int, ...]:
        """The stages that this rank runs."""
        return runtime_of_rank(self).assignment.stage_indices

    @property
    def tensor_names(self) -> Mapping[str, str]:
        """For each name of a tensor on this rank, the first of the tensor's names in the model."""
        return runtime_of_rank(self).tensor_names

    @property
    def owned_names(self) -> frozenset[str]:
        """The first names of the tensors that this rank saves; each has one owner in the job."""
        return runtime_of_rank(self).owned_names

    def train(self, mode: bool = True) -> Any:
        """Set the mode of the whole model; every rank must do so."""
        runtime_of_rank(self).finder.train(mode)
        return super().train(mode)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """This rank's parameters; if it has none, an empty one, because optimizers require one."""
        yield from list(super().parameters(recurse)) or [runtime_of_rank(self).placeholder]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original's ``state_dict``, restricted to the tensors of this rank.

        If the model overrides ``state_dict``, that method sees the names of the whole model, with empty
        ``meta`` tensors for those of other ranks, so it may rename or delete any of them. The first call
        warns if there are such tensors, unless it comes from ``torch.distributed.checkpoint``.
        """
        self._warn_of_others()

        def add_others(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
            for name in self._names_elsewhere():
                state.setdefault(prefix + name, torch.empty(0, device="meta"))

        if type(runtime_of_rank(self).tree).state_dict is nn.Module.state_dict:
            return super().state_dict(*args, **kwargs)
        with self.register_state_dict_post_hook(add_others):
            state = super().state_dict(*args, **kwargs)
        for name in [n for n, value in state.items() if isinstance(value, Tensor)]:
            if state[name].is_meta:
                del state[name]
        return state

    def _warn_of_others(self) -> None:
        runtime = runtime_of_rank(self)
        if runtime.has_warned_of_others or not self._names_elsewhere():
            return
        # As of `get_model_state_dict`, whose callers save every rank's part.
        if any(
            frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint")
            for frame, _ in traceback.walk_stack(None)
        ):
            return
        runtime.has_warned_of_others = True
        warnings.warn(
            f"rank {runtime.assignment.rank}: state_dict() has this rank's part of the model only. To save "
            "the model, call placer.save(placed, optimizer, path) on all ranks; to read this rank's weights, "
            "use placed.named_parameters() and placed.named_buffers()",
            stacklevel=3,
        )

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Calls the original's ``load_state_dict``; entries of other ranks' tensors are ignored.

        Raises ``PlacerError`` if it would ``assign`` to a tensor that ranks share, which then had two.
        """
        if assign and (shared := self._given_once(state_dict)):
            raise PlacerError(
                next(iter(shared)),
                "is shared by several ranks, and load_state_dict(assign=True) makes a tensor of each name",
                "load it without assign=True",
            )
        with self.register_load_state_dict_pre_hook(self._leave_others):
            return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, *args: Any) -> None:
        with self.register_load_state_dict_pre_hook(self._leave_others):
            super()._load_from_state_dict(*args)

    def _leave_others(self, part: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        """Delete other ranks' entries from ``state``, after the model's own pre-hooks have run."""
        elsewhere = self._names_elsewhere()
        modules = dict(part.named_modules(remove_duplicate=False)).keys()
        given = {entry[len(prefix) :]: x for entry, x in state.items() if entry.startswith(prefix)}
        once = self._given_once(given)
        for name in dict(part.named_parameters(remove_duplicate=False)):
            first = runtime_of_rank(self).tensor_names.get(name, name)
            if first in once:
                state[prefix + name] = once[first]
        for entry in [entry for entry in state if entry.startswith(prefix)]:
            name = entry[len(prefix) :]
            path, _, leaf = name.rpartition(".")
            if name in elsewhere or (leaf == _EXTRA_STATE and path not in modules):
                del state[entry]

    def _given_once(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What tensors that ranks share under several names are loaded from: the last of their names."""
        ownership = runtime_of_rank(self).ownership
        names = Counter(ownership.first_name.values())
        return {
            first: given[name]
            for name, first in ownership.first_name.items()
            if name in given and names[first] > 1 and len(ownership.holders[first]) > 1
        }

    def _names_elsewhere(self) -> Collection[str]:
        return (
            runtime_of_rank(self).ownership.first_name.keys()
            - runtime_of_rank(self).tensor_names.keys()
        )

    def __getattr__(self, name: str) -> Any:
        with self._explained(name):
            return super().__getattr__(name)

    def get_submodule(self, target: str) -> nn.Module:
        with self._explained(target):
            return super().get_submodule(target)

    def get_parameter(self, target: str) -> nn.Parameter:
        with self._explained(target):
            return super().get_parameter(target)

    def get_buffer(self, target: str) -> Tensor:
        with self._explained(target):
            return super().get_buffer(target)

    @contextmanager
    def _explained(self, path: str) -> Iterator[None]:
        try:
            yield
        except AttributeError as error:
            raise self._explain(error, path) from None

    def _explain(self, error: AttributeError, path: str) -> AttributeError:
        """``error``, extended by the ranks of this replica that have the model's part at ``path``."""
        runtime = runtime_of_rank(self)
        assignment = runtime.assignment
        ranks = [
            assignment.grid.rank(dp=assignment.replica_index, pp=index, sp=assignment.shard_index)
            for index, names in enumerate(runtime.ownership.names)
            if any(f"{name}.".startswith(f"{path}.") for name in names)
        ]
        if not ranks or assignment.rank in ranks:
            return error
        return AttributeError(f"{path!r} is on {name_ranks(ranks)}, not on this one: {error}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            refuse_sharding(value)
        super().__setattr__(name, value)

    def __reduce__(self) -> NoReturn:
        raise PlacerError(
            f"rank {runtime_of_rank(self).assignment.rank}",
            "a rank's part of a job cannot be pickled or copied",
            "use placer.save(placed, optimizer, path), or state_dict() and named_parameters()",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__reduce__()


def make_distributed(runtime: DistributedRuntime) -> DistributedModule:
    """The placed module of this rank, which ``runtime`` runs."""
    module = make_placed(DistributedModule, runtime)
    refuse_wrappers(module)
    if runtime.plan.shard_state != "none":
        update_pieces(module)
    if runtime.assignment.num_devices > 1:
        refuse_joint_optimizers(module)
        refuse_partial_clipping(module)
    return module
