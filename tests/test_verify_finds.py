"""``verify`` notices when placer stops doing what keeps a placed model equal: each mend is taken out once."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from kinds import ALIAS, WIDTH, Case, Chain, D, Part, Scaled, rows
from state_cases import ActNorm
from torch import Tensor, nn

import placer
from placer.emit import StagedModel
from placer.executor import runtime, scatter
from placer.program import FakeConverter, capture, row_check, targets
from placer.program.objects import copying
from placer.program.recording import recorder, watch

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


def containers(patch: Patch) -> Case:
    _without(patch, lambda each: each.root == "model" and each.path[1] == "losses")

    def act(self: Any, x: Tensor, y: Tensor) -> None:
        self.losses.append(y.square().mean())

    return _case(act, losses=[])


SEEN: dict[str, Any] = {"last": None}


def global_variables(patch: Patch) -> Case:
    _without(patch, lambda each: each.root == "code")

    def act(self: Any, x: Tensor, y: Tensor) -> None:
        SEEN["last"] = y.detach()

    return _case(act)


def entries_of_the_caller_s_dict(patch: Patch) -> Case:
    _without(patch, lambda each: each.root == "call")

    def act(self: Any, x: Tensor, y: Tensor, found: dict[str, Tensor]) -> None:
        found["hidden"] = y

    return _case(act, {})


def flags_of_inputs(patch: Patch) -> Case:
    _without(patch, lambda each: each.root == "input")

    def act(self: Any, x: Tensor, y: Tensor, other: Tensor) -> Tensor:
        return y * other.requires_grad_()

    return Case(_case(act).model, lambda n: (rows(n), rows(n)))


def _as_deepcopy_would(patch: Patch) -> None:
    """Let functions and weak references in the placed model refer to the original."""

    module = sys.modules["placer.emit.materialize"]
    patch.setattr(module, "copy_module", lambda model, memo, **kept: copy.deepcopy(model, memo))


def wrapped_forwards(patch: Patch) -> Case:
    _as_deepcopy_would(patch)
    case = _case(lambda self, x, y: None)
    part = case.model.layers[2]
    forward = part.linear.forward
    part.linear.forward = lambda x: forward(x) * 2
    return case


def weak_references(patch: Patch) -> Case:
    _as_deepcopy_would(patch)

    def act(self: Any, x: Tensor, y: Tensor) -> None:
        self.owner().calls += 1

    case = _case(act, calls=0)
    part = case.model.layers[2]
    part.owner = weakref.ref(part)
    return case


def aliases_of_apply(patch: Patch) -> Case:
    patch.setattr(watch, "override_function_forwards", lambda forward: nullcontext())
    return _case(lambda self, x, y: ALIAS(y, self.linear.bias))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.b(self.a(x).tanh() - y)


def a_tensor_for_two_arguments(patch: Patch) -> Case:
    copies = FakeConverter.copies

    def one(self: FakeConverter, fakes: list[Tensor]) -> list[Tensor]:
        made: dict[int, Tensor] = {}
        pairs = zip(fakes, copies(self, fakes), strict=True)
        return [made.setdefault(id(fake), each) for fake, each in pairs]

    patch.setattr(FakeConverter, "inputs", lambda self, given: list(map(self.tensor, given)))
    patch.setattr(FakeConverter, "copies", one)

    def example(count: int) -> tuple[Tensor, Tensor]:
        x = rows(count)
        return x, x

    return Case(Twice().to(D), example)


def paths_of_the_encoder(patch: Patch) -> Case:
    patch.setattr(recorder, "find_padding", lambda *given: None)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)

    class Pads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.last = nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, WIDTH)
            self.register_buffer("ends", torch.tensor([False, False, True]))

        def forward(self, x: Tensor) -> Tensor:
            padding = self.ends.expand(x.size(0), 3)
            return self.last(self.encoder(x, src_key_padding_mask=padding))

    return Case(Pads().to(D), lambda n: (rows(n, 3, WIDTH),))


def means_of_slices(patch: Patch) -> Case:
    join = scatter._join
    patch.setattr(
        scatter,
        "_join",
        lambda name, column, found, sizes: (
            column[0] if found.combination == "mean" else join(name, column, found, sizes)
        ),
    )

    def act(self: Any, x: Tensor, y: Tensor) -> None:
        self.loss = y.square().mean()

    return _case(act, loss=None)


def weights_that_the_first_batch_sets(patch: Patch) -> Case:
    patch.setattr(row_check.RowCheck, "_of_state", lambda *given: [])
    norm = ActNorm(WIDTH)
    return _case(lambda self, x, y: self.norm(y), norm=norm)


def rows_that_are_mixed(patch: Patch) -> Case:
    found = row_check.find_rows

    def unmixed(*given: Any, **others: Any) -> Any:
        return replace(found(*given, **others), mixing=())

    patch.setattr(row_check, "find_rows", unmixed)
    return _case(lambda self, x, y: y - y.mean(0))


def branches_by_values(patch: Patch) -> Case:
    patch.setattr(row_check.RowCheck, "_mixing", lambda *given: [])
    return _case(lambda self, x, y: y * 3 if x[0, 0] > 0 else y)


def the_very_tensors(patch: Patch) -> Case:
    patch.setattr(StagedModel, "same_objects", lambda self, leaves, *given: list(leaves))

    class Returns(Twice):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return super().forward(x, y), y

    return Case(Returns().to(D), lambda n: (rows(n), rows(n)))


MENDS = {
    (containers, "attribute of layers.2.losses[0]"),
    (global_variables, f"variable of {__name__}.SEEN.last"),
    (entries_of_the_caller_s_dict, "input of others[0].hidden"),
    (flags_of_inputs, "gradient of input others[0]"),
    (wrapped_forwards, "gradient of layers.2.linear.weight"),
    (weak_references, "attribute of layers.2.calls"),
    (aliases_of_apply, "gradient of layers.2.linear.bias"),
    (a_tensor_for_two_arguments, "output"),
    (paths_of_the_encoder, "output"),
    (means_of_slices, "attribute of layers.2.loss"),
    (weights_that_the_first_batch_sets, "parameter of layers.2.norm.scale"),
    (rows_that_are_mixed, "output"),
    (branches_by_values, "output"),
    (the_very_tensors, "identity of output of [1]"),
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
REFUSED = {weights_that_the_first_batch_sets, rows_that_are_mixed, branches_by_values}
# Micro-batches
CUT = {
    results_along_their_rows: 2,
    means_of_slices: 2,
    weights_that_the_first_batch_sets: 2,
    rows_that_are_mixed: 2,
    branches_by_values: 2,
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
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
    if mend in REFUSED:
        with pytest.raises(placer.CaptureError):
            placer.verify(case.model, spec, example)
    else:
        assert placer.verify(case.model, spec, example).ok
