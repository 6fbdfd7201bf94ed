"""The processes that save or load a checkpoint together: a single one, or all ranks of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from placer.checkpoint.entries import Contents, contents_of, module_state
from placer.errors import PlacerError
from placer.executor.distributed.job.groups import gather_objects
from placer.executor.distributed.module import DistributedModule
from placer.executor.distributed.reduction.pieces import Pieces
from placer.executor.distributed.runtime import runtime_of_rank
from placer.executor.module import PlacedModule, devices_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointGroup:
    """This process among those that save or load a checkpoint; without a ``group`` it is the only one."""

    rank: int
    group: dist.ProcessGroup | None
    layout: str  # of the job; random states are restored only in the same layout
    contents: Contents
    devices: tuple[torch.device, ...]
    pieces: Pieces  # of the parameters whose optimizer state is sharded

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in order of rank."""
        if self.group is None:
            return [value]
        return gather_objects(value, self.group)

    def agree(self, action: Callable[[], object]) -> None:
        """Run ``action`` on every rank; if it fails on any, raise its error on all."""
        failure: PlacerError | None = None
        try:
            action()
        except PlacerError as error:
            failure = error
        except OSError as error:
            failure = PlacerError(f"rank {self.rank}", f"{type(error).__name__}: {error}")
            failure.__cause__ = error
        failures = [error for error in self.gather(failure) if error is not None]
        if failures:
            raise failures[0] if failure is None else failure

    def lead(self, action: Callable[[], object]) -> None:
        """Run ``action`` on rank 0 while the others wait; if it fails, raise its error on all."""
        self.agree(action if self.rank == 0 else lambda: None)


@contextmanager
def checkpoint_group(
    module: nn.Module, method: Literal["placer.save", "placer.load"], **options: object
) -> Iterator[CheckpointGroup]:
    """The processes that save or load ``module``: all ranks of its job, or only this process.

    In a job, raises ``PlacerError`` if not all ranks call ``method`` with the same ``options``, and
    ``PeerError`` if communication fails in the block.
    """
    if isinstance(module, DistributedModule):
        runtime = runtime_of_rank(module)
        stages, replicas = len(module.plan.stages), module.plan.replicas
        runtime.announce(method, **options)
        with runtime.watch():
            yield CheckpointGroup(
                rank=runtime.assignment.rank,
                group=runtime.process_groups.world,
                layout=f"{dist.get_world_size()} processes, {replicas} x {stages} stages",
                contents=Contents(first_name=runtime.tensor_names, owned=runtime.owned_names),
                devices=_devices(module),
                pieces=runtime.pieces,
            )
        return
    yield CheckpointGroup(
        rank=0,
        group=None,
        layout="one process",
        contents=contents_of(module),
        devices=_devices(module),
        pieces=Pieces([]),
    )


def _devices(module: nn.Module) -> tuple[torch.device, ...]:
    """The devices that ``module`` has tensors on, and those that stages of its replicas run on."""
    tensors = [t for t in module_state(module).values() if isinstance(t, torch.Tensor)]
    found = dict.fromkeys(t.device for t in tensors)
    if isinstance(module, PlacedModule):
        found |= dict.fromkeys(devices_of(module))
    return tuple(found)
