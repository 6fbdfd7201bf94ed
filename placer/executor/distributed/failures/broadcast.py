"""An exception in one stage, made known to every rank of the job."""

from __future__ import annotations

import itertools
import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from placer._torch import default_store
from placer.errors import PeerError, PlacerError, StageError, causes
from placer.executor.distributed.failures.failing_nodes import FailureSite
from placer.executor.distributed.failures.layer_failure import LayerFailure
from placer.executor.distributed.failures.roll_call import RollCall, store_may_be_gone
from placer.executor.distributed.job.assignment import Job
from placer.executor.distributed.job.call_check import CallNotAnswered, name_ranks
from placer.executor.distributed.job.join import store_of_start
from placer.executor.distributed.job.rendezvous import (
    POLL_SECONDS,
    StoreFinder,
    TorchrunStore,
    is_hosted_here,
    is_torchrun_store,
)

_PATIENCE_SECONDS = 2.0  # how long a rank waits to be told why another was lost, or to be heard
_START_SECONDS = 5.0  # the same where processes that were started by hand come at different times


class FailureBroadcast:
    """One message of one failed rank to all others, in the job's key-value store."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        name: str,
        *,
        find_store: StoreFinder = default_store,
        limit: timedelta = default_pg_timeout,
        patience_seconds: float = _PATIENCE_SECONDS,
    ) -> None:
        """``name`` is that of the placed module, the same on every rank and of no other one.

        ``find_store`` finds the store, or None as long as it is not there; ``limit`` is how long ranks
        wait for each other's messages, ``patience_seconds`` how long this one waits for the store when
        it has failed, and for the others to read why.
        """
        self._key = f"placer/failures/{name}"
        self._rank = rank
        self._world_size = world_size
        self.find_store = find_store
        self._patience_seconds = patience_seconds
        self._roll = RollCall(self._key, rank, world_size, find_store=find_store, limit=limit)
        self._is_known = False  # has this rank told, or heard, why the job ends?

    def set_limit(self, limit: timedelta) -> None:
        """How long ranks wait for each other's messages is ``limit``."""
        self._roll.limit = limit

    def raise_for(
        self,
        error: Exception,
        *,
        find_lost: Callable[[], Sequence[int]],
        find_failure_site: Callable[[LayerFailure], FailureSite],
        layers: Sequence[Sequence[str]],
        replica_index: int,
    ) -> NoReturn:
        """Tell the others of ``error`` if it arose here, and raise it as what it is.

        ``find_lost`` says which ranks are gone, ``find_failure_site`` whose code failed; ``layers`` are those
        of every stage.

        Raises ``StageError`` on the rank where the exception arose, ``PeerError`` on those that
        only lost a neighbour by it.
        """
        failure = _find_cause(error, LayerFailure)
        if failure is None and isinstance(error, PlacerError):
            self._tell({"where": error.where, "problem": error.problem, "remedy": error.remedy})
            raise error
        *_, root = causes(error)
        if _is_of_messages(root) or (failure is None and isinstance(root, RuntimeError)):
            self._raise_if_lost(error, root, find_lost)
        if failure is None:
            told = {
                "where": f"rank {self._rank}",
                "problem": f"{type(root).__name__}: {root}",
                "remedy": "the traceback is in that rank's output",
            }
            self._tell(told)
            raise PlacerError(*told.values()) from error
        cause = failure.__cause__ or root
        stage, site = failure.stage_index, find_failure_site(failure)
        layer = site.layers[0] if len(site.layers) == 1 else ""
        phase = "backward of loss_fn" if site.after else failure.phase
        place = f"layer {' or '.join(map(repr, site.layers))}, " if site.layers else ""
        if phase == "backward" and not place and layers[stage]:
            place = f"one of its layers ({_span(layers[stage])}), "
        where = f"stage {stage}, {place}rank {self._rank} (replica {replica_index}), {phase}"
        problem, remedy = f"{type(cause).__name__}: {cause}", ""
        if isinstance(cause, PlacerError):
            inside = "" if cause.where == failure.phase else f"{cause.where}: "
            problem, remedy = f"{inside}{cause.problem}", cause.remedy
        there = remedy or "the traceback is in that rank's output"
        self._tell({"where": where, "problem": problem, "remedy": there})
        raise StageError(
            where,
            problem,
            remedy or "the exception above is the cause; the other ranks end with PeerError",
            stage=stage,
            layer=layer,
            rank=self._rank,
        ) from cause

    def _raise_if_lost(
        self,
        error: Exception,
        cause: BaseException,
        find_lost: Callable[[], Sequence[int]],
    ) -> None:
        """Raise ``PeerError`` if ``cause`` is that messages to other ranks failed.

        Gloo raises plain ``RuntimeError``s: then some connection is closed. Others raise ``DistError``.
        A rank that waited too long says so at once (`RollCall`): its connections are closed, and who
        sees that would take it for the one that ended.
        """
        call = _find_cause(error, CallNotAnswered)
        told = self._explain_loss(cause, find_lost, method="" if call is None else call.method)
        if told is not None:
            raise PeerError(**told) from error

    def explain_loss(self, cause: BaseException) -> dict[str, str]:
        """Why a message to other ranks failed with ``cause``, as ``PeerError`` takes it."""
        told = self._explain_loss(cause, tuple, method="")
        return told or _lost(self._rank, cause, ())

    def _explain_loss(
        self, cause: BaseException, find_lost: Callable[[], Sequence[int]], *, method: str
    ) -> dict[str, str] | None:
        """What a rank has told; else what this one can tell of the loss, if it is one.

        ``method`` is the call that not all ranks have come to, if this one waited for that.
        """
        timed_out = "timed out" in str(cause).lower()
        if timed_out:
            self._roll.answer(method)
        lost_ranks = [] if timed_out else find_lost()  # before others close theirs
        told = self._listen(0 if timed_out else _PATIENCE_SECONDS)
        if told is None and self._roll.is_called():
            self._roll.answer(method)
            return self._tell(self._roll.call(stop=lambda: self._listen(0) is not None))
        if told is None:
            lost_ranks = lost_ranks or find_lost()
            if lost_ranks or isinstance(cause, dist.DistError):
                told = self._tell(_lost(self._rank, cause, lost_ranks))
        return told

    def tell_end(self, error: BaseException) -> None:
        """Tell the others that this rank ends by ``error``, such as ``KeyboardInterrupt``."""
        remedy = "start the job anew"
        told = {"where": f"rank {self._rank}", "problem": type(error).__name__, "remedy": remedy}
        self._tell(told, wait_seconds=0.0)  # the program is to end at once

    def tell_failure(self, error: Exception) -> None:
        """Tell the others that this rank could not compile the model."""
        where, problem, remedy = f"rank {self._rank}", f"{type(error).__name__}: {error}", ""
        if isinstance(error, PlacerError):
            where, problem, remedy = f"{where}, {error.where}", error.problem, error.remedy
        alike = "give every rank the same model and spec"
        remedy = f"{remedy}; {alike}" if remedy else alike
        self._tell({"where": where, "problem": problem, "remedy": remedy})

    def raise_if_told(self) -> None:
        """Raise what another rank has told, if any has, as ``PeerError``."""
        if (told := self._listen(0)) is not None:
            raise PeerError(**told)

    def await_readers(self) -> None:
        """Give the others the time to read the message, where they cannot once this process has ended.

        That is on the rank that hosts the store. Returns after some seconds at the latest.
        """
        if not self._is_known:
            return
        end = time.monotonic() + self._patience_seconds
        heard = [f"{self._key}/heard/{rank}" for rank in range(self._world_size)]
        with store_may_be_gone():
            while (store := self.find_store()) is not None:
                store.set(heard[self._rank], "")
                if not self._is_needed_by_others(store) or store.check(heard):
                    return
                if time.monotonic() > end:
                    return
                time.sleep(POLL_SECONDS)

    def _is_needed_by_others(self, store: Any) -> bool:
        answers = isinstance(self.find_store, TorchrunStore) and self._rank == 0
        return answers or is_hosted_here(store, self._rank)

    def _tell(
        self, told: Mapping[str, str], *, wait_seconds: float | None = None
    ) -> dict[str, str]:
        """Leave the message, unless another rank was first; the one that is there then.

        ``told`` itself when the store is not there yet, or no more.
        """
        seconds = self._patience_seconds if wait_seconds is None else wait_seconds
        end = time.monotonic() + seconds
        try:
            while (store := self.find_store()) is None:
                if time.monotonic() > end:
                    return dict(told)
                time.sleep(POLL_SECONDS)
            first = dict(json.loads(store.compare_set(self._key, "", json.dumps(dict(told)))))
        except (RuntimeError, ValueError):
            return dict(told)
        self._note_heard(store)
        return first

    def _listen(self, seconds: float) -> dict[str, str] | None:
        """The message of the rank that failed first, if there is one within ``seconds``.

        Ends early when ranks say that they have waited too long.
        """
        end = time.monotonic() + seconds
        while True:
            try:
                store = self.find_store()
                if store is not None and store.check([self._key]):
                    told: dict[str, str] = json.loads(store.get(self._key))
                    self._note_heard(store)
                    return told
            except (RuntimeError, ValueError):
                return None  # the store's own process is gone, or the program left the job
            if time.monotonic() > end or self._roll.is_called():
                return None
            time.sleep(POLL_SECONDS)

    def _note_heard(self, store: Any) -> None:
        self._is_known = True
        with store_may_be_gone():
            store.set(f"{self._key}/heard/{self._rank}", "")


_compiled = itertools.count()  # calls of compile in this process: every rank makes the same ones


@contextmanager
def failure_told(job: Job) -> Iterator[FailureBroadcast]:
    """Leave what the block raises, before any module is there, where the other ranks look for it.

    They look while they wait for this rank (`join_job`) and when they lose it (`lost_peers` with the
    yielded ``FailureBroadcast``).
    """
    name = f"compile {next(_compiled)}"
    find_store = store_of_start(job, name)
    with store_may_be_gone():  # `join_job` tells what is wrong with it
        find_store()  # rank 0 may host it: ranks that fail early leave their message there
    by_hand = not dist.is_initialized() and not is_torchrun_store()
    patience = _START_SECONDS if by_hand else _PATIENCE_SECONDS
    failures = FailureBroadcast(
        job.rank, job.world_size, name, find_store=find_store, patience_seconds=patience
    )
    try:
        yield failures
    except PeerError:
        failures.await_readers()
        raise
    except Exception as error:
        failures.tell_failure(error)
        failures.await_readers()
        raise
    except BaseException as error:
        failures.tell_end(error)
        raise


@contextmanager
def lost_peers(failures: FailureBroadcast) -> Iterator[None]:
    """Raise the loss of another rank inside the block, before any module is there, as ``PeerError``.

    With what that rank has left at ``failures``, if it has.
    """
    try:
        yield
    except PlacerError:
        raise
    except RuntimeError as error:
        raise PeerError(**failures.explain_loss(error)) from error


def _lost(rank: int, error: BaseException, lost_ranks: Sequence[int]) -> dict[str, str]:
    if lost_ranks:
        problem = f"lost the connection to {name_ranks(lost_ranks)}, which ended"
    else:
        problem = "lost the connection to another rank, which ended or does not answer"
    return {
        "where": f"rank {rank}",
        "problem": f"{problem} ({_last_line(error)})",
        "remedy": "look at that rank's own output for the first error",
    }


def _is_of_messages(error: BaseException) -> bool:
    """Did a function of torch.distributed raise it, called by a layer that talks to other replicas?

    What a layer waits for by itself (``async_op=True``) does not count.
    """
    return isinstance(error, RuntimeError) and _raised_in(error, dist.distributed_c10d.__name__)


def _raised_in(error: BaseException, module_name: str) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__") == module_name


def _find_cause(error: BaseException, kind: type[Any]) -> Any:
    return next((cause for cause in causes(error) if isinstance(cause, kind)), None)


def _span(layers: Sequence[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} … {layers[-1]}"


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__
