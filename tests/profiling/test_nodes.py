"""Seconds of nodes, by a clock that runs as the operations say: nothing here depends on the machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import placer
from placer.cost import estimate_costs
from placer.errors import PlacerError, SpecError
from placer.machine.catalogue import CATALOGUE
from placer.machine.kindfile import find_kind, kind_to_json, save_kind
from placer.profiling import NodeTimes, measure_nodes, profile_model
from placer.profiling.clocks import HostClock
from placer.profiling.profile import with_measured_memory
from placer.program import Program, flatten_call, lower
from placer.program.objects.python_random import keep_random

GIB = 2**30
SECONDS = {"addmm": 5.0, "mm": 7.0, "relu": 2.0, "threshold_backward": 3.0, "_foreach_add_": 0.0}


class Passing(TorchDispatchMode):
    """Time passes only in operations, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.now += SECONDS.get(func._schema.name.partition("::")[2], 0.0)
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


@pytest.fixture
def passing() -> Iterator[Passing]:
    with Passing() as mode:
        yield mode


def _captured(model: nn.Module, x: Tensor) -> tuple[Program, list[Tensor]]:
    program = lower(model, (x,))
    return program, flatten_call(program.call, (x,), {})


def _measured(model: nn.Module, x: Tensor, passing: Passing) -> NodeTimes:
    program, leaves = _captured(model, x)
    return measure_nodes(
        program, model, leaves,
        device=torch.device("cpu"), clock=HostClock(lambda: passing.now), rounds=3, warm=1,
    )  # fmt: skip


def test_every_node_has_its_own_time(passing: Passing) -> None:
    times = _measured(Net(), torch.randn(16, 8), passing)
    assert times.forward == {"first": 5.0, "relu": 2.0, "second": 5.0, "loss": 0.0}
    # The input needs no gradient, so that the first layer has one product in backward.
    assert times.backward == {"first": 7.0, "relu": 3.0, "second": 14.0, "loss": 0.0}
    assert times.step == 12 + 24


def test_the_model_is_left_alone(passing: Passing) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(8, 4)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    program, leaves = _captured(model, x)
    profile_model(program, model, leaves, base=CATALOGUE["cpu"], rounds=1)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.fixture
def saved(passing: Passing, tmp_path: Path) -> str:
    """The file of a profile of `Net` for 16 rows."""
    model = Net()
    program, leaves = _captured(model, torch.randn(16, 8))
    found = profile_model(
        program, model, leaves,
        base=CATALOGUE["cpu"], clock=HostClock(lambda: passing.now), rounds=1,
    )  # fmt: skip
    path = tmp_path / "profile.json"
    values = kind_to_json(
        found.kind, device="a CPU", device_type="cpu", torch="2", measured="today"
    )
    save_kind(values, path)
    return str(path)


def _spec(kind: str, **fields: Any) -> dict[str, Any]:
    return {"devices": [{"name": "cpu", "kind": kind}], "optimizer": "sgd", **fields}


def test_a_plan_takes_as_long_as_was_measured(saved: str) -> None:
    plan = placer.make_plan(Net(), _spec(saved), (torch.randn(16, 8),))
    assert plan.stages[0].forward_seconds == pytest.approx(12)
    assert plan.stages[0].backward_seconds == pytest.approx(24)
    assert plan.step_seconds == pytest.approx(36, rel=1e-3)
    assert find_kind(saved) is find_kind(saved)  # read once


def test_other_batches_take_as_much_longer_as_their_estimates(saved: str) -> None:
    whole, twice = (
        placer.make_plan(Net(), _spec(saved), (torch.randn(rows, 8),)).step_seconds
        for rows in (16, 32)
    )
    assert 1.5 * whole < twice < 2 * whole  # weights are read once
    kind, x = find_kind(saved), torch.randn(16, 8)
    program, leaves = _captured(Net(), x)
    costs = estimate_costs(program, leaves, kernels="cpu")
    measured = costs.work.seconds(kind).forward.device
    estimated = costs.work.seconds(replace(kind, profile=None)).forward.device
    assert measured[:3] == pytest.approx([5, 2, 5])
    assert (estimated[:3] < 1e-3).all()


def test_stages_are_cut_where_it_was_measured(saved: str) -> None:
    devices = [{"name": f"cpu:{i}", "kind": saved} for i in range(2)]
    spec = {"devices": devices, "optimizer": "sgd", "microbatches": 4}
    plan = placer.make_plan(Net(), spec, (torch.randn(64, 8),))
    # first 5 + 7, relu 2 + 3, second 5 + 14: the relu goes with the first.
    assert [stage.nodes for stage in plan.stages] == [("first", "relu"), ("second",)]


class Noisy(nn.Module):
    """Makes a tensor on the device of its input, as stochastic depth does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.empty(x.size(0), 1, device=x.device).bernoulli_(0.5)
        return self.layer(x) * kept


def test_tensors_that_forward_makes_are_made_on_the_profiled_device() -> None:
    """The meta device stands for a GPU: it refuses tensors of the CPU too."""
    program, (x,) = _captured(Noisy(), torch.randn(8, 4))
    device = torch.device("meta")
    times = measure_nodes(
        program, Noisy().to(device), [x.to(device)], device=device, clock=HostClock(), rounds=1
    )
    assert len(times.forward) > 2


def test_a_gpus_profile_has_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a --kind the rates are an A100's; the memory must not be."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: (20 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda place: 3 * GIB)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda place: SimpleNamespace(total_memory=24 * GIB)
    )
    found = with_measured_memory(CATALOGUE["a100"], torch.device("cuda:0"))
    assert (found.memory, found.context) == (24 * GIB, GIB)
    assert with_measured_memory(CATALOGUE["cpu"], torch.device("cpu")) is CATALOGUE["cpu"]


def test_profiling_draws_no_random_numbers_of_the_caller() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 4))
    torch.manual_seed(0)
    wanted = torch.rand(())
    torch.manual_seed(0)
    placer.profile(model, torch.ones(16, 8), device="cpu", rounds=1)
    assert torch.equal(torch.rand(()), wanted)


def test_the_generator_of_the_gpu_is_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {"cuda:0": 3, "cuda:1": 5}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[str(device)])
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, device: states.update({str(device): state})
    )
    with keep_random(torch.device("cuda:0"), torch.device("cpu")):
        states.update({"cuda:0": 4, "cuda:1": 6})
    assert states == {"cuda:0": 3, "cuda:1": 6}


def test_a_file_of_a_cpu_has_only_what_older_versions_read(saved: str) -> None:
    profile = json.loads(Path(saved).read_text())["profile"]
    assert set(profile) == {"fingerprint", "precision", "inputs", "forward", "backward"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"kind": "h1000"}, "--kind: .*did you mean 'h100'?"), ({"rounds": 0}, "at least one")],
)
def test_what_cannot_be_profiled_is_told(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(PlacerError, match=message):
        placer.profile(Net(), torch.randn(16, 8), device="cpu", **wrong)


def test_a_profile_of_another_model_or_precision_is_refused(saved: str) -> None:
    with pytest.raises(SpecError, match=r"/devices/0/kind: .* is the profile of another model"):
        placer.make_plan(nn.Linear(8, 8), _spec(saved), (torch.randn(16, 8),))
    with pytest.raises(SpecError, match="was measured in fp32, not bf16"):
        placer.make_plan(Net(), _spec(saved, precision="bf16"), (torch.randn(16, 8),))


def test_from_python(tmp_path: Path) -> None:
    path, model, x = tmp_path / "net.json", Net(), torch.randn(16, 8)
    found = placer.profile(model, x, output=path, device="cpu", rounds=1)
    plan = placer.make_plan(model, _spec(str(path), optimizer="adam"), (x,))
    assert plan.step_seconds == pytest.approx(found.times.step, rel=0.01)
    nodes = sum(found.times.forward.values()) + sum(found.times.backward.values())
    assert nodes + found.times.optimizer == pytest.approx(found.times.step)
    with pytest.raises(PlacerError, match=r"does not end in \.json"):
        placer.profile(model, x, output=tmp_path / "net")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: data.pop("rates"), "rates is missing"),
        (lambda data: data["rates"]["copy"].pop("half"), "/rates/copy/half is missing"),
        (lambda data: data["rates"]["copy"]["half"].update(flops=-1), "/rates/copy/half/flops: "),
        (lambda data: data["rates"].update(convolutoin={}), "did you mean 'convolution'"),
        (lambda data: data["profile"]["forward"].update(first=[1]), "/profile/forward/first"),
        (lambda data: data["profile"].update(precision="fp99"), "/profile/precision"),
        (lambda data: data.pop("placer_kind"), "is not a device kind file"),
    ],
)
def test_a_damaged_file_says_where(saved: str, change: Any, problem: str) -> None:
    data = json.loads(Path(saved).read_text())
    change(data)
    Path(saved).write_text(json.dumps(data))
    with pytest.raises(PlacerError) as raised:
        find_kind(saved)
    assert problem in str(raised.value)
    assert saved in str(raised.value)


def test_a_missing_file_has_its_neighbour_named(saved: str) -> None:
    with pytest.raises(PlacerError, match=r"did you mean '.*profile\.json'"):
        find_kind(saved.replace("profile", "profil"))
