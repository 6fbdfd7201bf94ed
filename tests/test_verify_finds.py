"""``verify`` notices when placer stops doing what keeps a placed model equal: each mend is taken out once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from kinds import WIDTH, Case, Chain, D, Part, Scaled, rows
from torch import Tensor, nn

import placer
from placer.executor import runtime, scatter
from placer.program import capture, copying, targets

Patch = pytest.MonkeyPatch
TWO = {"devices": ["cpu:0", "cpu:1"]}


def _case(act: Callable[..., Tensor | None], *others: Any, **attributes: Any) -> Case:
    part = Part(act)
    for name, value in attributes.items():
        setattr(part, name, value)
    return Case(Chain(Random(0), part).to(D), lambda n: (rows(n), *others))


def _without(patch: Patch, leaves_out: Callable[[Any], bool]) -> None:
    """Let calls leave behind nothing of which ``leaves_out`` is true."""
    store, set_flags = runtime.store, runtime.set_flags

    def some(stored: Any, leaves: Any, target: Any) -> Any:
        kept, rest, values = [], list(leaves), []
        for each in stored:
            own, rest = rest[: each.count], rest[each.count :]
            if not leaves_out(each):
                kept.append(each)
                values += own
        return store(kept, values, target)

    patch.setattr(runtime, "store", some)
    patch.setattr(
        runtime,
        "set_flags",
        lambda stored, target: set_flags([x for x in stored if not leaves_out(x)], target),
    )


def stored_values(patch: Patch) -> Case:
    _without(patch, lambda each: each.root == "model" and each.path[-1] == "loss")

    def act(self: Any, x: Tensor, y: Tensor) -> None:
        self.loss = y.square().mean()

    return _case(act, loss=None)


def written_inputs(patch: Patch) -> Case:
    _without(patch, lambda each: each.kind == "write")

    def act(self: Any, x: Tensor, y: Tensor, cache: Tensor) -> Tensor:
        cache.copy_(y.detach())
        return y + cache

    case = _case(act)
    return Case(case.model, lambda n: (rows(n), rows(n)))


def modes(patch: Patch) -> Case:
    _without(patch, lambda each: each.path[-1] == "training")

    def act(self: Any, x: Tensor, y: Tensor) -> Tensor:
        self.norm.eval()
        return self.norm(y)

    return _case(act, norm=nn.BatchNorm1d(WIDTH))


def frozen_parameters(patch: Patch) -> Case:
    _without(patch, lambda each: each.kind == "requires_grad")

    def act(self: Any, x: Tensor, y: Tensor) -> Tensor:
        self.last.weight.requires_grad_(False)
        return self.last(y)

    return _case(act, last=nn.Linear(WIDTH, WIDTH))


def hooks_of_the_user(patch: Patch) -> Case:
    patch.setattr(copying, "_keep", lambda model, owned, known: None)
    case = _case(lambda self, x, y: None)
    tracker = Tracker()
    case.model.layers[0].register_forward_hook(tracker.note)
    return case


class Tracker:
    def __init__(self) -> None:
        self.calls = 0

    def note(self, *call: Any) -> None:
        self.calls += 1


def backward_of_a_function(patch: Patch) -> Case:
    def apply(self: Any, *args: Any) -> Any:
        class Context:
            def save_for_backward(self, *tensors: Tensor) -> None:
                pass

        return self.function.forward(Context(), *args)

    patch.setattr(targets.ApplyFunction, "__call__", apply)
    return _case(lambda self, x, y: Scaled.apply(y, self.linear.bias))


def results_along_their_rows(patch: Patch) -> Case:
    join = scatter._join

    def join_along_0(name: str, column: Any, found: Any, sizes: Any) -> Any:
        dim = None if found.dim is None else 0
        return join(name, column, replace(found, dim=dim), sizes)

    patch.setattr(scatter, "_join", join_along_0)
    return Case(Turned().to(D), lambda n: (rows(n),))


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh()).t()


def buffers(patch: Patch) -> Case:
    _without(patch, lambda each: "_buffers" in each.path)

    def act(self: Any, x: Tensor, y: Tensor) -> None:
        self.mean = 0.5 * self.mean.detach() + self.linear.weight.mean(0)

    case = _case(act)
    case.model.layers[2].register_buffer("mean", torch.zeros(WIDTH, dtype=D))
    return case


def replaced_buffers(patch: Patch) -> Case:
    patch.setattr(runtime, "renew_buffers", lambda model, names: None)

    def act(self: Any, x: Tensor, y: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return y * self.calls

    case = _case(act)
    case.model.layers[2].register_buffer("calls", torch.zeros((), dtype=D))
    return case


def functions_among_the_arguments(patch: Patch) -> Case:
    patch.setattr(capture, "objects_of", lambda call: {})
    seen: list[Tensor] = []

    def note(y: Tensor) -> None:
        seen.append(y.detach())

    return _case(lambda self, x, y, function: function(y), note)


MENDS = {
    (functions_among_the_arguments, "variable of seen[0]"),
    (stored_values, "attribute of layers.2.loss"),
    (written_inputs, "input of others[0]"),
    (modes, "mode of layers.2.norm"),
    (frozen_parameters, "requires_grad of layers.2.last.weight"),
    (hooks_of_the_user, "hook of layers.0.forward_hooks[0].self.calls"),
    (backward_of_a_function, "gradient of layers.2.linear.bias"),
    (results_along_their_rows, "output"),
    (buffers, "buffer of layers.2.mean"),
    (replaced_buffers, "buffer of layers.2.calls before the call"),
}
CUT = {results_along_their_rows: 2}  # micro-batches


@pytest.mark.matrix(2)
@pytest.mark.parametrize(("mend", "named"), sorted(MENDS, key=lambda each: each[0].__name__))
def test_verify_finds(mend: Callable[[Patch], Case], named: str) -> None:
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        case = mend(patch)
        example, spec = case.example(6), TWO | {"microbatches": CUT.get(mend, 1)}
        without = placer.verify(case.model, spec, copy.deepcopy(example))
    assert not without.ok
    assert named in {str(c).partition(":")[0] for c in without.different}, without
    assert placer.verify(case.model, spec, example).ok
