"""With several slices, hooks and custom functions keep nothing in the backward, and mix no rows."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import placer

TWO = {"devices": ["cuda:0", "cuda:1"], "layers": {"0": "cuda:0", "1": "cuda:0", "2": "cuda:1"}}
SLICES = [{"microbatches": 2}, {"replicas": 2}]
Hook = Callable[..., Any]


class Watcher:
    """Keeps the gradients that it sees."""

    def __init__(self) -> None:
        self.count, self.last, self.seen = 0, None, []

    def counts(self, *call: Any) -> None:
        self.count += 1

    def keeps(self, *call: Any) -> None:
        self.last = call[-1]

    def collects(self, *call: Any) -> None:
        self.seen.append(call[-1])


class WatchesItself(nn.Linear):
    """Puts a hook on its result, as Grad-CAM does; the gradient is kept in an attribute."""

    def __init__(self, *, pre: bool = False) -> None:
        super().__init__(6, 6)
        self.gradient = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(self.keep)
        return y

    def keep(self, gradient: Tensor) -> None:
        self.gradient = gradient


class Keeps(torch.autograd.Function):
    kept: Tensor | None = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Keeps.kept = gradient
        return gradient


class Applies(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Keeps.apply(x)


def _model(layer: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(6, 6), layer or nn.Linear(6, 6), nn.Linear(6, 6)
    return nn.Sequential(*layers).double()


def _closure() -> Hook:
    norms: list[Tensor] = []

    def hook(module: nn.Module, given: Any, gradients: Any) -> None:
        norms.append(gradients[0].norm())

    return hook


KEEPING: dict[str, Hook] = {
    "a count": Watcher().counts,
    "the last": Watcher().keeps,
    "all": Watcher().collects,
    "a variable": _closure(),
}


@pytest.mark.matrix(2)
@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("name", KEEPING)
def test_a_hook_that_keeps_something_is_refused(name: str, slices: dict[str, int]) -> None:
    model, x = _model(), torch.randn(8, 6, dtype=torch.float64)
    model[1].register_full_backward_hook(KEEPING[name])
    with pytest.raises(placer.CaptureError, match="is set in the backward"):
        placer.compile(model, {**TWO, **slices}, x, run_on="cpu")


def test_so_is_one_that_gets_the_gradient_of_the_result() -> None:
    model, x = _model(), torch.randn(8, 6, dtype=torch.float64)
    model[1].register_full_backward_pre_hook(lambda module, gradients, kept=[]: kept.append(1))
    with pytest.raises(placer.CaptureError, match="is set in the backward"):
        placer.compile(model, {**TWO, "microbatches": 2}, x, run_on="cpu")


@pytest.mark.parametrize("make", [WatchesItself, Applies])
def test_what_is_kept_without_a_hook_of_a_module_is_refused(make: type[nn.Module]) -> None:
    model, x = _model(make()), torch.randn(8, 6, dtype=torch.float64)
    with pytest.raises(placer.CaptureError, match="is set in the backward"):
        placer.compile(model, {**TWO, "microbatches": 2}, x, run_on="cpu")


def test_in_a_model_that_stays_whole_too() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(()))
            self.inner.register_full_backward_hook(Watcher().counts)

        def forward(self, x: Tensor) -> Tensor:
            assert not x.isnan().any()
            return self.inner(x * self.scale)

    with pytest.raises(placer.CaptureError, match="is set in the backward"):
        placer.compile(Whole(), {**TWO, "layers": {}, "microbatches": 2}, torch.randn(8, 6))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", KEEPING)
def test_with_one_slice_it_keeps_what_it_would_without_placer(name: str) -> None:
    x, watchers = torch.randn(8, 6, dtype=torch.float64), (Watcher(), Watcher())
    for watcher, place in zip(watchers, (False, True), strict=True):
        model: nn.Module = _model()
        model[1].register_full_backward_hook(watcher.counts)
        model[1].register_full_backward_hook(watcher.collects)
        if place:
            model = placer.compile(model, TWO, x, run_on="cpu")
        for factor in (1.0, 2.0):
            model(x * factor).square().sum().backward()
    plain, placed = watchers
    assert placed.count == plain.count == 2
    torch.testing.assert_close(placed.seen, plain.seen)


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda g: g / g.norm(),
    "mean": lambda g: g - g.mean(0),
    "value": lambda g: g if g.sum() > 0 else -g,
    "number": lambda g: g / len(g),
}
SEPARATE: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda g: g * 2,
    "clipped": lambda g: g.clamp(-0.1, 0.1),
    "norm of a row": lambda g: g / (1 + g.norm(dim=1, keepdim=True)),
}


def _replace(function: Callable[[Tensor], Tensor]) -> Hook:
    return lambda module, given, gradients: (function(given[0]),)


@pytest.mark.parametrize("name", MIXING)
def test_a_hook_that_mixes_rows_is_refused(name: str) -> None:
    model, x = _model(), torch.randn(8, 6, dtype=torch.float64)
    model[1].register_full_backward_hook(_replace(MIXING[name]))
    with pytest.raises(
        placer.CaptureError, match="1: a hook on its gradients replaces them, and it"
    ):
        placer.compile(model, {**TWO, "microbatches": 2}, x, run_on="cpu")


@pytest.mark.matrix(2)
@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("name", SEPARATE)
def test_a_hook_that_keeps_rows_apart_runs(name: str, slices: dict[str, int]) -> None:
    model, x = _model(), torch.randn(8, 6, dtype=torch.float64)
    model[1].register_full_backward_hook(_replace(SEPARATE[name]))
    placed = placer.compile(copy.deepcopy(model), {**TWO, **slices}, x, run_on="cpu")
    model(x).square().sum().backward()
    placed(x).square().sum().backward()
    for ours, theirs in zip(placed.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


Register = Callable[[nn.Module, Hook], Any]
REGISTER: list[Register] = [
    nn.Module.register_forward_hook,
    nn.Module.register_forward_pre_hook,
    nn.Module.register_full_backward_hook,
    nn.Module.register_full_backward_pre_hook,
]


@pytest.mark.matrix(2)
@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("register", REGISTER)
def test_so_is_one_that_is_put_on_a_layer_later(register: Register, slices: dict[str, int]) -> None:
    x = torch.randn(8, 6, dtype=torch.float64)
    placed = placer.compile(_model(), {**TWO, **slices}, x, run_on="cpu")
    placed(x).sum().backward()
    register(placed[1], Watcher().counts)
    with pytest.raises(placer.CaptureError, match="is set"):
        placed(x).sum().backward()


class Asserts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        assert not x.isnan().any()
        y: Tensor = self.last(self.inner(x))
        return y


class Calls(Watcher):
    def __call__(self, *call: Any) -> None:
        self.count += 1


FORMS: dict[str, Callable[[Calls], Hook]] = {
    "method": lambda watcher: watcher.counts,
    "object": lambda watcher: watcher,
    "partial": lambda watcher: functools.partial(watcher.counts, 1),
}


@pytest.mark.matrix(2)
@pytest.mark.parametrize("make", [Asserts, _model])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("register", REGISTER)
def test_objects_of_the_user_are_called_before_and_after_the_model_is_placed(
    register: Register, form: str, make: Callable[[], nn.Module]
) -> None:
    x = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    watchers, model = (Calls(), Calls()), make().double()
    layer = next(iter(dict(model.named_children())))
    register(model.get_submodule(layer), FORMS[form](watchers[0]))
    placed = placer.compile(model, {"devices": ["cuda:0"]}, x, run_on="cpu")
    placed(x).sum().backward()
    register(placed.get_submodule(layer), FORMS[form](watchers[1]))
    placed(x).sum().backward()
    assert [watcher.count for watcher in watchers] == [2, 1]


def test_one_that_keeps_calls_in_a_variable_is_refused_there_with_several_slices() -> None:
    model, seen = Asserts(), list[int]()
    model.inner.register_forward_hook(lambda *call: seen.append(1))
    with pytest.raises(placer.CaptureError, match="it sets"):
        placer.compile(model, {"devices": ["cuda:0"], "microbatches": 2}, torch.randn(8, 6))
