"""An exception in one stage, made known to every rank of the job."""

from __future__ import annotations

import itertools
import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch.distributed as dist

from placer._torch import default_store
from placer.errors import PeerError, PlacerError, StageError, causes
from placer.runtime.distributed.agreement import name_ranks
from placer.runtime.distributed.failures import LayerFailure
from placer.runtime.distributed.suspects import Culprit

_PATIENCE_SECONDS = 2.0  # how long a rank that lost its neighbour waits to be told why


class Alarm:
    """One message of one failed rank to all others, in the job's key-value store."""

    def __init__(self, rank: int, name: str) -> None:
        """``name`` is that of the placed module, the same on every rank and of no other one."""
        self._key = f"placer/alarm/{name}"
        self._rank = rank

    def raise_for(
        self,
        error: Exception,
        *,
        find_lost: Callable[[], Sequence[int]],
        find_culprit: Callable[[LayerFailure], Culprit],
        layers: Sequence[Sequence[str]],
        replica_index: int,
    ) -> NoReturn:
        """Tell the others of ``error`` if it arose here, and raise it as what it is.

        ``find_lost`` says which ranks are gone, ``find_culprit`` whose code failed; ``layers`` are those
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
                "remedy": "the traceback is above, on that rank",
            }
            self._tell(told)
            raise PlacerError(*told.values()) from error
        cause = failure.__cause__ or root
        stage, culprit = failure.stage_index, find_culprit(failure)
        layer = culprit.layers[0] if len(culprit.layers) == 1 else ""
        phase = "backward of loss_fn" if culprit.after else failure.phase
        place = f"layer {' or '.join(map(repr, culprit.layers))}, " if culprit.layers else ""
        if phase == "backward" and not place and layers[stage]:
            place = f"one of its layers ({_span(layers[stage])}), "
        where = f"stage {stage}, {place}rank {self._rank} (replica {replica_index}), {phase}"
        problem, remedy = f"{type(cause).__name__}: {cause}", ""
        if isinstance(cause, PlacerError):
            inside = "" if cause.where == failure.phase else f"{cause.where}: "
            problem, remedy = f"{inside}{cause.problem}", cause.remedy
        there = remedy or "the traceback is above, on that rank"
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
        A rank that waited too long tells so at once: its connections are closed, and who sees that
        would take it for the one that ended.
        """
        timed_out = "timed out" in str(cause).lower()
        lost_ranks = [] if timed_out else find_lost()  # before others close theirs
        told = self._listen(0 if timed_out else _PATIENCE_SECONDS)
        if told is None:
            lost_ranks = lost_ranks or ([] if timed_out else find_lost())
            if timed_out or lost_ranks or isinstance(cause, dist.DistError):
                told = self._tell(_lost(self._rank, cause, lost_ranks))
        if told is not None:
            raise PeerError(**told) from error

    def tell_end(self, error: BaseException) -> None:
        """Tell the others that this rank ends by ``error``, such as ``KeyboardInterrupt``."""
        remedy = "start the job anew"
        self._tell(
            {"where": f"rank {self._rank}", "problem": type(error).__name__, "remedy": remedy}
        )

    def tell_failure(self, error: Exception) -> None:
        """Tell the others that this rank could not compile the model."""
        where, problem, remedy = f"rank {self._rank}", f"{type(error).__name__}: {error}", ""
        if isinstance(error, PlacerError):
            where, problem, remedy = f"{where}, {error.where}", error.problem, error.remedy
        alike = "give every rank the same model and spec"
        remedy = f"{remedy}; {alike}" if remedy else alike
        self._tell({"where": where, "problem": problem, "remedy": remedy})

    def hear(self) -> dict[str, str] | None:
        """The message of the rank that failed first, if there is one soon."""
        return self._listen(_PATIENCE_SECONDS)

    def _tell(self, told: Mapping[str, str]) -> dict[str, str]:
        """Leave the message, unless another rank was first; the one that is there then.

        ``told`` itself when the store is gone.
        """
        try:
            store = default_store()
            return dict(json.loads(store.compare_set(self._key, "", json.dumps(dict(told)))))
        except (dist.DistError, RuntimeError, ValueError):
            return dict(told)

    def _listen(self, seconds: float) -> dict[str, str] | None:
        """The message of the rank that failed first, if there is one within ``seconds``."""
        end = time.monotonic() + seconds
        while True:
            try:
                if default_store().check([self._key]):
                    told: dict[str, str] = json.loads(default_store().get(self._key))
                    return told
            except (dist.DistError, RuntimeError, ValueError):
                return None  # the store's own process is gone, or the program left the job
            if time.monotonic() > end:
                return None
            time.sleep(0.05)


_compiled = itertools.count()  # calls of compile in this process: every rank makes the same ones


@contextmanager
def failure_told(rank: int) -> Iterator[Alarm]:
    """Leave what the block raises, before any module is there, where the other ranks look for it.

    They look when they lose this rank (`lost_peers` with the yielded ``Alarm``). Without a process group
    there is nowhere to leave it.
    """
    alarm = Alarm(rank, f"compile {next(_compiled)}")
    try:
        yield alarm
    except PeerError:
        raise
    except Exception as error:
        if dist.is_initialized():
            alarm.tell_failure(error)
        raise


@contextmanager
def lost_peers(rank: int, alarm: Alarm) -> Iterator[None]:
    """Raise the loss of another rank inside the block, before any module is there, as ``PeerError``.

    With what that rank has left at ``alarm``, if it has.
    """
    try:
        yield
    except PlacerError:
        raise
    except RuntimeError as error:
        raise PeerError(**(alarm.hear() or _lost(rank, error, ()))) from error


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
