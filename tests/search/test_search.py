"""`auto` finds what trying everything finds, and what it says of the others is true."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from captured import captured_once
from hypothesis import given
from hypothesis import strategies as st
from models import Blocks, Pairs
from torch import Tensor, nn
from unet3d import unet3d

import placer
from placer.api import lower_call
from placer.cost import batch_rows
from placer.errors import PlacerError
from placer.plan.types import Plan
from placer.search.auto import choose_spec
from placer.search.bounds import Bounds
from placer.search.candidates import list_strategies
from placer.search.fewer import as_fast_with_fewer
from placer.search.search import AS_GOOD, find_strategy
from placer.search.strategy import Pool, Strategy
from placer.simulation.judge import JudgingPlanner
from placer.spec import DeviceSpec, PlacementSpec


def _cards(count: int, memory: str = "2GiB", kind: str = "rtx3090") -> list[dict[str, Any]]:
    return [{"name": f"cuda:{i}", "memory": memory, "kind": kind} for i in range(count)]


def _planner(
    model: nn.Module, x: Tensor, spec: PlacementSpec, *, processes: bool
) -> tuple[Any, JudgingPlanner]:
    program, inputs = lower_call(model, (x,), None, spec)
    return program, JudgingPlanner(program, inputs, processes=processes)


def _all_plans(
    program: Any,
    spec: PlacementSpec,
    make: JudgingPlanner,
    plan: Callable[[PlacementSpec], Plan],
    most: int,
) -> Iterator[tuple[Strategy, Plan]]:
    rows = batch_rows(program, make.inputs) or 1
    for strategy in list_strategies(program, spec, spec.devices, rows, processes=make.processes):
        found = strategy.spec(spec, Pool(spec.devices))
        if found is None or strategy.microbatches > most:
            continue
        try:
            yield strategy, plan(found)
        except PlacerError:
            continue


CASES = [
    ("2GiB", 16384, 3, False),
    ("690MiB", 8192, 2, False),  # several micro-batches are needed, or recomputation
    ("700MiB", 4096, 3, True),
    ("2GiB", 64, 4, True),  # gradients take longer to sum than there is to compute
]


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("memory", "rows", "devices", "processes"), CASES)
@captured_once()
def test_the_choice_is_as_good_as_the_best_of_all(
    memory: str, rows: int, devices: int, processes: bool
) -> None:
    with torch.device("meta"):
        model, x = Blocks(depth=2), torch.empty(rows, 256)
    spec = PlacementSpec.model_validate({"devices": _cards(devices, memory)})
    program, make = _planner(model, x, spec, processes=processes)
    best = find_strategy(spec, make).best
    assert best is not None and best.plan is not None and best.plan.fits
    found = _all_plans(program, spec, make, make, most=2)
    # Code that reads gradients gets pieces where they are divided, so that is done to save memory only.
    plans = (plan for strategy, plan in found if strategy.shard_state != "gradients")
    least = min(plan.rank_time for plan in plans if plan.fits and not plan.starved)
    assert best.plan.rank_time <= least * AS_GOOD


@captured_once()
def test_fewer_devices_that_are_as_fast_are_chosen() -> None:
    """Two stages that wait for each other update their halves of the weights at once: 0.3 % faster.

    So the plan with one device is judged first, and that of two stages is not judged any more.
    """
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)]
        model, x = nn.Sequential(*layers, nn.Linear(256, 10)), torch.empty(2300, 256)
    devices = _cards(2, kind="rtx3060-12gb")
    plan = placer.auto_plan(model, x, devices=devices, replicas=1, microbatches=1)
    (other,) = plan.alternatives
    assert (plan.strategy, other.strategy, other.judged) == ("one device", "2 stages", False)
    assert other.slower is not None and 1 / AS_GOOD <= other.slower < 1
    spec = PlacementSpec.model_validate({"devices": devices})
    _, make = _planner(model, x, spec, processes=False)
    said = as_fast_with_fewer(spec, make(spec), make)
    assert said.startswith("Fewer devices would be as fast: with cuda:0 alone, a step would take ")


@pytest.mark.matrix(1)
@pytest.mark.parametrize("processes", [False, True])
@captured_once()
def test_no_plan_is_better_than_its_bound(processes: bool) -> None:
    with torch.device("meta"):
        model, x = unet3d(width=4, depth=1), torch.empty(4, 1, 16, 16, 16)
    spec = PlacementSpec.model_validate({"devices": _cards(4)})
    program, make = _planner(model, x, spec, processes=processes)
    bounds = Bounds(program, make.inputs, spec, make.costs, make.loss_of(spec), processes=processes)
    seen = set()
    for strategy, plan in _all_plans(program, spec, make, make.estimate, most=1):
        if strategy.lighter:
            continue
        bound = bounds(strategy)
        assert plan.rank_time >= bound.seconds * (1 - 1e-6), strategy
        assert max(device.peak for device in plan.devices) >= bound.nbytes * (1 - 1e-6), strategy
        seen.add(strategy.family[:3])
    assert len(seen) == 7  # every combination of replicas, stages and shards on four devices


def test_a_bound_holds_for_the_fastest_of_unlike_devices() -> None:
    with torch.device("meta"):
        model, x = Blocks(256, 1), torch.empty(16, 256)
    found = []
    for kinds in (("h100",), ("h100", "t4"), ("t4",)):
        devices = [{"name": f"cuda:{i}", "kind": kind} for i, kind in enumerate(kinds)]
        spec = PlacementSpec.model_validate({"devices": devices})
        program, make = _planner(model, x, spec, processes=False)
        loss = make.loss_of(spec)
        bounds = Bounds(program, make.inputs, spec, make.costs, loss, processes=False)
        found.append(bounds(Strategy()).seconds)
    fast, both, slow = found
    assert both <= fast < slow


@captured_once()
def test_what_is_given_stays_and_the_answer_is_always_the_same() -> None:
    with torch.device("meta"):
        model, x = Blocks(), torch.empty(4096, 256)
    fields: dict[str, Any] = {"devices": _cards(4), "replicas": 2, "microbatches": 4}
    spec = placer.auto_spec(model, x, **fields)
    assert (spec.replicas, spec.microbatches) == (2, 4)
    plan = placer.auto_plan(model, x, **fields)
    assert spec.layers and all(each.next_best for each in plan.boundaries) and plan.boundaries
    assert plan == placer.auto_plan(model, x, **fields)
    assert plan.strategy and all("2 replicas" in each.strategy for each in plan.alternatives)
    again = placer.make_plan(model, spec, x)
    assert again.step_seconds == plan.step_seconds


@captured_once()
def test_alternatives_say_why_they_lost() -> None:
    """Each is of another kind, and is slower, or does not fit."""
    with torch.device("meta"):
        model, x = unet3d(width=16, depth=2), torch.empty(2, 1, 96, 96, 96)
    plan = placer.auto_plan(model, x, devices=_cards(3, "3GiB"), precision="bf16")
    assert plan.fits and len(plan.alternatives) >= 3
    for other in plan.alternatives:
        if other.fits:
            assert other.slower is not None and other.slower >= 1 / AS_GOOD
            assert other.step_seconds is not None and "longer" in other.reason
        else:
            assert "too much on" in other.reason or "needs at least" in other.reason


def test_the_first_that_fits_in_a_dry_run_ends_a_search_that_asks_for_any() -> None:
    with torch.device("meta"):
        model, x = unet3d(width=4, depth=2), torch.empty(4, 1, 16, 16, 16)
    spec = PlacementSpec.model_validate({"devices": _cards(2)})
    _, make = _planner(model, x, spec, processes=False)
    assert find_strategy(spec, make).others
    found = find_strategy(spec, make, any_will_do=True)
    assert found.best is not None and found.best.fits and found.best.judged
    assert found.others == ()


@captured_once()
@pytest.mark.parametrize(("rows", "is_cut"), [(4, False), (3, True), (1, True)])
def test_space_is_cut_only_where_rows_cannot_be_divided(
    rows: int, is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device("meta"):
        model, x = unet3d(width=16, depth=2), torch.empty(rows, 1, 96, 96, 96)
    spec = PlacementSpec.model_validate({"devices": _cards(2, "20GiB"), "microbatches": 1})
    _, make = _planner(model, x, spec, processes=True)
    estimated = list[PlacementSpec]()
    rough = make.rough_estimate
    monkeypatch.setattr(make, "rough_estimate", lambda s: estimated.append(s) or rough(s))
    find_strategy(spec, make)
    assert any(each.space.number > 1 for each in estimated) == is_cut


@captured_once()
def test_where_no_number_of_devices_fits_the_most_that_were_tried_are_named() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()), torch.empty(1, 4096)
    spec = PlacementSpec.model_validate({"devices": _cards(2, "600MiB")})
    with pytest.raises(placer.BudgetError) as caught:
        choose_spec(spec, _planner(model, x, spec, processes=False)[1])
    assert "16 devices like cuda:1" in caught.value.tried[-1].change
    assert not caught.value.tried[-1].fits


@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    replicas=st.integers(1, 4),
    devices=st.integers(1, 4),
)
def test_replicas_get_rows_of_like_devices(counts: list[int], replicas: int, devices: int) -> None:
    kinds = ("a100", "v100", "t4")
    pool = [
        DeviceSpec(name=f"cuda:{10 * i + j}", kind=kinds[i])
        for i, count in enumerate(counts)
        for j in range(count)
    ]
    rows = Pool(pool).rows(replicas, devices)
    if rows is None:
        most = len(pool) if replicas == 1 else sum(count // replicas for count in counts)
        assert most < devices
        return
    assert [len(row) for row in rows] == [devices] * replicas
    assert len({tuple(device.kind for device in row) for row in rows}) == 1
    names = [device.name for row in rows for device in row]
    assert len(set(names)) == len(names)


@captured_once()
def test_no_replica_is_tried_that_gets_no_row() -> None:
    with torch.device("meta"):
        model, x = Blocks(), torch.empty(1, 256)
    plan = placer.auto_plan(model, x, devices=_cards(2))
    assert not any(
        "replica" in name for name in (plan.strategy, *(a.strategy for a in plan.alternatives))
    )


def test_a_loss_over_the_whole_batch_is_planned() -> None:
    """Also one that a spec cannot name; 1F1B, which is faster, is not possible."""
    with torch.device("meta"):
        model, x = Blocks(), torch.empty(4096, 256)
    fields: dict[str, Any] = {"devices": _cards(2), "replicas": 1, "stages": 2, "microbatches": 4}
    loss_fn = lambda output: output.square().mean()  # noqa: E731
    plan = placer.auto_plan(model, x, loss_fn=loss_fn, whole_batch=True, **fields)
    assert plan.loss is not None and plan.loss.whole_batch and plan.schedule == "GPipe"
    with pytest.raises(PlacerError, match="is given without a loss"):
        placer.auto_spec(model, x, whole_batch=True, **fields)


def test_contradictions_are_told() -> None:
    with torch.device("meta"):
        model, x = Blocks(), torch.empty(2, 256)
    for fields, words in (
        ({"replicas": 4}, 'nothing has what is given ."replicas".*2 devices'),
        ({"microbatches": 8}, '"microbatches"'),
        ({"space": 2}, "space|dims|cut"),
    ):
        with pytest.raises(PlacerError, match=words):
            placer.auto_spec(model, x, devices=_cards(2), **fields)


def test_a_batch_whose_rows_depend_on_each_other_is_not_split() -> None:
    with torch.device("meta"):
        model, x = Pairs(), torch.empty(512, 64)
    plan = placer.auto_plan(model, x, devices=_cards(2))
    assert (plan.replicas, plan.microbatches) == (1, 1)
    assert any("it pairs the rows of the batch" in note for note in plan.notes)
    assert placer.make_plan(model, placer.auto_spec(model, x, devices=_cards(2)), x).fits
    assert placer.auto_spec(model, x, devices=_cards(2), offload_overlap=True).devices


def test_the_spec_says_how_marks_in_the_example_split_it() -> None:
    class Added(nn.Linear):
        def forward(self, x: Tensor, state: Tensor, table: Tensor) -> Tensor:
            return super().forward(x + state.T) @ table

    x, state, table = torch.zeros(8, 8), torch.zeros(8, 8), torch.zeros(8, 8)
    marked = (x, placer.Batched(state, dim=1), placer.Whole(table))
    spec = placer.auto_spec(Added(8, 8), marked, devices=_cards(2))
    assert spec.batch_dims == {"state": 1, "table": None}
    # The example alone cannot tell.
    assert placer.make_plan(Added(8, 8), spec, (x, state, table)).batch_dims["state"] == 1


def test_a_given_number_of_replicas_may_leave_one_without_rows() -> None:
    devices = [{"name": f"cpu:{i}", "memory": "1GiB"} for i in range(3)]
    plan = placer.auto_plan(torch.nn.Linear(8, 8), torch.randn(4, 8), devices=devices, replicas=3)
    assert "A batch of 4 rows gives work to only 2 of 3 replicas." in plan.notes


def test_more_micro_batches_are_tried_where_recomputing_alone_does_not_fit() -> None:
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)]
        model, x = nn.Sequential(*layers), torch.empty(8, 32768, 64)
    fields = {"space": 1, "chunks": 1, "offload": []}
    plan = placer.auto_plan(model, (x,), devices=_cards(1, "660MiB"), **fields)
    assert plan.fits
    assert plan.microbatches == 8
    assert plan.checkpoint


def test_more_micro_batches_that_need_no_less_get_no_dry_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The state of two layers is most of what a rank needs, however small its micro-batches are."""
    judged: list[int] = []

    def plan(make: JudgingPlanner, wanted: PlacementSpec) -> Plan:
        judged.append(int(wanted.microbatches))
        return real(make, wanted)

    real = JudgingPlanner.__call__
    monkeypatch.setattr(JudgingPlanner, "__call__", plan)
    with torch.device("meta"):
        layers = [layer for _ in range(4) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
        model, x = nn.Sequential(*layers[:-1]), torch.empty(8192, 2048)
    fields = {"stages": 2, "replicas": 1, "schedule": "1F1B", "checkpoint": [], "offload": []}
    spec = PlacementSpec.model_validate({"devices": _cards(2, "700MiB"), **fields})
    found = find_strategy(spec, _planner(model, x, spec, processes=True)[1])
    assert found.best is None
    assert 0 < max(judged) < 256


def test_what_does_not_fit_in_a_dry_run_gets_more_help() -> None:
    """By their estimates, a rank has room for all state at 700 MB, and for whole gradients at 500 MB."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8)))
        x = torch.empty(64, 2048)
    fields: dict[str, Any] = {"replicas": 2, "processes": True, "context": 0, "reserve": 0}
    chosen = [
        placer.auto_plan(model, x, devices=_cards(2, memory), **fields).shard_state
        for memory in ("1GiB", "700MB", "500MB")
    ]
    assert chosen == ["none", "optimizer", "gradients"]


def test_optimizer_state_is_divided_where_that_is_faster() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8)))
        x = torch.empty(64, 4096)
    fields: dict[str, Any] = {"machine": "dgx-a100", "replicas": 8, "processes": True}
    whole = placer.auto_plan(model, x, **fields, shard_state="none")
    plan = placer.auto_plan(model, x, **fields)
    assert plan.shard_state == "optimizer" and whole.shard_state == "none"
    assert plan.step_seconds is not None and whole.step_seconds is not None
    assert plan.step_seconds < 0.95 * whole.step_seconds


class Residual(nn.Module):
    """A block of two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2048, 2048), nn.Linear(2048, 2048)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(x)))  # type: ignore[no-any-return]


def test_what_is_slower_in_a_dry_run_is_compared_again() -> None:
    """Stages with many micro-batches take longer than their estimate, for which replicas were left out."""
    with torch.device("meta"):
        model, x = nn.Sequential(Residual(), Residual()), torch.empty(8192, 2048)
    plan = placer.auto_plan(model, x, devices=_cards(2, "900MiB"), processes=True)
    assert plan.replicas == 2 and plan.shard_state == "optimizer"
