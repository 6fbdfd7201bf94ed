"""What goes wrong on one rank is said on all of them, and none waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import distributed_cases as cases
import fault_cases
import pipeline_cases
import pytest
from jobs import Job

from placer.executor.distributed.job.assignment import find_job

SPLIT = "InterleavedZeroBubble"


@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    ("schedule", "fault", "rank", "stage", "layer", "said"),
    [
        ("1F1B", "layer", 0, "0", "tokens", "IndexError: index out of range"),
        ("GPipe", "hook", 1, "1", "blocks.2.mlp.0", "ArithmeticError: boom"),
        ("InterleavedZeroBubble", "backward", 0, "0", "", "backward: ArithmeticError: boom"),
        ("1F1B", "parameter", 0, "0", "positions", "backward: ArithmeticError: boom"),
        ("1F1B", "loss", 1, "1", "", "loss_fn: IndexError: Target"),
        ("1F1B", "rows", 1, "1", "", "loss_fn: returned a tensor of [2, 1], not a scalar"),
    ],
)
def test_an_exception_in_a_stage_ends_every_rank_with_its_place(
    job_of: Callable[[int], Job],
    schedule: str,
    fault: str,
    rank: int,
    stage: str,
    layer: str,
    said: str,
) -> None:
    """The processes live on, and serve the next test in a process group of their own."""
    spec = cases.make_spec(2, 1, 4, schedule)
    found = job_of(2).run(cases.fail_in_a_step, spec, fault, rank)
    kind, message, *fields = found[rank]
    assert kind == "StageError"
    assert fields == [layer, stage, str(rank)]
    assert said in message
    assert message.count(" -> ") == 1
    kind, message = found[1 - rank]
    assert kind == "PeerError"
    assert f"rank {rank}" in message
    assert said in message
    assert layer in message


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("schedule", "fault", "rank", "layer"),
    [
        ("1F1B", "function", 0, "1.odd"),  # a backward of the model's own
        ("1F1B", "tensor", 1, "2.first"),  # a hook
        (SPLIT, "overwritten", 1, "2.last"),  # of the half for inputs, out of torch's kernels
        ("1F1B", "loss", 1, ""),
    ],
)
def test_with_anomaly_mode_an_exception_in_backward_names_its_layer(
    job_of: Callable[[int], Job], schedule: str, fault: str, rank: int, layer: str
) -> None:
    """Without it, the stage with its first and last layer."""
    for anomaly in (True, False):
        found = job_of(2).run(fault_cases.fail_in_backward, schedule, fault, rank, anomaly)
        named = layer if anomaly else ""
        assert found[rank][0] == named
        place = f"layer {named!r}" if named else f"one of its layers ({2 * rank}.first … "
        for _, said in found:
            assert said.startswith(f"stage {rank}, {place}") and f"rank {rank} (replica 0)" in said
        assert ("PLACER_ANOMALY=1" in found[rank][1]) == (not named)


def test_the_error_crosses_to_other_replicas(job_of: Callable[[int], Job]) -> None:
    found = job_of(4).run(cases.fail_in_a_step, cases.make_spec(2, 2, 4, "1F1B"), "hook", 1)
    assert [rank[0] for rank in found] == ["PeerError", "StageError", "PeerError", "PeerError"]
    assert all("blocks.2.mlp.0" in rank[1] for rank in found)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("rank", "fault"), [(1, "loss"), (2, "layer"), (3, "norm")])
def test_a_failed_rank_keeps_none_waiting_while_its_program_goes_on(
    job_of: Callable[[int], Job], rank: int, fault: str, *, keep: bool
) -> None:
    """Also where the program keeps what would hold the connections open: the module, the traceback."""
    for found in job_of(4).run(fault_cases.fail_and_go_on, rank, fault, keep=keep):
        expected = ["StageError" if i == rank else "PeerError" for i in range(4)]
        assert [said.partition(":")[0] for said in found] == expected
        assert all(f"rank {rank}" in said for said in found), found


def test_a_module_whose_process_group_is_destroyed_says_so(
    job_of: Callable[[int], Job], tmp_path: Path
) -> None:
    for rank, found in enumerate(job_of(2).run(fault_cases.leave_the_job, tmp_path)):
        assert len(found) == 10
        assert all(said.startswith(f"rank {rank}: has left the job") for said in found), found
    assert not (tmp_path / "last").exists()


def test_what_one_replica_refuses_is_told_to_all(job_of: Callable[[int], Job]) -> None:
    found = job_of(4).run(fault_cases.refuse_own_rows)
    kinds, messages = zip(*found, strict=True)
    assert kinds[:2] == ("PeerError", "PeerError")
    assert kinds[2] == kinds[3] != "PeerError"
    assert len(set(messages)) == 1, messages
    assert "5" in messages[0]


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    ("what", "kind", "said"),
    [
        (
            "dtype",
            "StageError",
            "passes on a tensor of torch.float32, but other ranks expect torch.float64",
        ),
        (
            "result",
            "StageError",
            "passes on a tensor of torch.float32, but other ranks expect torch.float64",
        ),
        ("cycle", "StageError", "ValueError: its own cause"),
        ("backward", "StageError", "backward: ValueError: its own cause"),
        ("chained", "StageError", "ValueError: needs a rate"),
        ("interrupt", "KeyboardInterrupt", "KeyboardInterrupt"),
        ("extra", "PlacerError", "ValueError: cannot be reduced"),
        ("state", "PlacerError", "ZeroDivisionError: division by zero"),
    ],
)
def test_what_a_rank_raises_is_told_as_it_is(
    job_of: Callable[[int], Job], tmp_path: Path, what: str, kind: str, said: str
) -> None:
    found = job_of(2).run(fault_cases.raise_oddly, what, tmp_path)
    failing = 0 if what == "dtype" else 1
    assert found[failing][0] == kind
    assert kind == "KeyboardInterrupt" or said in found[failing][1]
    assert found[1 - failing][0] == "PeerError"
    assert said in found[1 - failing][1] and f"rank {failing}" in found[1 - failing][1]


def test_a_part_that_cannot_be_built_is_told_to_all(
    job_of: Callable[[int], Job], tmp_path: Path
) -> None:
    found = job_of(2).run(fault_cases.miss_weights_on_one_rank, tmp_path)
    assert [kind for kind, _ in found] == ["PeerError", "PlacerError"]
    assert all("weights_1.pt: no such file" in said for _, said in found), found
    assert found[0][1].startswith("rank 1, ")


@pytest.mark.matrix(1)
@pytest.mark.parametrize("what", ["model", "plan"])
def test_another_model_or_plan_on_one_rank_is_found_at_start_up(
    job_of: Callable[[int], Job], what: str
) -> None:
    found = job_of(2).run(cases.compile_unlike_the_others, what)
    assert all(f"the {what}" in message and "of rank 1 differs" in message for message in found)


def test_a_job_of_the_wrong_size_is_refused(job_of: Callable[[int], Job]) -> None:
    for said in job_of(2).run(fault_cases.compile_for_more_processes):
        assert said.startswith("the job has 2 processes, the plan needs 4: 2 replicas x 2 devices")


def test_other_launchers_than_torchrun_make_a_job_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """``mpirun`` or ``srun`` with the variables that torch reads; one process of it is no job."""
    found = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    job = find_job()
    assert job is not None and (job.rank, job.world_size, job.local_rank) == (2, 4, 2)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert find_job() is None
    monkeypatch.delenv("WORLD_SIZE")
    assert find_job() is None


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("stages", "replicas", "schedule", "frozen"), [(2, 1, "1F1B", True), (1, 2, "GPipe", False)]
)
def test_inputs_that_require_gradients_on_one_rank_are_an_error_on_all(
    job_of: Callable[[int], Job], stages: int, replicas: int, schedule: str, *, frozen: bool
) -> None:
    spec = cases.make_spec(stages, replicas, 2, schedule)
    for messages in job_of(2).run(pipeline_cases.want_gradients_on_one_rank, spec, frozen):
        expected = "PlacerError: requires_grad of input x: is True on rank 1, but False on rank 0"
        assert len(messages) == (1 if frozen else 2)
        assert all(message.startswith(expected) for message in messages), messages


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), (1, 2)])
def test_ranks_that_are_not_called_alike_say_so(
    job_of: Callable[[int], Job], stages: int, replicas: int, tmp_path: Path
) -> None:
    """All with one error, before any message of the call has left."""
    spec = cases.make_spec(stages, replicas, 2)
    found = job_of(2).run(fault_cases.call_unlike_the_others, spec, tmp_path)
    told = {
        "rows": "batch: is 5 rows on rank 1, but 6 rows on rank 0",
        "shapes": "input input_1: is [6, 4] of torch.float64 on rank 1, but [6, 4] of torch.float32",
        "own_rows": "own_rows: is True on rank 1, but False on rank 0",
        "reduction": "reduction: is sum on rank 1, but mean on rank 0",
        "autocast": "autocast: is ",
        "mode": "mode: is eval on rank 1, but train on rank 0",
        "method": "call: is placed(x) on rank 1, but placed.step on rank 0",
        "norm": "max_norm: is 2.0 on rank 1, but 1.0 on rank 0",
        "save": "call: is placer.save on rank 1, but placed.step on rank 0",
        "path": "path: is ",
        "no graph": "loss_fn: the loss depends on nothing that requires a gradient",
        "no rows anywhere": "batch: has no rows",
    }
    for rank in found:
        for name, message in told.items():
            assert rank[name].startswith(f"PlacerError: {message}"), (name, rank[name])
    assert found[0]["values"] == ""
    assert found[1]["values"].startswith("rank 1 was given other inputs than rank 0")


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), (2, 2), (1, 2)])
def test_rows_of_several_batches_in_one_replica_are_an_error(
    job_of: Callable[[int], Job], stages: int, replicas: int
) -> None:
    """On all ranks; values that may differ for a good reason are a warning where they differ."""
    spec = cases.make_spec(
        stages, replicas, 2, layers={"first": "cpu:0", "last": f"cpu:{stages - 1}"}
    )
    found = job_of(stages * replicas).run(fault_cases.give_other_values, spec)
    last = stages * replicas - 1
    refused = {
        "mask": "input mask",
        "mask of an inference": "input mask",
        "batch": "input x",
        "batch of own rows": "input x",
    }
    for rank, said in enumerate(found):
        for name, message in said.items():
            if stages == 2 and name in refused:
                expected = (
                    f"PlacerError: {refused[name]}: has other values on rank {last} than on rank "
                    f"{last - 1}"
                )
                assert message.startswith(expected), (name, message)
            elif rank == last and name not in ("target", *["batch of own rows"] * (stages == 1)):
                assert f"rank {last} was given other inputs than rank" in message, (name, message)
            else:
                assert not message, (rank, name, message)
