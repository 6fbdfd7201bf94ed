"""Tells every rank of a job why one of them failed, through the job's key-value store."""

from __future__ import annotations

import itertools
import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from placer._torch import default_store
from placer.errors import PeerError, PlacerError, StageError, causes
from placer.executor.distributed.failures.hang_detector import HangDetector, store_may_be_gone
from placer.executor.distributed.failures.heartbeat import Heartbeat
from placer.executor.distributed.failures.layer_failure import LayerFailure
from placer.executor.distributed.job.assignment import Job
from placer.executor.distributed.job.call_check import CallNotAnswered, name_ranks
from placer.executor.distributed.job.join import store_for_start
from placer.executor.distributed.job.rendezvous import (
    POLL_SECONDS,
    StoreFinder,
    TorchrunStore,
    is_hosted_here,
    is_torchrun_store,
)

# How long to wait for another rank's reason, or for others to read this one's; and the same for
# processes that were started by hand, which arrive at different times.
_PATIENCE_SECONDS = 2.0
_START_SECONDS = 5.0


class FailureBroadcast:
    """One message from the rank that failed first to all others, in the job's key-value store."""

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
        """``name`` is the unique name of the placed module, the same on every rank.

        ``find_store`` returns the store, or None as long as there is none. ``limit`` is how long ranks
        wait for each other's messages; ``patience_seconds`` is how long this rank, after it has failed,
        waits for the store and for the others to read the reason.
        """
        self._key = f"placer/failures/{name}"
        self._rank = rank
        self._world_size = world_size
        self.find_store = find_store
        self._patience_seconds = patience_seconds
        self._hang_detector = HangDetector(
            self._key, rank, world_size, find_store=find_store, limit=limit
        )
        self._heartbeat = Heartbeat(self._key, rank, world_size)
        self._is_known = False  # whether this rank has told, or read, why the job ends

    def beating(self, find_store: StoreFinder) -> AbstractContextManager[None]:
        """A context in which the others notice if this process is killed; see `Heartbeat.beating`."""
        return self._heartbeat.beating(find_store, patience_seconds=self._patience_seconds)

    def set_limit(self, limit: timedelta) -> None:
        """Set how long ranks wait for each other's messages."""
        self._hang_detector.limit = limit

    def raise_for(
        self,
        error: Exception,
        *,
        find_lost: Callable[[], Sequence[int]],
        layers: Sequence[Sequence[str]],
        replica_index: int,
    ) -> NoReturn:
        """Raise ``error`` with a description of its place; tell the others if it occurred here.

        ``find_lost`` returns the ranks whose connections are closed; ``layers`` has the layers of every
        stage.

        Raises ``StageError`` on the rank whose stage raised, and ``PeerError`` on ranks that lost the
        connection to another. A ``PlacerError`` is told and raised as it is; any other exception becomes
        a ``PlacerError``.
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
        stage, layer = failure.stage_index, failure.layer
        place, hint = f"layer {layer!r}, " if layer else "", ""
        if failure.phase == "backward" and not layer and layers[stage]:
            place = f"one of its layers ({_span(layers[stage])}), "
            hint = "; to have the layer named, run again with PLACER_ANOMALY=1"
        where = (
            f"stage {stage}, {place}rank {self._rank} (replica {replica_index}), {failure.phase}"
        )
        problem, remedy = f"{type(cause).__name__}: {cause}", ""
        if isinstance(cause, PlacerError):
            inside = "" if cause.where == failure.phase else f"{cause.where}: "
            problem, remedy = f"{inside}{cause.problem}", cause.remedy
        there = remedy or "the traceback is in that rank's output"
        self._tell({"where": where, "problem": problem, "remedy": there})
        raise StageError(
            where,
            problem,
            remedy or f"the exception above is the cause; the other ranks end with PeerError{hint}",
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
        """Raise ``PeerError`` if ``cause`` is a failed communication with other ranks.

        Gloo raises plain ``RuntimeError``s, so a closed connection is the evidence; other backends raise
        ``DistError``. A rank whose wait timed out reports that at once (`HangDetector`), because its
        connections are closed then, and other ranks would think that it has ended.
        """
        call = _find_cause(error, CallNotAnswered)
        told = self._explain_loss(cause, find_lost, method="" if call is None else call.method)
        if told is not None:
            raise PeerError(**told) from error

    def explain_loss(self, cause: BaseException) -> dict[str, str]:
        """The reason for a failed communication, as arguments of ``PeerError``."""
        told = self._explain_loss(cause, tuple, method="")
        return told or _lost(self._rank, cause, ())

    def _explain_loss(
        self, cause: BaseException, find_lost: Callable[[], Sequence[int]], *, method: str
    ) -> dict[str, str] | None:
        """The reason that a rank has told, otherwise what this rank knows; None if no rank was lost.

        ``method`` is the call that not all ranks have made, if this rank waited for it.
        """
        timed_out = "timed out" in str(cause).lower()
        if timed_out:
            self._hang_detector.report_timeout(method)
        # Before other ranks close their connections too:
        lost_ranks = [] if timed_out else find_lost()
        told = self._listen(0 if timed_out else _PATIENCE_SECONDS)
        if told is None and self._hang_detector.any_timeout():
            self._hang_detector.report_timeout(method)
            return self._tell(
                self._hang_detector.wait_for_reports(stop=lambda: self._listen(0) is not None)
            )
        if told is None:
            lost_ranks = lost_ranks or find_lost()
            if lost_ranks or isinstance(cause, dist.DistError):
                told = self._tell(_lost(self._rank, cause, lost_ranks))
        return told

    def tell_end(self, error: BaseException) -> None:
        """Tell the others that this rank ends by ``error``, such as ``KeyboardInterrupt``."""
        remedy = "start the job again"
        told = {"where": f"rank {self._rank}", "problem": type(error).__name__, "remedy": remedy}
        self._tell(told, wait_seconds=0.0)  # the program should end at once

    def tell_failure(self, error: Exception) -> None:
        """Tell the others that this rank could not compile the model."""
        where, problem, remedy = f"rank {self._rank}", f"{type(error).__name__}: {error}", ""
        if isinstance(error, PlacerError):
            where, problem, remedy = f"{where}, {error.where}", error.problem, error.remedy
        alike = "give every rank the same model and spec"
        remedy = f"{remedy}; {alike}" if remedy else alike
        self._tell({"where": where, "problem": problem, "remedy": remedy})

    def raise_if_told(self) -> None:
        """Raise ``PeerError`` if another rank has told why it failed."""
        if (told := self._listen(0)) is not None:
            raise PeerError(**told)

    def raise_if_silent(self) -> None:
        """Raise ``PeerError``, and tell the others, if a rank gives no sign of life any more."""
        if silent := self._heartbeat.silent_ranks(self.find_store):
            seconds = self._heartbeat.silent_seconds
            told = {
                "where": name_ranks(silent),
                "problem": f"has given no sign of life for {seconds:g} s, before all ranks had come to "
                "placer.compile",
                "remedy": f"look at the output of {name_ranks(silent)} for the first error; if there is "
                "none, it was killed, perhaps for lack of memory, or its machine failed",
            }
            raise PeerError(**self._tell(told))

    def await_readers(self) -> None:
        """On the rank that hosts the store, wait until the others have read the message.

        They cannot read it after this process has ended. Returns after ``patience_seconds`` at most.
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
        """Store the message ``told``, unless another rank was first; returns the one that is stored.

        Returns ``told`` if there is no store.
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
        """The message of the rank that failed first; None if there is none within ``seconds``.

        Returns early if ranks have reported that a wait timed out.
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
                return None  # the process of the store has ended, or the program has left the job
            if time.monotonic() > end or self._hang_detector.any_timeout():
                return None
            time.sleep(POLL_SECONDS)

    def _note_heard(self, store: Any) -> None:
        self._is_known = True
        with store_may_be_gone():
            store.set(f"{self._key}/heard/{self._rank}", "")


_compiled = itertools.count()  # numbers the calls of ``compile``, the same on every rank


@contextmanager
def failure_told(job: Job) -> Iterator[FailureBroadcast]:
    """Tell the other ranks of an exception in the block, which runs before there is a placed module.

    They read it while they wait for this rank (`join_job`), and if they lose the connection to it
    (`lost_peers` with the yielded ``FailureBroadcast``).
    """
    name = f"compile {next(_compiled)}"
    find_store = store_for_start(job, name)
    with store_may_be_gone():  # `join_job` will report what is wrong with it
        find_store()  # rank 0 may host it, for the messages of ranks that fail early
    by_hand = not dist.is_initialized() and not is_torchrun_store()
    patience = _START_SECONDS if by_hand else _PATIENCE_SECONDS
    failures = FailureBroadcast(
        job.rank, job.world_size, name, find_store=find_store, patience_seconds=patience
    )
    # A launcher would end the others if a rank is killed.
    beating = failures.beating(store_for_start(job, name)) if by_hand else nullcontext()
    try:
        with beating:
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
    """Raise ``PeerError`` if another rank is lost in the block, which runs before there is a module.

    It has the reason that the other rank has told in ``failures``, if it has.
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
    """Whether a function of ``torch.distributed`` raised ``error``, perhaps called by a layer.

    Does not detect an error in a layer's own wait for an operation with ``async_op=True``.
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
