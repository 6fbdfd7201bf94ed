"""Faults of real jobs: each ends with one clear error on every rank that is left, and none waits."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import fault_cases as cases
import models
import pytest
import torch
from distributed_cases import make_spec
from jobs import Job, start_by_hand
from torch import nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import placer


@pytest.mark.matrix(1)
@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_killed_in_a_step_ends_the_others_with_one_error(tmp_path: Path, rank: int) -> None:
    """Rank 0 holds the job's store too; rank 3 is no neighbour of rank 0."""
    with closing(Job(4)) as job:
        answers = job.ask(cases.lose_a_rank, tmp_path, rank, signal.SIGKILL)
    assert answers.pop(rank) is None  # it is gone
    assert sorted(answers) == sorted({0, 1, 2, 3} - {rank})
    for number, answer in answers.items():
        assert answer is not None, f"rank {number} hangs"
        ok, found = answer
        assert ok, found
        assert found[0] == "PeerError", found
        assert f"lost the connection to rank {rank}, which ended" in found[1]


def test_a_rank_killed_while_saving_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    with closing(Job(2)) as job:
        answers = job.ask(cases.die_in_save, tmp_path)
    assert answers[1] is None and answers[0] is not None
    ok, found = answers[0]
    assert ok and found == "PeerError", found
    assert (tmp_path / ".last.saving").is_dir()  # the second was under way
    model = models.ConvNet().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    assert placer.load(model, optimizer, tmp_path / "last") == {"steps": 1}
    assert optimizer.state[model.fc2.bias]["step"] == 1
    placer.save(model, optimizer, tmp_path / "last")
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("too many devices", "rank 1, world size: the job has 2 processes, the plan needs 3"),
        ("a mistake", "rank 1, placement spec: 2 problems"),
        ("no word", "rank 0: lost the connection to rank 1, which ended"),
    ],
)
def test_a_rank_that_ends_before_all_have_come_is_named(what: str, said: str) -> None:
    """With the reason, if it has told one."""
    with closing(Job(2)) as job:
        answers = job.ask(cases.end_of_another_spec, what)
    assert answers[1] is None and answers[0] is not None
    ok, (kind, text) = answers[0]
    assert ok and kind == "PeerError", text
    assert text.startswith(said), text
    assert what == "no word" or "give every rank the same model and spec" in text


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("where", "rank", "others"),
    [("data loader", 0, "1, 2"), ("layer", 1, "0, 2"), ("compile", 2, "0, 1")],
)
def test_a_rank_that_hangs_is_named(where: str, rank: int, others: str) -> None:
    """By those that waited for it, also by one that waited for another that waited for it."""
    with closing(Job(3, timeout_seconds=4.0)) as job:
        answers = job.ask(cases.hang, where, rank, wait_for=[r for r in range(3) if r != rank])
    assert len(answers) == 2
    for other, answer in answers.items():
        assert answer is not None, f"rank {other} hangs"
        ok, (kind, text) = answer
        assert ok and kind == "PeerError", text
        said = f"does not answer; ranks {others} waited longer than 4 s"
        assert text.startswith(f"rank {rank} (process ") and said in text, text


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("where", "rank"), [("compile", 0), ("compile", 1), ("step", 0)])
def test_processes_started_by_hand_all_say_why_one_failed(where: str, rank: int) -> None:
    """Also when that is rank 0, with which the store ends."""
    found = start_by_hand(2, cases.fail_by_hand, where, rank)
    said = "64 bytes are less than any device has" if where == "compile" else "boom"
    for number, error in enumerate(found):
        assert error is not None, f"rank {number} hangs"
        kind, text = error
        expected = {"compile": "SpecError", "step": "StageError"}[where]
        assert kind == (expected if number == rank else "PeerError"), (number, text)
        assert said in text and (number == rank or f"rank {rank}" in text), (number, text)


def test_a_rank_that_is_killed_while_it_plans_is_named() -> None:
    """Its connections, as the ranks join before they plan."""
    found = start_by_hand(3, cases.kill_while_planning, 2)
    assert found.pop(2) is None
    for error in found:
        assert error is not None and error[0] == "PeerError"
        assert "lost the connection to rank 2, which ended" in error[1]


def test_a_rank_that_fails_in_compile_and_lives_on_keeps_none_waiting(tmp_path: Path) -> None:
    """Under torchrun, which ends all when a process ends."""
    _torchrun(cases.fail_to_compile_and_go_on, tmp_path, processes=2, max_restarts=0)
    said = [(tmp_path / f"said.{rank}").read_text() for rank in range(2)]
    assert said[1].startswith("SpecError: placement spec: 2 problems")
    assert said[0].startswith("PeerError: rank 1, placement spec: 2 problems")


def test_torchrun_restarts_from_the_last_checkpoint_to_the_same_weights(
    job_of: Callable[[int], Job], tmp_path: Path
) -> None:
    """A rank kills itself in step 3; the checkpoint is of step 2; the weights after step 5 are equal."""
    (tmp_path / "straight").mkdir()
    expected = job_of(2).run(
        cases.train_with_checkpoints, tmp_path / "straight", stages=2, replicas=1, steps=5
    )
    _torchrun(cases.train_and_write, tmp_path, processes=2, max_restarts=1)
    started = sorted(p.name for p in tmp_path.glob("started.*"))
    assert started == ["started.0.0", "started.0.2", "started.1.0", "started.1.2"]
    for rank, state in enumerate(expected):
        found = torch.load(tmp_path / f"weights.{rank}")
        assert found.keys() == state.keys()
        assert all(torch.equal(tensor, state[name]) for name, tensor in found.items())


def _torchrun(
    function: Callable[..., None], *args: object, processes: int, max_restarts: int
) -> None:
    """What ``torchrun --max-restarts`` does, for a function; its processes start from the fork server."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        max_restarts=max_restarts,
        start_method="forkserver",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        rdzv_configs={"is_host": True},
        run_id="test",
    )
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        elastic_launch(config, function)(*args)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


_ENDS_BESIDE_A_THREAD = """
import threading, time
from placer.executor.distributed.job.assignment import Job
from placer.executor.distributed.job.join import join_job
join_job(Job(rank=0, world_size=1, local_rank=0))
threading.Thread(target=lambda: (time.sleep(0.01), print("let go")), daemon=True).start()
"""


def test_threads_of_messages_may_let_go_of_them_at_the_end_of_the_program() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    command = [sys.executable, "-c", _ENDS_BESIDE_A_THREAD]
    done = subprocess.run(
        command, env={**os.environ, **address}, stdout=subprocess.PIPE, check=True
    )
    assert done.stdout == b"let go\n"


def test_a_port_already_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        variables = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(placer.PlacerError, match=f"port {port} is taken already") as caught:
            placer.compile(nn.Linear(2, 2), make_spec(1, 2, 1), (torch.randn(4, 2),))
    assert "choose another MASTER_PORT" in caught.value.remedy


def test_a_rank_that_starts_late_is_waited_for(job_of: Callable[[int], Job]) -> None:
    assert job_of(2).run(cases.start_late, seconds=1.0) == [True, True]
