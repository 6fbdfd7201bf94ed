"""Caches that a model's code keeps outside of itself: no capture reads or fills them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import placer
from placer.program import lower
from tests import models
from tests.oracle import assert_same

DEVICES = {"devices": ["cpu:0", "cpu:1"]}


@functools.lru_cache(8)
def halves(rows: int, columns: int) -> tuple[int, int]:
    return rows // 2, columns * 2


@functools.lru_cache(None)
def table(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float64)


@functools.cache
def triangle(n: int) -> int:
    return n if n < 2 else triangle(n - 1) + triangle(n - 2)


class ByHand:
    """Caches of a class, of an object, and in global names."""

    tables: ClassVar[dict[int, Tensor]] = {}

    @staticmethod
    @functools.lru_cache(None)
    def static(length: int) -> Tensor:
        return torch.full((length,), 0.5, dtype=torch.float64)

    @functools.lru_cache(None)  # noqa: B019
    def bound(self, length: int) -> Tensor:
        return torch.full((length,), 2.0, dtype=torch.float64)

    def kept(self, length: int) -> Tensor:
        if length not in self.tables:
            self.tables[length] = torch.ones(length, dtype=torch.float64)
        return self.tables[length]


_ones: Tensor | None = None


def global_ones(length: int) -> Tensor:
    global _ones
    if _ones is None:
        _ones = torch.ones(length, dtype=torch.float64)
    return _ones


def sized(x: Tensor) -> Tensor:
    rows, columns = halves(*x.shape)
    return x.reshape(rows, columns).reshape(-1, 4)


def tabled(x: Tensor) -> Tensor:
    return x + table(4) + table(x.shape[1])


def of_a_class(x: Tensor) -> Tensor:
    helper = ByHand()
    return x + ByHand.static(4) + helper.bound(x.shape[1])


def in_a_closure() -> Callable[[Tensor], Tensor]:
    @functools.lru_cache(None)
    def inner(rows: int) -> tuple[int, Tensor]:
        return rows // 2, torch.ones(4, dtype=torch.float64)

    def call(x: Tensor) -> Tensor:
        rows, ones = inner(x.shape[0])
        return (x + ones).reshape(rows, -1).reshape(-1, 4)

    return call


def recursive(x: Tensor) -> Tensor:
    return x * triangle(x.shape[1] * 20)


class Net(nn.Module):
    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


FUNCTIONS = [sized, tabled, of_a_class, in_a_closure(), recursive]


@pytest.mark.parametrize("middle", FUNCTIONS, ids=lambda f: f.__qualname__.split(".")[0])
def test_calls_before_leave_nothing_in_a_capture(middle: Any) -> None:
    for cached in (halves, table, triangle, ByHand.static, ByHand.bound):
        cached.cache_clear()
    model, x = Net(middle).double(), torch.randn(6, 4, dtype=torch.float64)
    captures = [lower(model, (x,)), lower(model, (x,))]
    expected = model(x)  # also: what was computed without data is not found now
    captures.append(lower(model, (x,)))
    assert len({program.fingerprint for program in captures}) == 1
    assert not any(
        program.captured.whole_modules or program.captured.fixed_batch_reason
        for program in captures
    )
    torch.testing.assert_close(model(x), expected)
    said = {"x": {"batch_dim": 0}}  # some mix the rows of the batch
    assert_same(model, {**DEVICES, "microbatches": 3, "inputs": said}, (x,))


def test_what_a_cache_holds_is_kept_where_it_depends_on_no_run() -> None:
    @functools.cache
    def registry() -> dict[str, int]:
        return {}

    registry()["scale"] = 3
    model, x = Net(lambda y: y * registry()["scale"]), torch.randn(6, 4)
    program = lower(model, (x,))
    assert registry() == {"scale": 3}
    assert not program.captured.whole_modules
    assert registry.cache_info().currsize == 1


@pytest.mark.parametrize(
    "middle", [lambda x: x + ByHand().kept(4), lambda x: x + global_ones(4)], ids=["dict", "name"]
)
def test_no_tensor_without_data_stays_in_global_variables(middle: Any) -> None:
    model, x = Net(middle).double(), torch.randn(6, 4, dtype=torch.float64)
    captures = [lower(model, (x,)), lower(model, (x,))]
    assert captures[0].fingerprint == captures[1].fingerprint
    assert not ByHand.tables
    assert _ones is None
    plan = placer.make_plan(model, DEVICES, (x,))
    placed = placer.compile(model, plan, (x,), run_on="cpu")
    torch.testing.assert_close(placed(x), model(x))
    ByHand.tables.clear()
    globals()["_ones"] = None


def test_a_module_kept_whole_leaves_no_tensor_without_data_behind() -> None:
    table.cache_clear()
    model, x = Net(tabled).double(), torch.randn(6, 4, dtype=torch.float64)
    wrapped = nn.Sequential(model, nn.Linear(4, 4).double())
    model.register_forward_hook(lambda module, args, result: result)
    placer.simulate(wrapped, DEVICES, (x,))
    wrapped(x)
    assert_same(wrapped, DEVICES, (x,))


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (models.KeywordModel(), (torch.randn(4, 6),)),
        (models.TiedTransformer(), (torch.randint(17, (4, 6)),)),
        (models.InPlace(), (torch.randn(4, 2, 8, 8),)),
        (models.Recurrent(), (torch.randn(4, 5, 3),)),
        (models.ConvNet(), (torch.randn(4, 1, 8, 8),)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_models_have_one_fingerprint(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    assert_one_fingerprint(model, inputs)


class Einops(nn.Module):
    """A vision transformer as models with einops write it: patches, heads, a token, pooling."""

    def __init__(self) -> None:
        super().__init__()
        layers = pytest.importorskip("einops.layers.torch")
        self.patches = layers.Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=4, q=4)
        self.embed = nn.Linear(48, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.pool = layers.Reduce("b n d -> b d", "mean")

    def forward(self, x: Tensor) -> Tensor:
        from einops import rearrange, repeat

        x = self.embed(self.patches(x))
        x = torch.cat([repeat(self.token, "1 1 d -> b 1 d", b=x.shape[0]), x], 1)
        q, k, v = (rearrange(y, "b n (h d) -> b h n d", h=2) for y in self.qkv(x).chunk(3, -1))
        attention = (q @ rearrange(k, "b h n d -> b h d n")).softmax(-1)
        return self.pool(self.out(rearrange(attention @ v, "b h n d -> b n (h d)")))


def test_a_model_with_einops() -> None:
    model, x = Einops().double(), torch.randn(4, 3, 16, 16, dtype=torch.float64)
    assert_one_fingerprint(model, (x,))
    assert not lower(model, (x,)).captured.whole_modules
    plan = placer.make_plan(model, DEVICES, (x,))
    assert placer.compile(model, plan, (x,), run_on="cpu")(x).shape == (4, 8)
    model(x[:2])
    assert_same(model, {**DEVICES, "microbatches": 2}, (x,))


def assert_one_fingerprint(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    fingerprints = [lower(model, inputs).fingerprint for _ in range(2)]
    model(*inputs)
    fingerprints.append(lower(model, inputs).fingerprint)
    assert len(set(fingerprints)) == 1


class Positions(nn.Module):
    """Keeps a grid of positions for inputs of the size that it saw last, as neural operators do."""

    def __init__(self) -> None:
        super().__init__()
        self.size: Any = None
        self.grid: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.grid is None or self.size != x.shape[2:]:
            axes = [torch.linspace(0, 1, n + 1)[:-1] for n in x.shape[2:]]
            self.grid = [
                axis.to(x.dtype)[None, None] for axis in torch.meshgrid(*axes, indexing="ij")
            ]
            self.size = x.shape[2:]
        return torch.cat([x, *(axis.repeat(x.shape[0], 1, 1, 1) for axis in self.grid)], 1)


class Alternating(Positions):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (self.calls % 2)


class Remembering(nn.Module):
    last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.last is None else x + self.last
        self.last = x.detach()
        return torch.cat([y, y], 1)


def with_positions(first: nn.Module) -> nn.Sequential:
    return nn.Sequential(first, nn.Conv2d(4, 3, 3, padding=1), nn.Conv2d(3, 2, 1)).double()


def test_a_cache_of_constants_keeps_no_module_whole() -> None:
    torch.manual_seed(0)
    plain, x = with_positions(Positions()), torch.randn(2, 2, 6, 8, dtype=torch.float64)
    program = lower(plain, (x,))
    assert not program.captured.whole_modules
    assert lower(plain, (x,)).fingerprint == program.fingerprint
    assert plain[0].grid is None
    placed = placer.compile(with_positions(Positions()), DEVICES, (x,), run_on="cpu")
    placed.load_state_dict(plain.state_dict())
    for shape in ((2, 2, 6, 8), (3, 2, 6, 8), (2, 2, 10, 4), (2, 2, 6, 8)):
        x = torch.randn(shape, dtype=torch.float64)
        for net in (plain, placed):
            net.zero_grad()
            net(x).square().sum().backward()
        torch.testing.assert_close(placed(x), plain(x), rtol=1e-10, atol=1e-12)
        for ours, theirs in zip(placed.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("first", [Alternating, Remembering])
def test_what_changes_the_next_call_does_so_in_the_placed_model(first: type[nn.Module]) -> None:
    x = torch.randn(2, 2, 6, 8, dtype=torch.float64)
    plain = with_positions(first())
    placed = placer.compile(plain, DEVICES, x, run_on="cpu")
    for _ in range(4):
        x = torch.randn(2, 2, 6, 8, dtype=torch.float64)
        torch.testing.assert_close(placed(x), plain(x), rtol=1e-10, atol=1e-12)


class Normalized(nn.Conv2d):
    """Keeps what its first call computes from the weights."""

    kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.weight.detach().abs().mean()
        return super().forward(x) / self.kept


def test_a_model_that_keeps_something_of_its_first_call_is_planned_after_that() -> None:
    torch.manual_seed(0)
    model, x = with_positions(Normalized(2, 4, 1)), torch.randn(2, 2, 6, 8, dtype=torch.float64)
    before = placer.make_plan(model, DEVICES, x)
    expected = model(x)
    with pytest.raises(placer.PlanError, match="keeps something of its first call: plan after"):
        placer.compile(model, before, x, run_on="cpu")
    placed = placer.compile(model, placer.make_plan(model, DEVICES, x), x, run_on="cpu")
    torch.testing.assert_close(placed(x), expected, rtol=1e-10, atol=1e-12)
