"""Schedules: against the papers' drawings, and against what torch's own classes execute."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from placer.plan.types import Plan
from placer.schedule import (
    SCHEDULES,
    Schedule,
    in_flight_by_stage,
    linearize,
    make_schedule,
    merge_backward,
)
from placer.spec import fields


def draw(schedule: Schedule) -> str:
    """The table as text, a line per rank."""
    lines = [" ".join(map(str, actions)) for actions in schedule.actions]
    return "\n".join(f"rank {rank}  {line}" for rank, line in enumerate(lines))


def test_a_spec_and_a_plan_may_name_every_schedule() -> None:
    assert fields.SCHEDULES == SCHEDULES == get_args(get_type_hints(Plan)["schedule"])


def test_gpipe_drawn() -> None:
    assert draw(make_schedule("GPipe", 3, 2)).splitlines() == [
        "rank 0  0F0 0F1 0B0 0B1",
        "rank 1  1F0 1F1 1B0 1B1",
        "rank 2  2F0 2F1 2B0 2B1",
    ]


def test_1f1b_drawn() -> None:
    assert draw(make_schedule("1F1B", 3, 4)).splitlines() == [
        "rank 0  0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "rank 1  1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "rank 2  2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


@pytest.mark.parametrize(("num_ranks", "per_rank"), [(2, 1), (2, 2), (4, 2), (3, 3)])
@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble"])
def test_interleaved_schedules_are_torchs(
    name: str, num_ranks: int, per_rank: int, rounds: int
) -> None:
    microbatches = rounds * num_ranks
    ours = make_schedule(name, num_ranks * per_rank, microbatches, num_ranks=num_ranks)
    for rank, actions in enumerate(ours.actions):
        theirs = _torchs_actions(name, rank, num_ranks, per_rank, microbatches)
        assert [str(a) for a in actions] == theirs


def _torchs_actions(
    name: str, rank: int, num_ranks: int, per_rank: int, microbatches: int
) -> list[str]:
    """What torch's class computes for one rank, without its stages and process group."""
    schedule: Any = object.__new__(getattr(torch_schedules, f"Schedule{name}"))
    schedule.pp_group_size = num_ranks
    schedule.n_local_stages = per_rank
    schedule._n_microbatches = microbatches
    schedule.number_of_rounds = max(1, microbatches // num_ranks)
    schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
    operations = schedule._calculate_single_rank_operations(rank)
    return [str(action) for action in operations if action is not None]


shapes = st.tuples(
    st.sampled_from(SCHEDULES), st.integers(1, 5), st.integers(1, 3), st.integers(1, 9)
)


@given(shapes)
def test_every_schedule_does_everything_once_and_can_run(shape: Any) -> None:
    name, num_ranks, per_rank, microbatches = shape
    try:
        schedule = make_schedule(name, num_ranks * per_rank, microbatches, num_ranks=num_ranks)
    except ValueError:
        assert per_rank > 1  # one stage per rank is always possible
        return
    order = linearize(schedule)
    assert Counter(order) == Counter(a for rank in schedule.actions for a in rank)
    assert set(Counter(order).values()) == {1}
    _assert_dependencies(schedule, [str(action) for action in order])
    merged = merge_backward(schedule)
    forwards_and_backwards = 2 * num_ranks * per_rank * microbatches
    assert len(linearize(merged)) == forwards_and_backwards


def _assert_dependencies(schedule: Schedule, order: list[str]) -> None:
    at = {action: i for i, action in enumerate(order)}
    back = "I" if any("I" in action for action in order) else "B"
    for stage in range(schedule.num_stages):
        for m in range(schedule.num_microbatches):
            if stage:
                assert at[f"{stage - 1}F{m}"] < at[f"{stage}F{m}"]
                assert at[f"{stage}{back}{m}"] < at[f"{stage - 1}{back}{m}"]
            assert at[f"{stage}F{m}"] < at[f"{stage}{back}{m}"]
            if back == "I":
                assert at[f"{stage}I{m}"] < at[f"{stage}W{m}"]


def test_in_flight_falls_along_1f1b_and_not_along_gpipe() -> None:
    assert [s.most for s in in_flight_by_stage(make_schedule("GPipe", 4, 8))] == [8] * 4
    assert [s.most for s in in_flight_by_stage(make_schedule("1F1B", 4, 8))] == [4, 3, 2, 1]


def test_a_smaller_last_microbatch_counts_as_the_share_that_it_is() -> None:
    waits = in_flight_by_stage(make_schedule("GPipe", 2, 3), last_share=0.5)[1]
    assert (waits.microbatches, waits.most) == (3, 2.5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("gpipe", 2, 2), "known: GPipe"),
        (("GPipe", 0, 2), "at least one"),
        (("Interleaved1F1B", 5, 2, 2), "divided evenly"),
        (("Interleaved1F1B", 4, 5, 2), "multiple of 2"),
    ],
)
def test_what_cannot_be_scheduled(arguments: tuple[Any, ...], said: str) -> None:
    name, stages, microbatches, *ranks = arguments
    with pytest.raises(ValueError, match=said):
        make_schedule(name, stages, microbatches, num_ranks=ranks[0] if ranks else None)
