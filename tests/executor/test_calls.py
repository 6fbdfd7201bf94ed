"""A placed model called in other ways than it was captured, and with hooks put on it since."""

from __future__ import annotations

import copy
import enum
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from oracle import assert_close, mean_square
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten_with_path
from torch.utils.flop_counter import FlopCounterMode

import placer
from placer import PlacedModule


class Aux(enum.Enum):
    NO, YES = False, True

    def __bool__(self) -> bool:
        return self.value


class Reader(nn.Module):
    """Attends over what it has seen before (a cache), under a mask, and may compute its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.read = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.aux = nn.Linear(8, 2)
        self.head = nn.Linear(8, 11)

    def forward(
        self,
        ids: Tensor,
        past: tuple[Tensor, ...] | None = None,
        *,
        mask: Tensor | None = None,
        labels: Tensor | None = None,
        with_aux: bool | Aux = False,
        scale: float = 1.0,
    ) -> dict[str, Any]:
        x, cache = self.table(ids) * scale, []
        for i, read in enumerate(self.read):
            seen = x if past is None else torch.cat([past[i], x], 1)
            cache.append(seen)
            scores = x @ seen.transpose(1, 2)
            if mask is not None:
                scores = scores.masked_fill(~mask[:, None], -1e9)
            x = x + read(scores.softmax(-1) @ seen)
        logits = self.head(x)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        aux = {"aux": self.aux(x)} if with_aux else {}
        return {"logits": logits, "loss": loss, "cache": tuple(cache), **aux}


def _ids(rows: int = 4, length: int = 5) -> Tensor:
    return torch.randint(0, 11, (rows, length))


def _pair(**fields: Any) -> tuple[PlacedModule, nn.Module]:
    torch.manual_seed(0)
    model = Reader().double()
    layers = {"table": "cpu:0", "read.0": "cpu:0", "read.1": "cpu:1", "head": "cpu:1"}
    spec = {"devices": ["cpu:0", "cpu:1"], "layers": layers, **fields}
    return placer.compile(model, spec, (_ids(),)), model


def _same(placed: PlacedModule, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    results = []
    for module in (model, placed):
        module.zero_grad()
        results.append(module(*args, **kwargs))
        mean_square(results[-1]).backward()
    plain, ours = results
    values = [tree_flatten_with_path(result) for result in (plain, ours)]
    assert values[0][1] == values[1][1]
    for (path, expected), (_, found) in zip(values[0][0], values[1][0], strict=True):
        assert_close(found, expected, str(path))
    for (name, a), b in zip(placed.named_parameters(), model.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if b.grad is not None:
            assert_close(a.grad, b.grad, name)
    return ours


def _doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


@pytest.mark.matrix(1)
@pytest.mark.parametrize("fields", [{}, {"replicas": 2, "microbatches": 2}], ids=["one", "cut"])
def test_arguments_that_were_not_given_when_it_was_captured(fields: dict[str, Any]) -> None:
    placed, model = _pair(**fields)
    ids = _ids()
    mask = torch.rand(4, 5) < 0.7
    _same(placed, model, ids, mask=mask)
    _same(placed, model, ids=ids, with_aux=True)
    _same(placed, model, ids, with_aux=Aux.YES)
    _same(placed, model, ids, with_aux=Aux.NO)
    cache = _same(placed, model, ids)["cache"]
    past = tuple(x.detach() for x in cache)
    _same(placed, model, _ids(4, 1), past)
    past = tuple(torch.cat([x, x], 1) for x in past)  # a longer one is the same call
    _same(placed, model, _ids(4, 2), past)
    if not fields:  # of a mean, cuts give the mean
        _same(placed, model, ids, labels=ids)


def test_a_step_with_other_arguments() -> None:
    placed, model = _pair(microbatches=2, schedule="1F1B")
    ids, mask = _ids(), torch.rand(4, 5) < 0.7
    loss = placed.step(ids, mask=mask, loss_fn=lambda out: out["logits"].square().mean())
    expected = model(ids, mask=mask)["logits"].square().mean()
    expected.backward()
    assert_close(loss, expected.detach(), "loss")
    for (name, a), b in zip(placed.named_parameters(), model.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if b.grad is not None:
            assert_close(a.grad, b.grad, name)


def test_tensors_are_read_by_name_in_whatever_order_and_number_they_come() -> None:
    """Also right after a call that was almost the same."""

    class Ratio(nn.Module):
        def forward(self, a: Tensor, b: Tensor, c: Tensor | None = None, d: float = 2.0) -> Tensor:
            return a / b * d + (0 if c is None else c)

    model = Ratio()
    a, b, c = torch.rand(3, 4, 5) + 1
    placed = placer.compile(model, {"devices": ["cpu:0"]}, (a, b))
    calls: list[tuple[list[Any], dict[str, Any]]] = [
        ([a, b], {}), ([b, a], {}), ([a], {"b": b}), ([], {"b": a, "a": b}), ([a, b, c], {}),
        ([a, b], {"c": c}), ([a, b], {"c": None}), ([a, b], {}), ([a, b], {"d": 3.0}), ([a, b], {}),
    ]  # fmt: skip
    for args, kwargs in calls * 2:
        assert_close(placed(*args, **kwargs), model(*args, **kwargs), f"{len(args)} {list(kwargs)}")
    for wrong in ([a], [a, b, c, 2.0, c], [a[0], b]):
        with pytest.raises(placer.CaptureError):
            placed(*wrong)


def test_objects_and_other_dimensions_are_errors_that_name_the_argument() -> None:
    placed, _ = _pair()
    with pytest.raises(placer.CaptureError, match="past: <object"):
        placed(_ids(), object())
    with pytest.raises(placer.CaptureError, match="ids: a tensor of 1 dimensions"):
        placed(_ids()[0])


def test_a_numpy_array_is_told_to_be_a_tensor() -> None:
    placed, _ = _pair()
    with pytest.raises(placer.CaptureError, match=r"ids: is a numpy array(.|\n)*from_numpy\(ids\)"):
        placed(_ids().numpy())


def test_keywords_of_the_loss_or_of_step_are_told_where_they_belong() -> None:
    placed, _ = _pair()
    with pytest.raises(placer.CaptureError) as refused:
        placed.step(_ids(), loss_fn=lambda out: out["logits"].mean(), ignore_index=255)
    assert "forward has no argument 'ignore_index'" in str(refused.value)
    assert "functools.partial(loss_fn, ignore_index=255)" in str(refused.value)
    with pytest.raises(placer.CaptureError, match="inference takes the whole batch"):
        placed(_ids(), own_rows=True)
    linear = placer.compile(nn.Linear(3, 3), {"devices": ["cpu:0"]}, torch.ones(2, 3))
    with pytest.raises(placer.CaptureError, match="pass the target as target="):
        linear.step(torch.ones(2, 3), torch.ones(2, 3), loss_fn=F.mse_loss)


def test_hooks_put_on_a_module_that_was_looked_into() -> None:
    placed, model = _pair()
    ids, shapes = _ids(), []
    _same(placed, model, ids)
    handles = []
    for part in (placed, model):
        handles.append(part.read[0].register_forward_hook(_doubled))
        part.read[1].register_full_backward_hook(lambda m, gi, go: shapes.append(go[0].shape))
    _same(placed, model, ids)
    assert shapes == [(4, 5, 8)] * 2
    twin = copy.deepcopy(placed)
    for handle in handles:
        handle.remove()
    _same(placed, model, ids)
    assert not torch.allclose(twin(ids)["logits"], model(ids)["logits"])


def test_hooks_of_all_modules_are_refused_in_calls_and_captures() -> None:
    """What contains other modules is not called by a placed model; torch's own hooks only look."""
    placed, model = _pair()
    handle = nn.modules.module.register_module_forward_hook(_doubled)
    calls: tuple[Any, ...] = (
        lambda: placed(_ids()),
        lambda: placed.step(_ids(), loss_fn=mean_square),
        lambda: placer.compile(model, {"devices": ["cpu"]}, _ids()),
    )
    for call in calls:
        with pytest.raises(placer.CaptureError, match="_doubled: is a hook of all modules"):
            call()
    handle.remove()
    with FlopCounterMode(display=False) as counter:
        _same(placed, model, _ids())
    assert counter.get_total_flops()


def test_hooks_come_back_with_a_pickled_module() -> None:
    placed, model = _pair()
    for part in (placed, model):
        part.read[0].register_forward_hook(_doubled)
        part.head.register_forward_hook(_doubled)
    loaded = pickle.loads(pickle.dumps(placed.eval()))
    _same(loaded, model.eval(), _ids())
    for module in (loaded.read[0], loaded.head):
        module._forward_hooks.clear()
    assert not torch.allclose(loaded(_ids())["logits"], model(_ids())["logits"])


class CallsItself(nn.Linear):
    """Has a ``__call__`` of its own."""

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = super().__call__(x * 2)
        return result


def test_step_refuses_a_model_with_a_call_of_its_own() -> None:
    net, x = CallsItself(4, 4), torch.randn(8, 4)
    placed = placer.compile(net, {"devices": ["cuda:0"]}, x, run_on="cpu")
    torch.testing.assert_close(placed(x), net(x))
    with pytest.raises(placer.PlacerError, match="has a __call__ of its own"):
        placed.step(x, target=x, loss_fn=nn.functional.mse_loss)


def test_a_forward_that_is_assigned_is_copied_and_refused_in_step() -> None:
    net, x = nn.Linear(4, 4), torch.randn(8, 4)
    placed = placer.compile(net, {"devices": ["cpu"]}, x)
    for module in (net, placed):
        module.forward = partial(F.mse_loss, target=torch.zeros(8, 4))
        for twin in (copy.copy(module), copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert_close(twin(x), x.square().mean(), "a copy")
    with pytest.raises(placer.PlacerError, match="has a forward of its own"):
        placed.step(x, target=x, loss_fn=F.mse_loss)
