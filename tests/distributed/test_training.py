"""What a training script does besides steps: the same under one process per device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import distributed_cases as cases
import norm_cases
import pytest
import rewritten
import safetensors.torch
import torch
from jobs import Job

import placer


def test_every_connection_is_made_before_the_first_step(job_of: Callable[[int], Job]) -> None:
    """NCCL makes it at the first use, where it waits for the other ranks: with tied weights for ever."""
    assert job_of(4).run(cases.connect_in_a_step, cases.make_spec(2, 2, 2, "1F1B")) == [[]] * 4


def test_fp16_skips_a_step_on_every_rank_when_one_overflows(job_of: Callable[[int], Job]) -> None:
    found = job_of(4).run(
        cases.train_with_a_scaler, cases.make_spec(2, 2, 2, "1F1B", precision="fp16")
    )
    assert len(set(found)) == 1, found
    scales = found[0]
    assert scales[1] == scales[0], "a good step was skipped"
    assert scales[2] == scales[1] / 2, "an overflow on one rank was not seen by the others"


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_a_part_is_read_from_a_file(
    job_of: Callable[[int], Job], tmp_path: Path, name: str
) -> None:
    torch.manual_seed(3)
    state = cases.CASES["convnet"](2)[0].state_dict()
    save = safetensors.torch.save_file if name.endswith("safetensors") else torch.save
    save(state, tmp_path / name)
    sums = job_of(2).run(cases.read_from_file, cases.make_spec(2, 1, 1), str(tmp_path / name))
    read = {name: total for rank in sums for name, total in rank.items()}
    assert read == {name: float(tensor.double().sum()) for name, tensor in state.items()}


def test_other_calls_that_cannot_be_are_said_on_all_ranks(job_of: Callable[[int], Job]) -> None:
    spec = cases.make_spec(2, 1, 2, layers={"first": "cpu:0", "last": "cpu:1"})
    for messages in job_of(2).run(cases.make_calls_that_cannot_be, spec):
        for message, part in zip(
            messages,
            (
                "arguments: is ",
                "arguments: is ",
                "input mask: has other values on rank 1",
                "extra.bias: is read by stage 1 in this call, but not in the one that",
                "scale: <object object at",
            ),
            strict=True,
        ):
            assert part in message, messages


def test_what_needs_one_process_is_said(job_of: Callable[[int], Job]) -> None:
    found = job_of(2).run(cases.try_what_needs_one_process, cases.make_spec(2, 1, 2, "1F1B"))
    for messages in found:
        for message, part in zip(
            messages,
            (
                "returns results without gradients",
                "placed(x) returns results without gradients",
                "call step outside torch.no_grad()",
                "torch.optim.LBFGS: computes with all parameters of the model together",
                "requires_grad was changed after placer.compile",
                "made_later: was created after placer.compile",
                "was created after placer.compile",
                "is torch.float32, and was torch.float64 when the model was placed",
                "the model itself has full backward hooks",
            ),
            strict=True,
        ):
            assert part in message


def test_dropout_differs_per_replica_and_comes_again(job_of: Callable[[int], Job]) -> None:
    found = job_of(2).run(cases.drop_twice, cases.make_spec(1, 2, 2))
    assert found[0] == found[0][:2] * 2  # the same seed, the same step
    assert found[1] == found[1][:2] * 2
    assert found[0][0] != found[0][1]  # another step
    assert found[0][0] != found[1][0]  # the same rows in another replica


def test_names_of_the_rest_of_the_model_are_known(job_of: Callable[[int], Job]) -> None:
    found = job_of(4).run(cases.use_names_of_other_ranks, cases.make_spec(2, 2, 1))
    for rank, messages in enumerate(found):
        there = f"is on rank {rank ^ 1}, not on this one"
        said = (
            there,
            there,
            there,
            "nowhere",
            'Unexpected key(s) in state_dict: "misspelt"',
            "Missing",
        )
        for message, part in zip(messages, said, strict=True):
            assert part in message, message
        assert "is on rank" not in messages[3]


def test_a_models_own_state_dict_is_asked_for_each_part(
    job_of: Callable[[int], Job], tmp_path: Path
) -> None:
    spec = cases.make_spec(2, 1, 1)
    found = job_of(2).run(cases.use_a_state_dict_of_the_models_own, spec, str(tmp_path / "saved"))
    own = {"version", "_extra_state"}
    assert set(found[0]) & set(found[1]) == own
    assert set(found[0]) | set(found[1]) == set(cases.RenamingModel().state_dict())


def test_only_this_ranks_part_is_held(job_of: Callable[[int], Job]) -> None:
    found = job_of(2).run(cases.list_part, cases.make_spec(2, 1, 2))
    assert found[0]["modules"] == ["conv1", "conv2", "dropout"]
    assert found[1]["modules"] == ["dropout", "fc1", "fc2"]
    assert not set(found[0]["owned"]) & set(found[1]["owned"])


def test_synchronised_batch_norm_needs_its_processes_and_whole_batches() -> None:
    model, (x,), _ = cases.CASES["in place"](4)
    with pytest.raises(placer.PlacerError, match="torchrun"):
        placer.compile(model.double(), cases.make_spec(1, 2, 1, batch_norm="sync"), x)
    with pytest.raises(placer.PlacerError, match='"microbatches": 1'):
        placer.make_plan(model.double(), cases.make_spec(1, 2, 2, batch_norm="sync"), x)


def test_a_layer_that_synchronises_itself_is_not_deferred(job_of: Callable[[int], Job]) -> None:
    messages = job_of(2).run(norm_cases.compile_synchronised)
    assert all("SyncBatchNorm" in message for message in messages)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("shape", [(2, 1), (2, 2)])
def test_a_plan_with_a_rewritten_graph(
    job_of: Callable[[int], Job], shape: tuple[int, int]
) -> None:
    stages, replicas = shape
    plan = rewritten.make_rewritten_plan(replicas=replicas, schedule="1F1B")
    job_of(stages * replicas).run(rewritten.train_on_ranks, plan)
