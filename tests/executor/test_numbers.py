"""Numbers that are others in every call: arguments and attributes."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import placer
from placer.executor.calls import program_cache as programs
from placer.executor.calls.numbers import RecaptureWarning

STAGES = {"devices": ["cuda:0", "cuda:1"], "layers": {"first": "cuda:0", "last": "cuda:1"}}
SPLIT = {**STAGES, "devices": [f"cuda:{i}" for i in range(4)], "replicas": 2, "microbatches": 2}


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * (1 - ctx.strength), None


class Net(nn.Module):
    """``use(x, number)`` between two layers."""

    def __init__(self, use: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.use = nn.Linear(6, 6), nn.Linear(6, 6), use

    def forward(self, x: Tensor, number: float) -> Tensor:
        return self.last(self.use(self.first(x), number))


class Attribute(Net):
    def __init__(self, use: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__(use)
        self.last.number = 0.5

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, self.last.number)


ARITHMETIC: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "product": lambda x, n: x * n,
    "of numbers": lambda x, n: x * (1 - n) ** 2 / 3 + abs(n - 5),
    "option": lambda x, n: nn.functional.leaky_relu(x, n),
    "tensor": lambda x, n: x + torch.full_like(x, n),
    "function": lambda x, n: Scale.apply(x, n),
    "unused": lambda x, n: x.relu(),
}
LOOKED_AT: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "branch": lambda x, n: x * n if n > 0.7 else x.tanh(),
    "math": lambda x, n: x * math.exp(-n),
    "rounded": lambda x, n: x * (1 + math.floor(n)),
    "limit": lambda x, n: x * max(n, 0.9),
    "numpy": lambda x, n: x * float(np.clip(n, 0, 1)),
    "array": lambda x, n: x * torch.from_numpy(np.array([n] * 6, dtype=np.float32)),
    "key": lambda x, n: x * {n: 2.0}[n],
    "text": lambda x, n: x * float(str(n)),
}
VALUES = [0.5, 0.25, 0.75, 1.5, 0.3, 2.5, 0.25]


def _equal(make: Callable[[], nn.Module], spec: dict[str, Any], calls: list[Any]) -> list[int]:
    """Compare calls with the plain model's; returns how often the model was captured by then."""
    torch.manual_seed(0)
    plain = make().double()
    x = torch.randn(8, 6, dtype=torch.float64)
    mine = copy.deepcopy(plain)
    placed = placer.compile(mine, spec, _arguments(placed_input(x), mine, calls[0]), run_on="cpu")
    counts, capture = [0], programs.lower

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[0] += 1
        return capture(*args, **kwargs)

    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "lower", counted)
        for value in calls:
            results = []
            for model in (placed, plain):
                given = _arguments(x, model, value)
                model.zero_grad()
                out = model(*given)
                out.square().mean().backward()
                results.append([out, *(p.grad for p in model.parameters())])
            torch.testing.assert_close(*results, msg=lambda text, v=value: f"for {v}: {text}")
            seen.append(counts[0])
    return seen


def placed_input(x: Tensor) -> Tensor:
    return x[:4].clone()


def _arguments(x: Tensor, model: nn.Module, value: Any) -> tuple[Any, ...]:
    tree = getattr(model, "_tree", model)
    if isinstance(tree, Attribute):
        model.last.number = value  # type: ignore[union-attr]
        return (x,)
    return x, value


@pytest.mark.matrix(3)
@pytest.mark.parametrize("kind", [Net, Attribute])
@pytest.mark.parametrize("spec", [STAGES, SPLIT], ids=["stages", "split"])
@pytest.mark.parametrize("use", ARITHMETIC)
def test_a_number_that_only_arithmetic_reads_is_an_input_after_its_second_value(
    kind: type[Net], spec: dict[str, Any], use: str
) -> None:
    counts = _equal(lambda: kind(ARITHMETIC[use]), spec, VALUES)
    if use == "unused" and kind is Net:
        assert counts[-1] <= 1
    else:
        assert counts[1] == counts[-1] <= 1


@pytest.mark.matrix(2)
@pytest.mark.parametrize("kind", [Net, Attribute])
@pytest.mark.parametrize("use", LOOKED_AT)
def test_a_number_at_which_python_looks_is_part_of_the_program(kind: type[Net], use: str) -> None:
    _equal(lambda: kind(LOOKED_AT[use]), STAGES, VALUES)


INTEGERS = {
    **ARITHMETIC,
    "half": lambda x, n: x * (0.5 * n) + n / 2 + 1.5**n,
    "slice": lambda x, n: torch.cat([x[:, :n] * 2, x[:, n:]], 1),
    "sizes": lambda x, n: x.new_ones(n, x.size(1) + n, dtype=x.dtype).mean() * x,
    "bits": lambda x, n: x * ((n >> 1 | 5) % 3),
    "alternating": lambda x, n: x * (-1) ** n,
}
INTEGERS_LOOKED_AT: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "bits": lambda x, n: x * n.bit_length(),
    "clipped": lambda x, n: x * int(np.clip(n, 2, 4)),
    "array": lambda x, n: x * torch.from_numpy(np.arange(n) + 1.0).sum(),
    "object array": lambda x, n: x * float((np.arange(3) * n).max()),
    "loop": lambda x, n: sum((x * i for i in range(n)), x),
    "loop backwards": lambda x, n: sum((x * i for i in range(3, n, -1)), x),
    "root": lambda x, n: x * math.isqrt(n),
    "divisor": lambda x, n: x * math.gcd(n, 12),
    "power": lambda x, n: x * math.exp(n),
    "modular power": lambda x, n: x * pow(2, n, 5),
    "quotient": lambda x, n: x * divmod(n, 3)[1],
    "repeated": lambda x, n: x * len([0] * n),
    "text": lambda x, n: x * len("ab" * n),
    "index": lambda x, n: x * [1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 4.0, 2.0, 6.0][n],
    "items": lambda x, n: x * len([1, 2, 3, 4, 5, 6, 7, 8][:n]),
    "number": lambda x, n: x * (int(n) + 1),
    "whole": lambda x, n: x * float(n),
    "complex": lambda x, n: x * abs((3.5 - n) ** 0.5),
    "string": lambda x, n: x * float(str(n)),
    "formatted": lambda x, n: x * float(f"{n:d}1"),
    "percent": lambda x, n: x * float("%d" % n),  # noqa: UP031
    "key": lambda x, n: x * dict(enumerate([1.0, 3.0, 5.0, 7.0, 9.0, 1.0, 4.0, 2.0, 6.0]))[n],
    "member": lambda x, n: x * (2 if n in {5, 8} else 3),
    "limit": lambda x, n: x * min(n, 3),
    "truth": lambda x, n: x * (2 if n - 8 else 3),
    "equal": lambda x, n: x * (2 if n == 8.0 else 3),
    "type": lambda x, n: x * (2 if type(n) is int else 3),
    "attribute": lambda x, n: x * getattr(n, "denominator", 3),
    "copy": lambda x, n: x * copy.deepcopy([n])[0],
    "bytes": lambda x, n: x * n.to_bytes(2, "big")[1],
    "cached": lambda x, n: x * _doubled(n, 3),
    "caught": lambda x, n: x * _digits(n),
}


@functools.lru_cache
def _doubled(n: Any, times: int) -> Any:
    """Recursive, which is why a recording has to use its cache."""
    return n if times == 0 else 2 * _doubled(n, times - 1)


def _digits(n: Any) -> int:
    try:
        return int(n.bit_count())
    except AttributeError:
        return 7


COUNT = [2, 4, 1, 5, 6, 7, 8, 2]


@pytest.mark.matrix(2)
@pytest.mark.parametrize("kind", [Net, Attribute])
@pytest.mark.parametrize("use", INTEGERS)
def test_integers_that_only_arithmetic_reads(kind: type[Net], use: str) -> None:
    counts = _equal(lambda: kind(INTEGERS[use]), SPLIT, COUNT)
    assert counts[2] == counts[-1] <= 1


@pytest.mark.matrix(2)
@pytest.mark.parametrize("values", [COUNT, COUNT[::-1], [1, 0, 2, 3, 8]], ids=str)
@pytest.mark.parametrize("kind", [Net, Attribute])
@pytest.mark.parametrize("use", INTEGERS_LOOKED_AT)
def test_integers_that_other_code_reads(kind: type[Net], use: str, values: list[int]) -> None:
    """Also code in C, which asks an ``int`` for its value without a method that could be noticed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecaptureWarning)
        _equal(lambda: kind(INTEGERS_LOOKED_AT[use]), STAGES, values)


def test_a_program_is_captured_per_value_without_a_limit_and_a_warning_says_how_often() -> None:
    values = [0.5 + i / 64 for i in range(12)]
    with pytest.warns(RecaptureWarning, match=r"captured 8 times for other values of number, at"):
        _equal(lambda: Net(LOOKED_AT["math"]), STAGES, values)


def test_a_value_that_comes_back_is_not_captured_again() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        counts = _equal(lambda: Net(LOOKED_AT["branch"]), STAGES, [0.5, 0.6, 0.8, 0.9] * 4)
    assert counts[3] == counts[-1]


def test_numbers_in_both_modes() -> None:
    """Only training looks at the number."""

    class Fading(Net):
        def forward(self, x: Tensor, number: float) -> Tensor:
            if self.training and number > 1:
                x = x * 2
            return super().forward(x, number)

    torch.manual_seed(0)
    plain = Fading(lambda x, n: x * n)
    x = torch.randn(4, 6)
    placed = placer.compile(copy.deepcopy(plain), STAGES, (x, 0.5), run_on="cpu")
    for value in (0.5, 0.75, 2.0, 3.0, 0.25, 1.5):
        for mode in (True, False):
            torch.testing.assert_close(placed.train(mode)(x, value), plain.train(mode)(x, value))


def test_hooks_get_the_numbers_of_the_call() -> None:
    model = Net(ARITHMETIC["product"])
    x, seen = torch.randn(4, 6), list[float]()
    placed = placer.compile(model, STAGES, (x, 0.5), run_on="cpu")
    placed.register_forward_hook(lambda module, args, out: seen.append(args[1]))
    for value in (0.5, 0.75, 1.5):
        placed.step(x, value, loss_fn=lambda out: out.square().mean())
        placed(x, value)
    assert seen == [0.5, 0.5, 0.75, 0.75, 1.5, 1.5]


def test_an_integer_that_becomes_a_float_and_back() -> None:
    model = Attribute(lambda x, n: x * n).double()
    x = torch.randn(8, 6, dtype=torch.float64)
    placed = placer.compile(copy.deepcopy(model), STAGES, x, run_on="cpu")
    for number in (1, 2, 2.5, 0.5, 3, True, 1.0):
        model.last.number = placed.last.number = number
        torch.testing.assert_close(placed(x), model(x))
