"""`DistributedModule`, this rank's part of a placed model in a job with one process per device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from placer.errors import PlacerError
from placer.executor.distributed.checks import (
    refuse_joint_optimizers,
    refuse_partial_clipping,
    refuse_sharding,
    refuse_wrappers,
)
from placer.executor.distributed.partial import PartialModule, runtime_of_rank
from placer.executor.distributed.reduction.optimizer_hooks import update_pieces
from placer.executor.distributed.runtime import DistributedRuntime
from placer.executor.module import make_placed


class DistributedModule(PartialModule):
    """One rank's stages of a placed model, with the original's class and names.

    See `placer.executor.distributed`.
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
    if runtime.plan.shard_state == "optimizer":
        update_pieces(module)
    if runtime.assignment.num_devices > 1:
        refuse_joint_optimizers(module)
        refuse_partial_clipping(module)
    return module
