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


@pytest.mark.matrix(3)
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


class Remembering(nn.Module):
    last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.last is None else x + self.last
        self.last = x.detach()
        return y


def test_what_changes_the_next_call_does_so_in_the_placed_model() -> None:
    plain = nn.Sequential(Remembering(), nn.Linear(4, 3), nn.Linear(3, 2)).double()
    placed = placer.compile(plain, DEVICES, torch.randn(2, 4, dtype=torch.float64), run_on="cpu")
    for _ in range(4):
        x = torch.randn(2, 4, dtype=torch.float64)
        torch.testing.assert_close(placed(x), plain(x), rtol=1e-10, atol=1e-12)
