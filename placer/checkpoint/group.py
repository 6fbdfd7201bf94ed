"""The processes that save or load one checkpoint together: one alone, or all ranks of a job."""

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
from placer.executor.distributed.partial import PartialModule


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointGroup:
    """This process's part in it; without a ``group`` it is alone, and every step is a plain call."""

    rank: int
    group: dist.ProcessGroup | None  # None: alone
    layout: str  # random states are for the same layout only
    contents: Contents
    devices: tuple[torch.device, ...]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in order of rank."""
        if self.group is None:
            return [value]
        return gather_objects(value, self.group)

    def agree(self, action: Callable[[], object]) -> None:
        """Run ``action`` everywhere; where it fails on one rank, raise its error on all."""
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
        """Run ``action`` on rank 0 only; the others wait for it, and for its error."""
        self.agree(action if self.rank == 0 else lambda: None)


@contextmanager
def checkpoint_group(
    module: nn.Module, method: Literal["placer.save", "placer.load"], **options: object
) -> Iterator[CheckpointGroup]:
    """Who saves or loads ``module``: all ranks of its job, or this process, which holds all of it.

    In a job, what goes wrong between the ranks in the block is raised as ``PeerError``, and
    ``PlacerError`` when not all are at this ``method`` with these ``options``.
    """
    if isinstance(module, PartialModule):
        from placer.executor.distributed.module import DistributedModule  # takes a while

        assert isinstance(module, DistributedModule)
        stages, replicas = len(module.plan.stages), module.num_replicas
        module.announce(method, **options)
        with module.watch():
            yield CheckpointGroup(
                rank=module.assignment.rank,
                group=module.process_groups.world,
                layout=f"{dist.get_world_size()} processes, {replicas} x {stages} stages",
                contents=Contents(first_name=module.tensor_names, owned=module.owned_names),
                devices=_devices(module),
            )
        return
    yield CheckpointGroup(
        rank=0,
        group=None,
        layout="one process",
        contents=contents_of(module),
        devices=_devices(module),
    )


def _devices(module: nn.Module) -> tuple[torch.device, ...]:
    tensors = [t for t in module_state(module).values() if isinstance(t, torch.Tensor)]
    return tuple(dict.fromkeys(t.device for t in tensors))
