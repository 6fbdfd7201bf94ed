"""`placer._torch.FakeMode` gives what torch's own fake tensor mode gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode

from placer._torch import _QUICK_OPERATORS, DispatchMode, FakeMode, detach_fake
from placer.capture.fake import FakeWorld

aten = torch.ops.aten
CALLS: dict[Any, tuple[Any, ...]] = {
    aten.view.default: ((4, 6, 8), [24, 8]),
    aten._unsafe_view.default: ((4, 6, 8), [4, 48]),
    aten.slice.Tensor: ((4, 6, 8), 1, 1, 5, 2),
    aten.select.int: ((4, 6, 8), 1, -1),
    aten.unsqueeze.default: ((4, 6, 8), 1),
    aten.squeeze.dim: ((4, 1, 8), 1),
    aten.permute.default: ((4, 6, 8), [2, 0, 1]),
    aten.transpose.int: ((4, 6, 8), 0, 2),
    aten.t.default: ((4, 6),),
    aten.expand.default: ((4, 1, 8), [4, 3, 8]),
    aten.as_strided.default: ((4, 6), [2, 2], [1, 2], 3),
    aten.detach.default: ((4, 6),),
    aten.alias.default: ((4, 6),),
    aten.clone.default: ((4, 6),),
    aten.bmm.default: ((3, 4, 5), (3, 5, 6)),
    aten.mm.default: ((4, 5), (5, 6)),
    aten._softmax.default: ((4, 6), -1, False),
}


def _described(x: Tensor) -> tuple[object, ...]:
    assert isinstance(x, FakeTensor)
    storage = x.untyped_storage().nbytes()
    return x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, storage, x.requires_grad


def _made(mode: FakeTensorMode, op: Any, call: tuple[Any, ...], *, strided: bool) -> Tensor:
    with mode:
        made = [torch.empty(a, requires_grad=True) if isinstance(a, tuple) else a for a in call]
        if strided:  # as a transposed tensor is
            made = [x.mT.clone().mT if isinstance(x, Tensor) else x for x in made]
        result: Tensor = op(*made)
        return result


@pytest.mark.parametrize("op", sorted(_QUICK_OPERATORS, key=str), ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_quick_operators_give_the_same(op: Any, strided: bool) -> None:
    call = CALLS[op]
    if strided and op in (aten.view.default, aten._unsafe_view.default):
        call = (call[0], [4, 6, 4, 2] if op is aten.view.default else [2, 2, 6, 8])
    expected = _made(FakeTensorMode(), op, call, strided=strided)
    assert _described(_made(FakeMode(), op, call, strided=strided)) == _described(expected)


def test_what_cannot_be_viewed_so_is_an_error() -> None:
    with FakeMode(), pytest.raises(RuntimeError, match="invalid for input of size"):
        torch.empty(4, 6).view(5, 5)


def test_a_known_value_stays_known() -> None:
    with FakeMode(allow_non_fake_inputs=True):
        assert torch.tensor([4])[0].item() == 4


class _Heard(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(str(func))
        return func(*args, **(kwargs or {}))


def test_no_mode_hears_of_a_fake_tensor_that_is_detached() -> None:
    with FakeMode(), _Heard() as heard:
        x = torch.empty(4, 6, requires_grad=True)[1:]
        heard.operators.clear()
        detached = detach_fake(x)
        assert heard.operators == []
        assert detached.grad_fn is None and not detached.requires_grad
        assert detached.untyped_storage() is x.untyped_storage()
        assert (detached.shape, detached.stride()) == (x.shape, x.stride())
        assert (detached.device, detached.storage_offset()) == (x.device, 6)


def test_twins_are_made_without_operators() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    model[0].weight.requires_grad_(False)
    with _Heard() as heard:
        twin = FakeWorld().module(model)
    assert not [name for name in heard.operators if "empty" in name or "detach" in name]
    for name, original in model.named_parameters():
        copy = twin.get_parameter(name)
        assert isinstance(copy, nn.Parameter) and isinstance(copy, FakeTensor) and copy.is_leaf
        assert (copy.shape, copy.stride(), copy.dtype) == (
            original.shape,
            original.stride(),
            original.dtype,
        )
        assert copy.requires_grad == original.requires_grad
    assert twin.get_buffer("1.running_mean").device.type == "cpu"
