"""What a model keeps of its earlier calls: a placed model finds and keeps what the plain model does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import placer
import placer.executor.calls.program_cache
import placer.program.recording.record
from placer.program import lower

SPEC: dict[str, Any] = {"devices": ["cpu:0", "cpu:1"], "microbatches": 2}


class Grid(nn.Module):
    """Keeps a grid for the last size that it saw, as neural operators do."""

    def __init__(self) -> None:
        super().__init__()
        self.size: Any = None
        self.grid: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.grid is None or self.size != x.shape[1:]:
            axes = [torch.linspace(0, 1, n + 1)[:-1] for n in x.shape[1:]]
            self.grid = [y.to(x.dtype)[None] for y in torch.meshgrid(*axes, indexing="ij")]
            self.size = x.shape[1:]
        return torch.stack([x, *(y.repeat(x.shape[0], 1, 1) for y in self.grid)], 1)


class Bias(nn.Module):
    """Keeps a bias for the longest sequence so far, in a buffer that is not saved, as ALiBi."""

    slopes: Tensor
    bias: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.tensor([[0.7]]), persistent=False)
        self.register_buffer("bias", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[-1]
        if self.bias is None or self.bias.shape[-1] < n:
            steps = torch.arange(n, device=x.device)
            bias = (steps[None, :] - steps[:, None]).abs() * -self.slopes
            self.register_buffer("bias", nn.functional.pad(bias, (0, 1, 0, 1)), persistent=False)
        assert self.bias is not None
        return (x @ self.bias[:n, :n])[:, None].repeat(1, 3, 1, 1)


class New(nn.Module):
    """Keeps two tables in attributes that do not exist before its first call."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "rows"):
            self.rows, self.columns = torch.arange(x.shape[1]) + 0.5, torch.arange(x.shape[2]) * 2.0
        n, m = x.shape[1:]
        rows, columns = torch.arange(n) + 0.5, self.columns
        if len(self.rows) != n or len(columns) != m:
            columns = torch.arange(m) * 2.0
        return torch.stack([x, rows[:, None] + x, columns + x], 1)


_collected: list[list[Tensor]] = []


class Hooked(nn.Module):
    """Installs hooks on its layers in its first call, to return what they compute, as transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Sigmoid()) for _ in range(3))

    def install(self) -> None:
        for index, layer in enumerate(self.layers):

            def keep(module: nn.Module, args: Any, result: Tensor, scale: int = index) -> None:
                if _collected:
                    _collected[-1].append(result * (scale + 1))

            layer.register_forward_hook(keep)

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "installed", False):
            self.install()
            self.installed = True
        _collected.append([])
        for layer in self.layers:
            x = layer(x)
        return torch.stack(_collected.pop(), 1)


def net(first: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Tanh(), first)
    return nn.Sequential(first, nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 2, 1)).double()


def batch(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


KEEPING = [Grid, Bias, New, Hooked]


def test_hooks_that_forward_installs_are_part_of_it() -> None:
    model, x = net(Hooked()), batch(4, 6, 8)
    captures = [lower(model, (x,)), lower(model, (x,))]
    model(x)
    captures.append(lower(model, (x,)))
    captures.append(lower(copy.deepcopy(model), (x[:2],)))
    assert len({program.fingerprint for program in captures}) == 1
    assert len({str(program.graph) for program in captures}) == 1
    assert not any(
        program.captured.whole_modules or program.captured.fixed_batch_reason
        for program in captures
    )


def trained(module: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    """The output, gradients and buffers of a call."""
    module.zero_grad()
    output = module(x)
    output.square().mean().backward()
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"output": output.detach(), **found, **dict(module.named_buffers())}


def assert_equal(placed: nn.Module, plain: nn.Module, x: Tensor) -> None:
    found, expected = trained(placed, x), trained(plain, x)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)
    assert placed.state_dict().keys() == plain.state_dict().keys()


SIZES = [(4, 6, 8), (3, 6, 8), (4, 8, 10), (2, 5, 8), (4, 6, 8)]


@pytest.mark.matrix(2)
@pytest.mark.parametrize("called", [(), ((4, 6, 8),), ((4, 8, 10), (4, 6, 8))], ids=len)
@pytest.mark.parametrize("first", KEEPING)
def test_a_placed_model_equals_the_plain_one_whatever_was_called_before(
    first: Callable[[], nn.Module], called: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = net(first()), net(first())
    for shape in called:
        x = batch(*shape)
        plain(x)
        model(x)
    placed = placer.compile(model, SPEC, batch(4, 6, 8))
    recorded: list[None] = []
    for name in ("lower", "same_program"):
        original = getattr(placer.executor.calls.program_cache, name)
        monkeypatch.setattr(
            placer.executor.calls.program_cache,
            name,
            lambda *args, original=original, **kwargs: (
                recorded.append(None) or original(*args, **kwargs)
            ),
        )
    for shape in SIZES:
        assert_equal(placed, plain, batch(*shape))
    count = len(recorded)
    for shape in SIZES:
        model(batch(*shape))  # the caller's model, of which the placed one is a copy
        placed(batch(*shape))
    assert len(recorded) == count


def test_a_plan_for_a_new_model_is_also_for_one_whose_hooks_are_installed() -> None:
    new, plain, x = net(Hooked()), net(Hooked()), batch(4, 6, 8)
    plan = placer.make_plan(new, SPEC, x)
    plain(x)
    assert_equal(placer.compile(plain, plan, x, run_on="cpu"), plain, x)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("first", [Grid, Bias, New])
def test_a_plan_for_a_new_model_is_not_for_one_that_keeps_something_of_a_call(
    first: Callable[[], nn.Module],
) -> None:
    new, plain, x = net(first()), net(first()), batch(4, 6, 8)
    plan = placer.make_plan(new, SPEC, x)
    plain(x)
    with pytest.raises(placer.PlanError, match="keeps something of its first call: plan after"):
        placer.compile(plain, plan, x, run_on="cpu")
    placed = placer.compile(plain, placer.make_plan(plain, SPEC, x), x, run_on="cpu")
    assert_equal(pickle.loads(pickle.dumps(placed)), plain, x)
    assert_equal(placed, plain, batch(3, 8, 10))


class Kept(nn.Module):
    """Keeps the tensor that ``make`` computes in its first call, for ever."""

    def __init__(self, make: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 3.0))
        self.make = make
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.make(x, self.weight)
        return (x * self.weight + self.kept)[:, None].repeat(1, 3, 1, 1)


class Pair(nn.Module):
    """Makes two tables together."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Tensor | None = None
        self.second: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.first is None:
            self.first, self.second = torch.arange(8) / 7, torch.arange(8) / 3
        return (x * self.first + self.second)[:, None].repeat(1, 3, 1, 1)


class Optional(nn.Module):
    """Uses a mask if it was given one."""

    def __init__(self) -> None:
        super().__init__()
        self.use(None)

    def use(self, mask: Tensor | None) -> None:
        self.register_buffer("mask", mask, persistent=False)
        self.scales = None if mask is None else [mask * 2]

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.mask is None else x * self.mask
        x = x if self.scales is None else x / self.scales[0]
        return x[:, None].repeat(1, 3, 1, 1)


class Needed(nn.Module):
    """Cannot run without its table, which a method may replace."""

    def __init__(self) -> None:
        super().__init__()
        self.resize(8)

    def resize(self, n: int) -> None:
        self.register_buffer("table", torch.arange(n) / 7, persistent=False)
        self.other = torch.arange(n) / 3

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.table - self.other)[:, None].repeat(1, 3, 1, 1)


def of_the_batch(x: Tensor, weight: Tensor) -> Tensor:
    return torch.full((8,), 1 / x.shape[0])


def of_the_values(x: Tensor, weight: Tensor) -> Tensor:
    return x.detach().mean((0, 1))


def of_the_weights(x: Tensor, weight: Tensor) -> Tensor:
    return weight.detach().abs()


def random(x: Tensor, weight: Tensor) -> Tensor:
    return torch.rand(8)


def multiplied(model: nn.Module) -> None:
    model[0][1].grid = [y * 2 for y in model[0][1].grid]


def added(model: nn.Module) -> None:
    model[0][1].bias.add_(1)


def masked(model: nn.Module) -> None:
    model[0][1].use(torch.full((8,), 0.3, dtype=torch.float64))


def replaced(model: nn.Module) -> None:
    model[0][1].second = torch.ones(8)


def nothing(model: nn.Module) -> None:
    pass


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("first", "change"),
    [
        (Grid, multiplied),
        (Bias, added),
        (Pair, replaced),
        (Optional, masked),
        (Needed, nothing),
        *((lambda make=make: Kept(make), nothing) for make in (of_the_batch, of_the_values)),
        *((lambda make=make: Kept(make), nothing) for make in (of_the_weights, random)),
    ],
    ids=[*("grid", "bias", "pair", "mask", "table", "batch", "values", "weights", "random")],
)
def test_what_the_next_call_would_not_make_again_is_kept(
    first: Callable[[], nn.Module], change: Callable[[nn.Module], None]
) -> None:
    plain, x = net(first()), batch(4, 6, 8)
    plain(x)
    change(plain)
    model = copy.deepcopy(plain)
    placed = placer.compile(model, SPEC, x, run_on="cpu")
    with torch.no_grad():
        for module in (plain, placed):
            for parameter in module.parameters():
                parameter.mul_(0.9)
    for shape in ((4, 6, 8), (2, 6, 8)):
        assert_equal(placed, plain, batch(*shape))


def test_a_cache_that_is_changed_in_the_placed_model_is_used() -> None:
    plain, x = net(Grid()), batch(4, 6, 8)
    plain(x)
    placed = placer.compile(plain, SPEC, x, run_on="cpu")
    for module in (plain, placed):
        multiplied(module)
    assert_equal(placed, plain, x)
    placed[0][1].grid[0].zero_()
    plain[0][1].grid[0].zero_()
    assert_equal(placed, plain, x)


def test_a_hook_of_the_user_runs_next_to_those_that_forward_installed() -> None:
    plain, x = net(Hooked()), batch(4, 6, 8)
    plain(x)
    placed = placer.compile(plain, SPEC, x, run_on="cpu")
    assert_equal(placed, plain, x)
    for module in (plain, placed):
        module[0][1].layers[1].register_forward_hook(lambda module, args, result: result * 0.5)
    assert_equal(placed, plain, x)
