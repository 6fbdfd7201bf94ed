"""The law with ``"compile": true``, under a backend that runs torch's own kernels, and once with inductor."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import models
import numpy as np
import pytest
import torch
from oracle import assert_close, assert_same
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from unet3d import unet3d

import placer
from placer.executor.stages import compiled
from placer.program import lower
from placer.search.candidates import list_strategies
from placer.search.strategy import Strategy

D = torch.float64
# Dynamo hides this warning while it looks at inputs, but not from a filter that makes it an error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

TWO = {"devices": ["cpu:0", "cpu:1"], "compile": True}


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Counts what is compiled, by a backend that takes no seconds."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compiled, "_OPTIONS", {"backend": counter})
    return counter


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], list[str]]] = {
    "dropout": (models.ConvNet, lambda: torch.randn(9, 1, 8, 8, dtype=D), ["conv*"]),
    "tied": (models.TiedTransformer, lambda: torch.randint(0, 17, (7, 6)), ["**"]),
    "in place": (models.InPlace, lambda: torch.randn(8, 2, 5, 5, dtype=D), ["bn", "relu"]),
    "recurrent": (models.Recurrent, lambda: torch.randn(7, 4, 3, dtype=D), ["rnn"]),
    "3D U-Net": (
        lambda: unet3d(width=2, depth=2, norm="group"),
        lambda: torch.randn(5, 1, 8, 8, 8, dtype=D),
        ["encoder.*"],
    ),
}
FIELDS: list[dict[str, Any]] = [
    {"microbatches": 3, "schedule": "1F1B"},
    {"replicas": 2},
    {"checkpoint": True},
    {"offload": True},
    {"checkpoint": True, "offload": True, "microbatches": 2},
]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: " ".join(fields))
@pytest.mark.parametrize("name", CASES)
def test_compiled_stages_equal_the_plain_model(
    compilations: CompileCounterWithBackend, name: str, fields: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    build, inputs, patterns = CASES[name]
    given = {k: patterns if v is True else v for k, v in fields.items()}
    assert_same(build().double(), placer.PlacementSpec(**TWO, **given), (inputs(),))
    assert compilations.frame_count


@pytest.mark.matrix(0)
def test_inductor_draws_the_same_random_numbers() -> None:
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    assert_same(nn.Sequential(*layers).double(), TWO, (torch.randn(6, 6, dtype=D),))


class DrawsByNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * torch.from_numpy(np.random.randn(3))


def test_numpy_draws_its_own_random_numbers(compilations: CompileCounterWithBackend) -> None:
    model, x = DrawsByNumpy().double(), torch.randn(2, 3, dtype=D)
    placed = placer.compile(model, {"devices": ["cpu:0"], "compile": True}, x)
    np.random.seed(0)
    found = placed(x)
    np.random.seed(0)
    assert_close(found, model(x), "output")


class Counts(nn.Module):
    """Its results depend on a buffer that it writes, or, without ``read``, on the batch only."""

    def __init__(self, *, read: bool, moving: bool) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.read, self.moving = read, moving
        self.register_buffer("state", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.linear(x)))
        if self.moving:
            with torch.no_grad():
                self.state.mul_(0.9).add_(x.abs().mean(0), alpha=0.1)
        else:
            self.state += 1
        return x / (self.state + 1) if self.read else x


@pytest.mark.matrix(2)
@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("moving", [True, False])
def test_gradients_see_the_buffers_that_forward_saw(
    compilations: CompileCounterWithBackend, moving: bool, read: bool
) -> None:
    """What torch compiles sees them as they are after forward; so only what cannot read them is compiled."""
    torch.manual_seed(0)
    model = Counts(read=read, moving=moving).double()
    assert_same(model, {"devices": ["cpu"], "compile": True}, (torch.randn(6, 4, dtype=D),))
    assert bool(compilations.frame_count) != read


def test_a_size_is_compiled_once(compilations: CompileCounterWithBackend) -> None:
    model, x = models.ConvNet(0.0).double(), torch.randn(8, 1, 8, 8, dtype=D)
    placed = placer.compile(model, {**TWO, "replicas": 2}, x)
    counts = []
    for rows in (8, 8, 6, 4, 6, 8):
        assert_close(placed(x[:rows]), model(x[:rows]), f"{rows} rows")
        counts.append(compilations.frame_count)
    assert counts[0] == counts[1] > 0
    assert counts[2:] == [counts[2]] * 4  # the second size is compiled for all others


def test_what_is_compiled_is_told(
    compilations: CompileCounterWithBackend,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In placer's log, before it begins, because it may take minutes; nothing is told of later calls."""
    caplog.set_level("INFO", "placer")
    x = torch.randn(4, 8)
    placed = placer.compile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), TWO, x)
    for _ in range(2):
        placed(x).sum().backward()
    assert not capsys.readouterr().err
    assert caplog.messages == [
        f"compiling {what}{layer} for cpu …"
        for what, layers in (("", "01"), ("the backward of ", "10"))
        for layer in layers
    ]


def test_copies_and_pickles_are_compiled_too(compilations: CompileCounterWithBackend) -> None:
    model, x = models.ConvNet(0.0).double(), torch.randn(4, 1, 8, 8, dtype=D)
    placed = placer.compile(model, TWO, x)
    assert list(placed.state_dict()) == list(model.state_dict())
    loaded = pickle.loads(pickle.dumps(placed))
    assert not compilations.frame_count
    assert_close(loaded(x), model(x), "loaded")
    assert loaded.plan.compile and compilations.frame_count == 2


def test_hooks_that_are_added_later_run(compilations: CompileCounterWithBackend) -> None:
    """Torch's default is to ignore them."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(6, 4)
    placed: Any = placer.compile(model, {**TWO, "layers": {"0": "cpu:0", "2": "cpu:1"}}, x)
    placed(x)
    seen: list[str] = []
    handle = placed[0].register_forward_hook(lambda *given: seen.append("forward") or given[2] * 2)
    placed[2].register_full_backward_hook(lambda *_: seen.append("backward"))
    found = placed(x)
    torch.testing.assert_close(found, model[2](torch.tanh(2 * model[0](x))))
    found.sum().backward()
    assert seen == ["forward", "backward"]
    handle.remove()
    torch.testing.assert_close(placed(x), model(x))
    assert seen == ["forward", "backward"]


def test_transforms_run_what_is_not_compiled(compilations: CompileCounterWithBackend) -> None:
    model, x = models.ConvNet(0.0).double(), torch.randn(4, 1, 8, 8, dtype=D)
    placed = placer.compile(model, TWO, x)

    def gradients(module: nn.Module) -> dict[str, Tensor]:
        weights = {name: p.detach() for name, p in module.named_parameters()}
        call = torch.func.functional_call
        return torch.func.grad(lambda w: call(module, w, (x,)).square().sum())(weights)

    for name, gradient in gradients(model).items():
        assert_close(gradients(placed)[name], gradient, name)
    assert not compilations.frame_count


def test_a_second_backward_through_the_gradient_is_refused(
    compilations: CompileCounterWithBackend,
) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    placed = placer.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), TWO, x.detach())
    (gradient,) = torch.autograd.grad(placed(x).square().sum(), x, create_graph=True)
    with pytest.raises(
        RuntimeError, match=r"torch\.compile .* not currently support double backward"
    ):
        gradient.square().sum().backward()


def test_a_weight_without_effect_in_a_stage_has_a_gradient_of_zeros(
    compilations: CompileCounterWithBackend,
) -> None:
    """As in a plain model that is compiled; uncompiled there is none."""

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.other = nn.Linear(4, 2), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.main(x), self.other(x)

    model, x = TwoHeads(), torch.randn(4, 4)
    compiled_too: Any = torch.compile(copy.deepcopy(model), backend="aot_eager")
    placed: Any = placer.compile(model, {"devices": ["cpu"], "compile": True}, x)
    for module in (placed, compiled_too):
        module(x)[0].sum().backward()
        assert not module.other.weight.grad.any()


def test_dry_runs_do_not_compile(compilations: CompileCounterWithBackend) -> None:
    model, x = models.ConvNet(0.0), torch.randn(4, 1, 8, 8)
    fields = [placer.make_plan(model, {**TWO, "compile": on}, x) for on in (False, True)]
    plain, plan = (placer.simulate(model, p, x) for p in fields)
    assert plain.devices == plan.devices and not compilations.frame_count
    assert any("not compiled" in note for note in fields[1].notes)


@pytest.mark.parametrize(
    "other",
    [
        {"space": 2},
        {"space": "auto"},
        {"chunks": 4},
        {"batch_norm": "deferred"},
        {"batch_norm": "sync"},
        {"schedule": "interleavedzerobubble"},
    ],
    ids=str,
)
def test_what_cannot_be_compiled_names_both_fields(other: dict[str, Any]) -> None:
    (name,) = other
    with pytest.raises(placer.SpecError, match=f'/compile: cannot be combined with "{name}"'):
        placer.PlacementSpec(**TWO, **other)
    spec = placer.PlacementSpec(**{**TWO, "compile": False}, **other)
    assert not spec.compile


def test_a_copied_spec_is_refused_when_it_is_planned() -> None:
    spec = placer.PlacementSpec(devices=["cpu"], batch_norm="deferred")
    with pytest.raises(placer.SpecError, match="/compile"):
        spec = spec.model_copy(update={"compile": True})
        placer.make_plan(nn.Linear(2, 2), spec, torch.ones(2, 2))


def test_auto_tries_nothing_that_cannot_be_compiled() -> None:
    model, x = unet3d(width=2, depth=2, norm="group"), torch.randn(8, 1, 8, 8, 8)
    program = lower(model, (x,))

    def tried(on: bool) -> list[Strategy]:
        spec = placer.PlacementSpec(devices=["cpu:0", "cpu:1"], compile=on)
        return list(list_strategies(program, spec, spec.devices, 8, processes=True))

    def needs_uncompiled(strategy: Strategy) -> bool:
        split = strategy.schedule == "InterleavedZeroBubble"
        return split or strategy.shards > 1 or strategy.chunks

    assert any(map(needs_uncompiled, tried(False)))
    assert tried(True) == [s for s in tried(False) if not needs_uncompiled(s)]
