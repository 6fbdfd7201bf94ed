"""Jobs of several real processes for tests: started once per world size, and reused."""

from __future__ import annotations

import datetime
import gc
import itertools
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from placer import garbage

_TCP_STORE: Any = dist.TCPStore  # type: ignore[attr-defined]
# Imported by the process that the others are forked from, which so have what is in there.
_PRELOAD = ["placer.checkpoint", "sklearn.datasets"]
_PRELOAD += ["captured_cases"]
TIMEOUT_SECONDS = 120


class Job:
    """``world_size`` processes with a gloo process group, waiting for functions to run.

    Groups outwait a test: a rank that is left waiting fails it.
    """

    def __init__(self, world_size: int, timeout_seconds: float = 10 * TIMEOUT_SECONDS) -> None:
        context = _fork_server()
        # As an agent of torchrun, this process hosts the store, which so outlives the ranks.
        self._store = _TCP_STORE("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ends: list[Connection] = []
        self._processes = []
        self.closed = False
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work,
                args=(rank, world_size, self._store.port, timeout_seconds, theirs),
                daemon=True,
            )
            process.start()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """The result of ``function(*args, **kwargs)`` on each rank; raises if any rank does."""
        for end in self._ends:
            end.send((function, args, kwargs))
        results, problems = [], []
        for rank, end in enumerate(self._ends):
            if not end.poll(TIMEOUT_SECONDS):
                self.close()
                raise TimeoutError(f"rank {rank} did not answer in {TIMEOUT_SECONDS} s")
            ok, value = end.recv()
            results.append(value)
            if not ok:
                problems.append(f"rank {rank}: {value}")
        if problems:
            raise AssertionError("\n".join(problems))
        return results

    def ask(
        self, function: Callable[..., Any], *args: Any, wait_for: Sequence[int] | None = None
    ) -> dict[int, tuple[bool, Any] | None]:
        """The answer of each rank to ``run``; None for a rank that ended or does not answer."""
        for end in self._ends:
            end.send((function, args, {}))
        answers: dict[int, tuple[bool, Any] | None] = {}
        for rank in range(len(self._ends)) if wait_for is None else wait_for:
            end = self._ends[rank]
            try:
                answers[rank] = end.recv() if end.poll(TIMEOUT_SECONDS) else None
            except EOFError:
                answers[rank] = None
        return answers

    def close(self) -> None:
        """End the processes."""
        self.closed = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _fork_server() -> Any:
    """The context whose processes are forked from one that has imported the modules of `_PRELOAD`.

    Before Python 3.14 that process ignores ``sys.path``, and silently leaves out what it does not find.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    return context


def start_by_hand(
    world_size: int, function: Callable[..., Any], *args: Any
) -> list[tuple[str, str] | None]:
    """The error of ``function(*args)`` on each rank, its type and text, as it is before the rank ends.

    Processes with the variables that torch looks for; rank 0 hosts the store, and each ends as soon as
    it has an error. ("", "") for none, None for a rank that is killed or does not end in time.
    """
    context = _fork_server()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    ends, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        given = rank, world_size, port, theirs, function, args
        process = context.Process(target=_work_by_hand, args=given, daemon=True)
        process.start()
        ends.append(ours)
        processes.append(process)
    found = [_answer(end, process) for end, process in zip(ends, processes, strict=True)]
    for process in processes:
        process.kill()
        process.join()
    return found


def _answer(end: Connection, process: Any) -> tuple[str, str] | None:
    limit = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < limit:
        alive = process.is_alive()
        if end.poll(0.1):
            answer: tuple[str, str] = end.recv()
            return answer
        if not alive:
            break
    return None


def _work_by_hand(
    rank: int,
    world_size: int,
    port: int,
    end: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in values.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    found = "", ""
    try:
        function(*args)
    except Exception as error:
        found = type(error).__name__, str(error)
    end.send(found)
    os._exit(0)  # at once, with the store


def _work(rank: int, world_size: int, port: int, timeout_seconds: float, end: Connection) -> None:
    # What was there at the fork stays: to look for garbage in it takes long, and so does to count it.
    gc.freeze()
    garbage._in_block = True
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    store = _TCP_STORE("127.0.0.1", port, is_master=False)
    for number in itertools.count():
        function, args, kwargs = end.recv()
        # A process group for each function: every group of gloo has threads that never rest.
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(str(number), store),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_seconds),
        )
        # A rank that closed its group at once would close connections that others still open.
        dist.barrier()
        try:
            answer = True, function(*args, **kwargs)
        except Exception:
            answer = False, traceback.format_exc()
        gc.collect()
        if dist.is_initialized():  # a job that failed has closed its groups
            dist.destroy_process_group()
        end.send(answer)
