"""`Connection`: the process groups of one placed module, which the first failure closes for good."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch.distributed as dist

from placer.errors import PeerError, PlacerError, StageError, causes
from placer.executor.distributed.failures.broadcast import FailureBroadcast
from placer.executor.distributed.failures.layer_failure import LayerFailure
from placer.executor.distributed.job.groups import Groups, close_groups, find_lost

_THERE = "the traceback is in that rank's output"


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

    @contextmanager
    def told(self) -> Iterator[None]:
        """As `watch`, but a ``PlacerError`` is told too: other ranks may not raise it."""
        try:
            yield
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> NoReturn:
        """Tell the other ranks, close the connections so that none waits for this one, and raise.

        Raises ``StageError`` on the rank whose stage raised, and ``PeerError`` on ranks that lost the
        connection to another. A ``PlacerError`` is told and raised as it is; any other exception becomes
        a ``PlacerError``.
        """
        groups = self._groups if self._in_job else None  # otherwise the program has closed them
        try:
            if not isinstance(error, Exception):
                self._tell(f"rank {self._rank}", type(error).__name__, "start the job again")
                raise error
            self._raise(error, groups)
        finally:
            self.before_closing()
            self._groups = None
            if groups is not None:
                close_groups(groups.each())
            if isinstance(error, Exception):  # otherwise the program should end at once
                self._failures.await_readers()

    def _raise(self, error: Exception, groups: Groups | None) -> NoReturn:
        failure = next((cause for cause in causes(error) if isinstance(cause, LayerFailure)), None)
        if failure is None and isinstance(error, PlacerError):
            self._tell(error.where, error.problem, error.remedy)
            raise error
        *_, root = causes(error)
        if _is_of_messages(root) or (failure is None and isinstance(root, RuntimeError)):
            told = self._failures.explain_loss(
                root, lambda: [] if groups is None else find_lost(groups.world)
            )
            if told is not None:
                raise PeerError(**told) from None  # it has gloo's text where that is the reason
        if failure is not None:
            raise self._stage_error(failure, root) from failure.__cause__ or root
        where, problem = f"rank {self._rank}", f"{type(root).__name__}: {root}"
        self._tell(where, problem, _THERE)
        raise PlacerError(where, problem, _THERE) from error

    def _stage_error(self, failure: LayerFailure, root: BaseException) -> StageError:
        """The error for an exception in a stage of this rank; tells the others of it."""
        cause = failure.__cause__ or root
        stage, layer = failure.stage_index, failure.layer
        place, hint = f"layer {layer!r}, " if layer else "", ""
        if failure.phase == "backward" and not layer and self._layers[stage]:
            first, *_, last = [self._layers[stage][0], *self._layers[stage]]
            place = f"one of its layers ({first} … {last}), "
            hint = "; to have the layer named, run again with PLACER_ANOMALY=1"
        replica = f"rank {self._rank} (replica {self._replica_index})"
        where = f"stage {stage}, {place}{replica}, {failure.phase}"
        problem, remedy = f"{type(cause).__name__}: {cause}", ""
        if isinstance(cause, PlacerError):
            inside = "" if cause.where == failure.phase else f"{cause.where}: "
            problem, remedy = f"{inside}{cause.problem}", cause.remedy
        self._tell(where, problem, remedy or _THERE)
        return StageError(
            where,
            problem,
            remedy or f"the exception above is the cause; the other ranks end with PeerError{hint}",
            stage=stage,
            layer=layer,
            rank=self._rank,
        )

    def _tell(self, where: str, problem: str, remedy: str) -> None:
        self._failures.tell({"where": where, "problem": problem, "remedy": remedy})


def _is_of_messages(error: BaseException) -> bool:
    """Whether a function of ``torch.distributed`` raised ``error``, perhaps called by a layer.

    Does not detect an error in a layer's own wait for an operation with ``async_op=True``.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    here = frames[-1].f_globals.get("__name__") if frames else None
    return isinstance(error, RuntimeError) and here == dist.distributed_c10d.__name__
