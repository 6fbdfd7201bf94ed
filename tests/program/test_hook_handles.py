"""Handles of hooks that were on a model before it was placed remove them from the placed module, too."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import assert_close
from torch import Tensor, nn

import placer

SPEC = {"devices": ["cpu:0", "cpu:1"], "layers": {"0": "cpu:0", "1": "cpu:0", "2": "cpu:1"}}
Register = Callable[[nn.Module, Callable[..., Any]], Any]
KINDS: dict[str, tuple[Register, Callable[..., Any]]] = {
    "forward": (nn.Module.register_forward_hook, lambda module, args, out: 2 * out),
    "forward with kwargs": (
        lambda module, hook: module.register_forward_hook(hook, with_kwargs=True, always_call=True),
        lambda module, args, kwargs, out: 2 * out,
    ),
    "forward pre": (nn.Module.register_forward_pre_hook, lambda module, args: (2 * args[0],)),
    "forward pre with kwargs": (
        lambda module, hook: module.register_forward_pre_hook(hook, with_kwargs=True),
        lambda module, args, kwargs: ((2 * args[0],), kwargs),
    ),
    "backward": (
        nn.Module.register_full_backward_hook,
        lambda module, given, gradients: (2 * given[0],),
    ),
    "backward pre": (
        nn.Module.register_full_backward_pre_hook,
        lambda module, gradients: (2 * gradients[0],),
    ),
    "state_dict": (nn.Module.register_state_dict_post_hook, lambda *args: None),
    "state_dict pre": (nn.Module.register_state_dict_pre_hook, lambda *args: None),
    "load_state_dict": (nn.Module.register_load_state_dict_post_hook, lambda *args: None),
    "load_state_dict pre": (nn.Module.register_load_state_dict_pre_hook, lambda *args: None),
    "gradient": (
        lambda module, hook: next(module.parameters()).register_hook(hook),
        lambda gradient: 2 * gradient,
    ),
    "accumulated gradient": (
        lambda module, hook: next(module.parameters()).register_post_accumulate_grad_hook(hook),
        lambda parameter: parameter.grad.mul_(2),
    ),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block()).double()


def _hooked(calls: list[str], *, once: bool) -> tuple[nn.Module, list[Any]]:
    """A model with hooks of all kinds on a layer and a block around it; ``once``: they remove themselves."""
    model, handles = _model(), []
    for layer in (model[1], model[1].linear):
        for kind, (register, function) in KINDS.items():
            handle: list[Any] = []

            def hook(
                *args: Any, called: Any = (kind, layer, function, handle), **kwargs: Any
            ) -> Any:
                calls.append(f"{called[0]} of {type(called[1]).__name__}")
                if once:
                    called[3][0].remove()
                value = called[2](*args, **kwargs)
                return None if "accumulated" in called[0] else value

            handle.append(register(layer, hook))
            handles += handle
    return model, handles


def _train(model: Any, x: Tensor, *, step: bool) -> list[Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
    if step and isinstance(model, placer.PlacedModule):
        found = [model.step(x, loss_fn=torch.sum)]
    else:
        found = [model(x)]
        found[0].sum().backward()
        found = [found[0].detach().sum()] if step else found
    model.load_state_dict(model.state_dict())
    return [*found, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.matrix(2)
@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("removed", ["before", "between", "in the call", "by clear"])
def test_a_hook_is_removed_from_the_placed_module_too(removed: str, step: bool) -> None:
    x = torch.randn(8, 4, dtype=torch.float64)
    seen: list[tuple[list[list[Tensor]], list[list[str]]]] = []
    for place in (False, True):
        calls: list[str] = []
        plain, handles = _hooked(calls, once=removed == "in the call")
        layers = [plain[1], plain[1].linear]
        model: Any = placer.compile(plain, SPEC, x, run_on="cpu") if place else plain
        assert not calls
        found, called = [], []
        for index in range(3):
            if index == (removed == "between"):
                for handle in handles if removed in ("before", "between") else ():
                    handle.remove()
                for layer in layers if removed == "by clear" else ():
                    for table in (x for name, x in vars(layer).items() if name.endswith("_hooks")):
                        table.clear()
            found.append(_train(model, x * (index + 1), step=step))
            # In a step, hooks on the gradients of parameters run at its end.
            called.append(sorted(calls) if step else [*calls])
            calls.clear()
        seen.append((found, called))
    (expected, wanted), (found, called) = seen
    assert called == wanted
    for theirs, ours in zip(expected, found, strict=True):
        for index, (a, b) in enumerate(zip(theirs, ours, strict=True)):
            assert_close(b, a, str(index))


def _twice(hook: Any = None) -> tuple[nn.Module, list[int]]:
    """A hook on a layer that is called twice; it removes itself."""
    model, calls = _model(), []
    model[2] = model[1]

    def double(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        handle.remove()
        calls.append(1)
        return 2 * out

    handle = model[1].register_forward_hook(double)
    return model, calls


def test_a_hook_that_removes_itself_runs_once_where_its_layer_is_called_twice() -> None:
    x = torch.randn(8, 4, dtype=torch.float64)
    (plain, wanted), (model, calls) = _twice(), _twice()
    placed = placer.compile(model, {"devices": ["cpu:0", "cpu:1"]}, x, run_on="cpu")
    assert len(model[1]._forward_hooks) == 1  # capture has not removed it
    for _ in range(2):
        assert_close(placed(x), plain(x), "output")
        assert calls == wanted == [1]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("slices", [{"microbatches": 2}, {"replicas": 2}])
def test_one_that_removes_itself_is_refused_with_several_slices(slices: dict[str, int]) -> None:
    with pytest.raises(placer.CaptureError, match="is set by a module that stays whole"):
        placer.compile(_twice()[0], {**SPEC, **slices}, torch.randn(8, 4), run_on="cpu")


class Watched(nn.Sequential):
    """Puts hooks of its own on layers, and removes them."""

    def watch(self) -> None:
        layers = self[1], self[1].linear
        self.handles = [x.register_forward_hook(lambda module, args, out: 3 * out) for x in layers]

    def watch_once(self) -> None:
        def double(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            handle.remove()
            return 2 * out

        handle = self[1].register_forward_hook(double)

    def stop(self) -> None:
        for handle in self.handles:
            handle.remove()


@pytest.mark.matrix(1)
@pytest.mark.parametrize("slices", [{}, {"microbatches": 2}])
@pytest.mark.parametrize("copied", [False, True])
def test_hooks_of_the_models_own_that_are_recorded(copied: bool, slices: dict[str, int]) -> None:
    x = torch.randn(8, 4, dtype=torch.float64)
    plain = Watched(*_model())
    plain.watch()
    placed: Any = placer.compile(copy.deepcopy(plain), {**SPEC, **slices}, x, run_on="cpu")
    gc.collect()  # the model that was placed is gone
    for model in (plain, placed):
        assert model(x).shape == x.shape
    if copied:
        placed = copy.deepcopy(placed)
    assert_close(placed(x), plain(x), "with hooks")
    for model in (plain, placed):
        model.stop()
    assert_close(placed(x), plain(x), "without")


def test_one_of_them_removes_itself() -> None:
    x = torch.randn(8, 4, dtype=torch.float64)
    plain = Watched(*_model())
    model = copy.deepcopy(plain)
    for each in (plain, model):
        each.watch_once()
    placed = placer.compile(model, SPEC, x, run_on="cpu")
    for _ in range(2):
        assert_close(placed(x), plain(x), "output")


def test_a_hook_that_removes_another_layers_is_in_one_node_with_it() -> None:
    x = torch.randn(8, 4, dtype=torch.float64)
    models = [_model(), _model()]
    for model in models:
        other = model[2].register_forward_hook(lambda module, args, out: 7 * out)
        model[0].register_forward_hook(lambda module, args, out, other=other: other.remove())
    with pytest.raises(placer.SpecError, match="a hook of 0 removes one of another layer"):
        placer.compile(models[0], SPEC, x, run_on="cpu")
    placed = placer.compile(models[0], {"devices": ["cpu:0"]}, x, run_on="cpu")
    assert_close(placed(x), models[1](x), "output")


class Tracker:
    """Counts calls, and stops watching a layer after the first."""

    def __init__(self, model: nn.Sequential) -> None:
        self.calls = 0
        self.handle = model[1].register_forward_hook(self.count)
        self.first = model[0].register_forward_hook(self.stop)

    def count(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.calls += 1

    def stop(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        self.first.remove()
        return 2 * out


@pytest.mark.matrix(1)
@pytest.mark.parametrize("attribute", [False, True])
def test_an_object_counts_calls(attribute: bool) -> None:
    """Also one in an attribute of the model, whose count the recording saw there."""
    x = torch.randn(8, 4, dtype=torch.float64)
    plain, model = _model(), _model()
    expected, tracker = Tracker(plain), Tracker(model)
    if attribute:
        plain.tracker, model.tracker = expected, tracker
    placed = placer.compile(model, SPEC, x, run_on="cpu")
    for _ in range(3):
        assert_close(placed(x), plain(x), "output")
        assert tracker.calls == expected.calls
    tracker.handle.remove()
    placed(x)
    assert tracker.calls == expected.calls
    assert not model[1]._forward_hooks  # the handle is that of the model, as before


def test_parameters_on_meta_keep_hooks_and_attributes() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    seen: list[Tensor] = []
    handle = model[0].weight.register_hook(lambda gradient: seen.append(gradient))
    model[0].weight.no_decay = True
    placed: Any = placer.compile(model, {"devices": ["cpu:0", "cpu:1"]}, torch.randn(8, 4))
    for _ in range(2):
        placed.step(torch.randn(8, 4), loss_fn=torch.sum)
        assert len(seen) == 1
        handle.remove()
    assert placed[0].weight.no_decay


@pytest.mark.parametrize("slices", [{"microbatches": 2}, {"replicas": 2}])
def test_a_hook_on_the_model_that_keeps_something_is_refused_in_a_step(
    slices: dict[str, int],
) -> None:
    x, seen = torch.randn(8, 4, dtype=torch.float64), []
    model = _model()
    model.register_forward_hook(lambda module, args, out: seen.append(out))
    placed = placer.compile(model, {**SPEC, **slices}, x, run_on="cpu")
    placed(x)
    assert len(seen) == 1
    with pytest.raises(placer.PlacerError, match="once for every slice"):
        placed.step(x, loss_fn=torch.sum)
    assert len(seen) == 1
    assert all(parameter.grad is None for parameter in placed.parameters())
