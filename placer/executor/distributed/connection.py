"""`Connection`: the process groups of one placed module, which the first failure closes for good."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist

from placer.errors import PeerError, PlacerError
from placer.executor.distributed.failures.broadcast import FailureBroadcast
from placer.executor.distributed.job.groups import Groups, close_groups, find_lost


class Connection:
    """This rank's connection to the other ranks of its job.

    ``failures`` tells the others why this rank failed; ``layers`` has the layers of every stage.
    ``before_closing``, which may be replaced, is called before a failure closes the groups.
    """

    def __init__(
        self,
        groups: Groups,
        failures: FailureBroadcast,
        *,
        rank: int,
        replica_index: int,
        layers: Sequence[Sequence[str]],
    ) -> None:
        self.before_closing: Callable[[], None] = lambda: None
        self._job_group: Any = dist.group.WORLD  # the default process group at construction
        self._groups: Groups | None = groups  # None after a failure
        self._failures = failures
        self._rank = rank
        self._replica_index = replica_index
        self._layers = layers

    @property
    def groups(self) -> Groups:
        """The process groups. Raises ``PeerError`` if they are closed."""
        if not self._in_job:
            raise PeerError(
                f"rank {self._rank}",
                "has left the job: the process group of this module is destroyed",
                "call dist.destroy_process_group() last, after all use of this module",
            )
        if self._groups is None:
            raise PeerError(
                f"rank {self._rank}",
                "an earlier call failed, and the connections of this module are closed",
                "end the job; torchrun --max-restarts restarts it",
            )
        return self._groups

    @property
    def _in_job(self) -> bool:
        return dist.is_initialized() and dist.group.WORLD is self._job_group

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Tell the other ranks of any failure in the block, close the connections, and raise it.

        A failed communication is raised as ``PeerError``. A ``PlacerError`` is raised as it is and not
        told, because all ranks raise it.
        """
        try:
            yield
        except PlacerError:
            raise
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> NoReturn:
        """Tell the other ranks, close the connections so that none waits for this one, and raise."""
        groups = self._groups if self._in_job else None  # otherwise the program has closed them
        try:
            if not isinstance(error, Exception):
                self._failures.tell_end(error)
                raise error
            self._failures.raise_for(
                error,
                find_lost=list if groups is None else partial(find_lost, groups.world),
                layers=self._layers,
                replica_index=self._replica_index,
            )
        finally:
            self.before_closing()
            self._groups = None
            if groups is not None:
                close_groups(groups.each())
            if isinstance(error, Exception):  # otherwise the program should end at once
                self._failures.await_readers()
