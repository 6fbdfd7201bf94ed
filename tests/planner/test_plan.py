"""Plans: predictions for known models, and errors for models that cannot be planned."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
import torchvision
from torch import Tensor, nn
from unet3d import unet3d

import placer
from placer import BudgetError, CaptureError, PlacementSpec, SpecError
from placer.plan.summary import summarize_plan
from placer.planner.activation_policy import PolicyChoice
from placer.planner.assemble import _policy_notes
from placer.planner.devices import device_slot
from placer.program import lower
from placer.quantities import parse_bytes
from placer.report import verdict
from placer.search.fewer import as_fast_with_fewer
from placer.simulation.judge import JudgingPlanner

pytestmark = pytest.mark.usefixtures("one_capture")

GIB = 2**30
MODEL, X = models.ConvNet(), torch.randn(8, 1, 8, 8)


def _small(**fields: Any) -> placer.Plan:
    return placer.make_plan(MODEL, {"devices": ["cpu:0", "cpu:1"], **fields}, (X,))


def test_planning_allocates_no_tensor_of_the_model() -> None:
    with torch.device("meta"):
        model, images = torchvision.models.resnet50(), torch.empty(10, 3, 1024, 1024)
    plan = placer.make_plan(model, {"devices": ["cpu"], "optimizer": "sgd"}, images)
    assert plan.stages[0].memory.peak == pytest.approx(16.98 * GIB, rel=0.002)
    assert all(p.is_meta and p.grad is None for p in model.parameters())


def test_micro_batches_that_the_model_cannot_run_on() -> None:
    """BatchNorm in training needs more than one value per channel."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(4, 4)
    spec = {"devices": ["cpu:0"], "microbatches": 4}
    with pytest.raises(CaptureError, match="1: does not run on a micro-batch of 1x4: ValueError"):
        placer.make_plan(model, spec, x)
    device = {"name": "cpu:0", "memory": "1MiB"}
    auto = {"devices": [device], "reserve": 0, "microbatches": "auto"}
    assert placer.make_plan(model, auto, x).microbatches <= 2
    with pytest.raises(BudgetError) as caught:  # four micro-batches were no remedy
        placer.compile(model, {"devices": [{**device, "memory": 600}], "reserve": 0}, x)
    assert caught.value.tried


class AroundLayers(nn.Module):
    """It scales, adds and takes a softmax in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x * self.scale)
        return torch.log_softmax(self.last(y) + y, -1)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("layers", [{"**": "cuda:0"}, {"first": "cuda:0", "last": "cuda:0"}])
def test_all_layers_on_one_device_leave_nothing_for_another(layers: dict[str, str]) -> None:
    x = torch.randn(4, 8)
    spec = {"devices": ["cuda:0", "cuda:1"], "layers": layers}
    plan = placer.make_plan(AroundLayers(), spec, x)
    (stage,) = plan.stages
    assert stage.devices == ("cuda:0",) and "Nothing runs on cuda:1." in plan.notes
    both = placer.make_plan(AroundLayers(), {**spec, "layers": {**layers, "last": "cuda:1"}}, x)
    assert [stage.devices for stage in both.stages] == [("cuda:0",), ("cuda:1",)]


class Routed(nn.Module):
    """Rows go to the expert that they choose, so shapes depend on values and the module stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, result = self.gate(x).argmax(-1), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = torch.where(chosen == i)[0]
            result = result.index_add(0, rows, expert(x[rows]))
        return result


def _routed(layers: dict[str, str], **fields: Any) -> placer.Plan:
    model = nn.Sequential(nn.Linear(4, 4), Routed(), nn.TransformerEncoderLayer(4, 1, 4))
    spec = {"devices": ["cpu:0", "cpu:1"], "layers": layers, **fields}
    return placer.make_plan(model, spec, torch.randn(8, 4))


@pytest.mark.parametrize(
    ("layers", "whole"),
    [({"1.experts.0": "cpu:1", "2": "cpu:0"}, "1"), ({"2.**.out_proj": "cpu:1"}, "2.self_attn")],
)
def test_a_whole_module_goes_where_a_layer_inside_is_placed(
    layers: dict[str, str], whole: str
) -> None:
    stages = _routed(layers).stages
    assert [stage.devices for stage in stages if whole in stage.layers] == [("cpu:1",)]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"layers": {"1.*.0": "cpu:0", "1.*.1": "cpu:1"}},
            "/layers/1.*.1: places 1.experts.1 on 'cpu:1', but 1 stays whole on one device (",
        ),
        (
            {"layers": {"2": "cpu:0", "2.**.out_proj": "cpu:1"}},
            "/layers/2.**.out_proj: places 2.self_attn.out_proj on 'cpu:1', but 2.self_attn stays "
            "whole on one device (it is one operation of torch.nn), and 2.self_attn is on 'cpu:0'",
        ),
        (
            {"layers": {}, "checkpoint": ["**.experts"]},
            "/checkpoint/0: '**.experts' is inside 1, which",
        ),
    ],
)
def test_a_whole_module_cannot_be_placed_in_parts(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as error:
        _routed(**fields)
    assert said in str(error.value)


def test_unknown_layers_are_one_error_that_names_the_nearest() -> None:
    with pytest.raises(SpecError) as error:
        _small(layers={"cnov1": "cpu:0", "fcc": "cpu:1"})
    assert "'conv1'" in str(error.value) and "/layers/fcc" in str(error.value)


def test_a_plan_over_budget_does_not_fit_and_compile_refuses_it() -> None:
    spec = PlacementSpec(devices=[{"name": "cpu:0", "memory": "20 kB"}], optimizer="adam")  # type: ignore[arg-type]
    model, x = models.ConvNet(), torch.randn(8, 1, 8, 8)
    plan = placer.make_plan(model, spec, (x,))
    assert not plan.fits
    with pytest.raises(BudgetError) as error:
        placer.compile(model, spec, (x,))
    (device,) = plan.devices
    assert error.value.device == "cpu:0"
    assert error.value.missing_bytes == device.peak + device.reserve - 20_000 > 0


def test_the_reserve_counts() -> None:
    (needed,) = _small(devices=["cpu:0"]).devices
    exactly = [{"name": "cpu:0", "memory": needed.peak}]
    assert _small(devices=exactly).fits
    tight = _small(devices=exactly, reserve=1)
    assert not tight.fits
    assert tight.devices[0].headroom == -1


def test_auto_uses_as_few_devices_as_it_needs() -> None:
    blocks = (layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh()))
    model, x = nn.Sequential(*blocks), torch.randn(256, 64)

    def least(count: int) -> int:
        spec = {"devices": [f"cpu:{i}" for i in range(count)], "objective": "memory"}
        return max(d.peak for d in placer.make_plan(model, spec, (x,)).devices)

    whole = least(1)
    options: dict[str, Any] = {"objective": "devices", "microbatches": 1, "checkpoint": []}
    options["replicas"] = 1
    for budget, expected in ((whole, 1), (least(2), 2), (least(2) - 1, 3)):
        devices = [{"name": f"cpu:{i}", "memory": budget} for i in range(4)]
        spec = placer.auto_spec(
            model,
            (x,),
            devices=devices,
            objective="devices",
            microbatches=1,
            checkpoint=[],
            replicas=1,
        )
        assert len(spec.devices) == expected
        assert placer.make_plan(model, spec, (x,)).fits
    with pytest.raises(BudgetError) as error:
        placer.auto_spec(model, (x,), devices=[{"name": "cpu:0", "memory": 1000}], **options)
    assert error.value.missing_bytes == whole - 1000


def test_budget_comes_from_the_named_kind() -> None:
    (device,) = _small(devices=[{"name": "cuda:0", "kind": "H100"}]).devices
    found = int(79.1 * GIB)  # of the 80 GiB in its name
    assert device.budget == found
    assert device.reserve == int(0.02 * found)
    assert device.context == parse_bytes("520MiB")
    more = [{"name": "cuda:0", "kind": "h100", "memory": "80GiB"}]
    told = '"memory" of cuda:0 is 80.00 GiB, but the kind h100 has 79.10 GiB.'
    assert [any(told in n for n in _small(devices=d).notes) for d in (["cuda:0"], more)] == [0, 1]
    with pytest.raises(SpecError, match="did you mean 'h100'"):
        _small(devices=[{"name": "cuda:0", "kind": "h10"}])


@pytest.mark.parametrize("kinds", [("cuda:0", "cpu"), ("cpu:0", "a100")])
def test_a_kind_of_another_type_of_device_is_refused(kinds: tuple[str, str]) -> None:
    """A CPU's kind has neither context nor reserve: plans for a GPU would seem to fit."""
    name, kind = kinds
    with pytest.raises(SpecError) as error:
        _small(devices=[{"name": name, "memory": "2GiB", "kind": kind}])
    ((where, problem, remedy),) = error.value.problems
    assert where == "/devices/0/kind"
    assert kind in problem and name in problem and f"calibrate --device {name}" in remedy
    spec = {"devices": [{"name": name, "kind": kind}], "layers": {"nothere": name}}
    with pytest.raises(SpecError) as error:  # together with what the model has not
        placer.make_plan(models.ConvNet(), spec, X)
    assert [where for where, *_ in error.value.problems] == ["/devices/0/kind", "/layers/nothere"]


def test_what_a_choice_of_recomputed_layers_adds_is_noted() -> None:
    nothing: Any = None
    light = PolicyChoice(options=nothing, costs=nothing, partition=nothing, extra_seconds=0.02)
    (note,) = _policy_notes(PlacementSpec(devices=["cpu"], checkpoint="auto"), light)
    assert note == "checkpoint 'auto' adds 20.00 ms per micro-batch, all stages together."


def test_a_plan_that_recomputes_splits_no_backwards() -> None:
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), torch.empty(8, 8)
    spec = {"devices": ["cpu:0", "cpu:1"], "microbatches": 4, "schedule": "InterleavedZeroBubble"}
    whole = placer.make_plan(model, {**spec, "checkpoint": ["**"]}, (x,), processes=True)
    assert whole.schedule == "1F1B"
    assert any(
        "both halves of a split backward would run what is recomputed" in n for n in whole.notes
    )
    # "auto" recomputes nothing where everything fits
    split = placer.make_plan(model, {**spec, "checkpoint": "auto"}, (x,), processes=True)
    assert split.schedule == "InterleavedZeroBubble"


UNKNOWN = {"devices": [{"name": "cuda:6", "memory": "1GiB"}, "cuda:7"]}


@pytest.mark.parametrize("field", ["microbatches", "checkpoint", "offload"])
def test_what_memory_decides_needs_the_memory_of_every_device(field: str) -> None:
    with pytest.raises(SpecError) as error:
        _small(**UNKNOWN, **{field: "auto"})
    ((where, problem, remedy),) = error.value.problems
    assert where == "/devices/1"
    assert "the memory of cuda:7 is not known" in problem and f'"{field}": "auto"' in problem
    assert '"memory": "16GiB"' in remedy and "p100 (15.89 GiB)" in remedy and "h200" in remedy


def test_auto_takes_one_more_device_rather_than_starve_kernels() -> None:
    """On one device of 620 MiB the model fits, but kernels find no room for their workspaces."""
    with torch.device("meta"):
        model, x = unet3d(width=4), torch.empty(1, 1, 64, 64, 64)
    devices = [{"name": f"cuda:{i}", "memory": "620MiB"} for i in range(2)]
    options = {"objective": "devices", "space": 1, "checkpoint": []}
    alone = placer.auto_plan(model, (x,), devices=devices[:1], **options)
    assert alone.fits and alone.starved
    both = placer.auto_plan(model, (x,), devices=devices, **options)
    assert both.fits and not both.starved and both.num_devices == 2


def test_automatic_specs_need_it_too_and_cpus_share_the_machines() -> None:
    model, x = models.ConvNet(), torch.randn(8, 1, 8, 8)
    with pytest.raises(SpecError, match="which strategies fit"):
        placer.auto_spec(model, (x,), devices=UNKNOWN["devices"], objective="devices")
    first, second = placer.auto_spec(
        model, (x,), devices=["cpu:0", "cpu:1"], layers={"fc2": "cpu:1"}
    ).devices
    assert first.memory == second.memory and first.memory is not None


def test_a_plan_of_given_stages_needs_no_memory_and_says_that_its_fit_is_unknown() -> None:
    plan = _small(**UNKNOWN, layers={"conv1": "cuda:6", "fc*": "cuda:7"})
    assert verdict(plan)[-1] == "unknown whether it fits on cuda:7: give its memory"
    assert [device.budget for device in plan.devices] == [GIB, None]
    some = [{"name": "cuda:6", "memory": "1GiB"}, "cuda:7", "cuda:8", "cuda:9", "cuda:10"]
    plan = _small(devices=some, stages=5)
    assert verdict(plan)[-1].startswith("unknown whether it fits on cuda:7 … cuda:10 (4 devices): ")
    with pytest.raises(
        placer.SpecError, match=r'cuda:7 .* and "objective": "memory" depends on it'
    ):
        _small(**UNKNOWN, objective="memory")
    least = _small(devices=["cuda:7"], objective="memory", checkpoint="auto")
    assert least.devices[0].budget is None  # down to the least peak: no budget decides


class _Shared(nn.Module):
    """``last`` is ``first`` under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.middle = nn.Linear(4, 4)
        self.last = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.middle(self.first(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("layers", "device", "note"),
    [
        ({"last": "cpu:1", "middle": "cpu:0"}, "cpu:1", None),
        (
            {"first": "cpu:0", "middle": "cpu:1", "last": "cpu:1"},
            "cpu:0",
            "first and last are one module: it is on cpu:0, not on cpu:1.",
        ),
    ],
    ids=["second name", "both names"],
)
def test_a_module_of_two_names(layers: dict[str, str], device: str, note: str | None) -> None:
    spec = {"devices": ["cpu:0", "cpu:1"], "layers": layers}
    plan = placer.make_plan(_Shared(), spec, torch.ones(2, 4))
    where = {n: stage.devices[0] for stage in plan.stages for n in stage.nodes}
    shared = {where[node] for node, layer in plan.node_layers.items() if layer.startswith("first")}
    assert shared == {device}
    assert [n for n in plan.notes if "one module" in n] == ([note] if note else [])


class _Residual(nn.Module):
    """Adds between its layers, and rectifies the sum in place, as torch.fx writes a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv1d(2, 2, 3, padding=1), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.conv(x) + x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("layers", "moved"),
    [
        ({"0": "cpu:0", "1": "cpu:1", "1.relu": "cpu:0"}, "Operations of 1 are on cpu:0"),
        ({"0": "cpu:0", "0.conv": "cpu:1", "0.relu": "cpu:1"}, "Operations of 0 are on cpu:1"),
        ({"2": "cpu:0", "3.inside": "cpu:1"}, "Operations of 3.inside are on cpu:0"),
        ({"0": "cpu:0", "1": "cpu:1"}, ""),
    ],
)
def test_what_is_written_in_place_stays_together_and_is_noted(
    layers: dict[str, str], moved: str
) -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inside(x)  # type: ignore[no-any-return]

    model = nn.Sequential(_Residual(), _Residual(), nn.Conv1d(2, 2, 3), Inside())
    plan = placer.make_plan(
        model, {"devices": ["cpu:0", "cpu:1"], "layers": layers}, torch.ones(2, 2, 8)
    )
    said = [note for note in plan.notes if "writes the same memory" in note]
    assert [note.partition(",")[0] for note in said] == [moved] * bool(moved)


def test_a_boundary_says_why_it_is_nowhere_else() -> None:
    devices = [{"name": f"cuda:{i}", "kind": "t4"} for i in range(2)]
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    for last, said in (("cuda:0", "no other place was looked for"), ("cuda:1", "the layers of")):
        layers = {"0": "cuda:0", "1": "cuda:1", "2": last}
        plan = placer.make_plan(model, {"devices": devices, "layers": layers}, torch.ones(8, 64))
        loads = [boundary.load_before for boundary in plan.boundaries]
        seconds = [(s.forward_seconds or 0) + (s.backward_seconds or 0) for s in plan.stages]
        assert said in plan.explain()
        assert loads[0] == pytest.approx(seconds[0], rel=0.5)
        assert "all stages of" not in plan.explain()  # seconds are each stage's own


@pytest.mark.parametrize(("fields", "told"), [({}, False), ({"replicas": 2}, True)])
def test_what_a_cut_of_the_batch_means_is_noted(fields: dict[str, Any], told: bool) -> None:
    spec = {"devices": ["cpu:0"], "replica_devices": [], **fields}
    notes = placer.make_plan(nn.GRU(4, 4, batch_first=True), spec, torch.ones(6, 2, 4)).notes
    assert any("split along dim 0 of input." in note for note in notes) is told


def test_a_batch_of_fewer_rows_than_cuts_is_noted() -> None:
    spec = {"devices": ["cpu:0"], "replicas": 3, "microbatches": 2}
    notes = placer.make_plan(nn.Linear(4, 4), spec, torch.ones(2, 4)).notes
    assert "A batch of 2 rows gives work to only 2 of 3 replicas." in notes
    assert "A replica's 1 row can fill only 1 micro-batch, not 2." in notes


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("kind", "count", "rows", "share"),
    [("cpu", 3, 8, 0.393), ("cuda", 3, 2, 0.8), ("cuda", 2, 2, 0.8)],
)
def test_a_verdict_does_not_depend_on_the_objective(
    kind: str, count: int, rows: int, share: float
) -> None:
    """The fastest plan fills devices to where estimates are too rough, or to where several stages help."""
    edge, fields = (16, {"depth": 3, "width": 4}) if kind == "cpu" else (64, {"width": 16})
    with torch.device("meta"):
        model, x = unet3d(**fields), torch.empty(rows, 1, edge, edge, edge)
    make = JudgingPlanner(lower(model, (x,)), [x])

    def plan(memory: int, devices: int, objective: str) -> placer.Plan:
        names = [{"name": f"{kind}:{i}", "memory": memory} for i in range(devices)]
        fields = {"optimizer": "sgd", "reserve": 0} if kind == "cpu" else {}
        return make(placer.load_spec({"devices": names, "objective": objective, **fields}))

    whole = plan(80 * GIB, 1, "memory").devices[0].needed
    found = {o: plan(int(share * whole), count, o) for o in ("memory", "throughput", "bottleneck")}
    verdicts = {o: (p.fits, p.starved, p.objective == o) for o, p in found.items()}
    assert verdicts["memory"] == (True, 0, True)
    assert set(verdicts.values()) == {(True, 0, True)}


def _cards(count: int, memory: str = "16 G", **fields: object) -> list[dict[str, object]]:
    return [
        {"name": f"cuda:{i}", "memory": memory, "kind": "rtx4080", **fields} for i in range(count)
    ]


def test_fewer_devices_that_are_faster_are_told_and_taken_by_auto() -> None:
    """With one micro-batch, another device only adds transfers; with eight, it shares the work."""
    with torch.device("meta"):
        model, x = unet3d(width=8, depth=2), torch.empty(8, 1, 64, 64, 64)
    program = lower(model, (x,))
    make = JudgingPlanner(program, [x])

    def told(**fields: object) -> str:
        spec = PlacementSpec.model_validate({"devices": _cards(3), **fields})
        return as_fast_with_fewer(spec, make(spec), make)

    def taken(**fields: object) -> int:
        options = {"replicas": 1, "space": 1, **fields}
        return len(placer.auto_spec(model, (x,), devices=_cards(3), **options).devices)

    assert re.fullmatch(
        r"Fewer devices would be faster: with cuda:0 alone, a step would take \d+\.\d\d ms instead "
        r"of \d+\.\d\d ms\.",
        told(),
    )
    assert taken(microbatches=1) == 1
    assert told(microbatches=8) == "" and taken(microbatches=8) == 3
    assert told(objective="memory") == ""
    assert told(layers={"head": "cuda:2"}) == ""  # all are in the spec's layers
    unknown = PlacementSpec.model_validate({"devices": _cards(3, kind=None)})
    assert as_fast_with_fewer(unknown, make(unknown), make) == (
        "Fewer devices would be faster by reference rates: with cuda:0 alone, a step would take less time."
    )


def test_the_number_of_micro_batches_is_the_fastest_that_fits() -> None:
    with torch.device("meta"):
        model, x = models.Blocks(), torch.empty(4096, 256)
    make = JudgingPlanner(lower(model, (x,)), [x])

    def plan(microbatches: object) -> placer.Plan:
        fields = {"devices": _cards(2), "schedule": "1F1B", "microbatches": microbatches}
        return make(PlacementSpec.model_validate(fields))

    times = {count: plan(count).rank_time for count in (1, 4, 16)}
    found = plan("auto")
    assert found.rank_time <= min(times.values()) < 0.8 * max(times.values())
    assert found.rank_time == plan(found.microbatches).rank_time


def test_no_stage_in_space_only_cuts_the_input_or_gathers_the_result() -> None:
    """A stage of the cut alone would be the cheapest: the stages wait for each other."""
    with torch.device("meta"):
        model, x = unet3d(width=8, depth=2), torch.empty(1, 1, 64, 64, 64)
    spec = PlacementSpec.model_validate({"devices": _cards(4), "space": 2})
    make = JudgingPlanner(lower(model, (x,)), [x])
    plan = make(spec)
    first, last = plan.stages
    assert "encoder_0_0" in first.nodes and "head" in last.nodes
    assert "Each of the 2 shards of a stage has a part of every value, and sends" in plan.explain()
    twice = make(spec.with_devices(spec.devices[:2]).model_copy(update={"replicas": 2}))
    assert any(
        "1 more replica on cuda:2, cuda:3, planned with the kind" in note for note in twice.notes
    )
    assert "with cuda:0, cuda:1 alone, a step would take" in as_fast_with_fewer(spec, plan, make)


def test_gpus_of_this_machine_give_budgets_if_all_that_are_named_are_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = SimpleNamespace(total_memory=24 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)

    def budgets(*names: str) -> list[int | None]:
        spec = PlacementSpec.model_validate({"devices": list(names)})
        return [device_slot(device, spec).budget for device in spec.devices]

    assert budgets("cuda:0") == [24 * 2**30]
    assert budgets("cuda:0", "cuda:1") == [None, None]


@pytest.mark.parametrize("stages", [1, 2])
def test_a_spec_with_a_number_of_stages_uses_so_many_devices(stages: int) -> None:
    plan = _small(devices=[f"cpu:{i}" for i in range(4)], stages=stages)
    assert len(plan.stages) == stages


def _layers(count: int, width: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("processes", [False, True])
def test_the_schedule_is_the_best_one(processes: bool) -> None:
    """Backwards can be split with a process per device only; there it leaves shorter bubbles."""
    fields = {"devices": _cards(4), "microbatches": 4, "schedule": "auto"}
    model, x = _layers(8, 512), torch.randn(4096, 512)
    plans = {
        name: placer.make_plan(model, {**fields, "schedule": name}, x, processes=processes)
        for name in ("auto", "1F1B", "InterleavedZeroBubble")
    }
    best = "InterleavedZeroBubble" if processes else "1F1B"
    assert plans["auto"].schedule == best
    assert plans["auto"].step_seconds == min(plan.step_seconds or 0 for plan in plans.values())
    forward = placer.make_plan(model, {**fields, "training": False}, x, processes=processes)
    assert forward.schedule == "GPipe"


def test_state_is_divided_if_the_model_does_not_fit_otherwise() -> None:
    model, x = _layers(8, 2048), torch.randn(64, 2048)
    fields = {"replicas": 2, "shard_state": "auto"}

    def chosen(memory: str, *, processes: bool) -> tuple[str, bool]:
        spec = {"devices": _cards(1, memory), "context": 0, "reserve": 0, **fields}
        plan = placer.make_plan(model, spec, x, processes=processes)
        return plan.shard_state, plan.fits

    assert chosen("1 G", processes=True) == ("none", True)
    assert chosen("600 MB", processes=True) == ("optimizer", True)
    assert chosen("500 MB", processes=True) == ("gradients", True)
    assert chosen("300 MB", processes=False) == ("none", False)


def test_a_device_without_room_is_named() -> None:
    devices = [{"name": f"cuda:{i}", "memory": size} for i, size in enumerate(("8GiB", "100MiB"))]
    plan = placer.make_plan(nn.Linear(4, 4), {"devices": devices}, torch.ones(2, 4))
    found = [note for note in plan.notes if "no room for tensors" in note]
    assert found == [
        "cuda:1 has no room for tensors: its context and what is kept free take 522.00 MiB, and its "
        "memory is 100.00 MiB."
    ]


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    "fields", [{"microbatches": 4}, {"microbatches": "auto", "replicas": 2}], ids=["4", "auto"]
)
def test_a_step_of_more_rows_than_the_example_is_planned_as_from_an_example_of_them(
    fields: dict[str, Any],
) -> None:
    with torch.device("meta"):
        model, few, many = models.ConvNet(), torch.empty(2, 1, 8, 8), torch.empty(16, 1, 8, 8)
    spec = {"devices": ["cpu:0", "cpu:1"], **fields}
    planned = placer.make_plan(model, {**spec, "batch": 16}, few)
    assert planned.batch == 16
    assert dataclasses.replace(planned, batch=None) == placer.make_plan(model, spec, many)
    report = placer.simulate(model, planned, few)
    assert report.devices == placer.simulate(model, planned, many).devices


def test_a_step_of_other_rows_is_refused_where_the_example_has_none() -> None:
    with pytest.raises(SpecError, match=r"/batch: a step of 4 rows cannot be planned") as caught:
        placer.make_plan(OneRow(), {"devices": ["cpu"], "batch": 4}, torch.randn(8))
    assert "give an example of that size" in str(caught.value)


class OneRow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(2, 4).sum(1)


def test_state_is_divided_between_the_replicas_of_a_node_where_that_is_faster() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(4096, 4096), torch.empty(64, 4096)
    spec = {"machine": "cloud-a100:2", "stages": 1, "replicas": 16, "shard_state": "optimizer"}
    over = {
        count: placer.make_plan(model, {**spec, "shard_over": count}, x, processes=True)
        for count in ("auto", 8, 16)
    }
    assert over["auto"] == over[8]
    assert over[8].step_seconds < over[16].step_seconds
    assert over[8].stages[0].memory.optimizer == 2 * over[16].stages[0].memory.optimizer


@pytest.mark.parametrize("replicas", [4, 12])
def test_no_group_that_divides_state_is_over_two_nodes(replicas: int) -> None:
    """Four replicas are in one node of eight; of twelve, four are in every group."""
    with torch.device("meta"):
        model, x = nn.Linear(4096, 4096), torch.empty(48, 4096)
    spec = {
        "machine": "cloud-a100:2",
        "stages": 1,
        "replicas": replicas,
        "shard_state": "optimizer",
    }
    assert placer.make_plan(model, spec, x, processes=True).state_layout.optimizer == 4


def test_the_order_of_ranks_is_said_where_there_are_ranks() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 4)
    spec = {"devices": ["cpu:0", "cpu:1"], "replicas": 2, "node_layout": "replicas"}
    said = [
        "next to each other" in summarize_plan(placer.make_plan(model, spec, x, processes=p))
        for p in (True, False)
    ]
    assert said == [True, False]
