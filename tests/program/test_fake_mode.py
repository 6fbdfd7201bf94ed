"""`placer.program.fake.mode.FakeMode` gives what torch's own fake tensor mode gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException

from placer._torch import DispatchMode
from placer.program.fake.mode import CPP_KERNELS, CPP_VIEWS, FakeMode, detach_fake
from placer.program.fake.shapes import LIST_RULES, SHAPE_RULES

aten = torch.ops.aten
_X, _ROW = (4, 6, 8), (8,)
_IMAGE, _C, _STRIDE = (2, 4, 6, 7), (4,), ([2, 1], [0, 1], [1, 2])
_LIST = [_X, _ROW]
CALLS: dict[Any, tuple[Any, ...]] = {
    aten.view.default: (_X, [24, 8]),
    aten._unsafe_view.default: (_X, [4, 48]),
    aten.slice.Tensor: (_X, 1, 1, 5, 2),
    aten.select.int: (_X, 1, -1),
    aten.unsqueeze.default: (_X, 1),
    aten.squeeze.dim: ((4, 1, 8), 1),
    aten.permute.default: (_X, [2, 0, 1]),
    aten.transpose.int: (_X, 0, 2),
    aten.t.default: ((4, 6),),
    aten.expand.default: ((4, 1, 8), [4, 3, 8]),
    aten.as_strided.default: ((4, 6), [2, 2], [1, 2], 3),
    aten.detach.default: ((4, 6),),
    aten.alias.default: ((4, 6),),
    aten.unbind.int: (_X, 1),
    aten.split.Tensor: (_X, 4, 1),
    aten.split_with_sizes.default: (_X, [1, 3, 2], 1),
    aten.clone.default: ((4, 6),),
    aten.bmm.default: ((3, 4, 5), (3, 5, 6)),
    aten.mm.default: ((4, 5), (5, 6)),
    aten._softmax.default: ((4, 6), -1, False),
    aten.add.Tensor: (_X, _X),
    aten.sub.Tensor: (_X, _X),
    aten.mul.Tensor: (_X, _X),
    aten.div.Tensor: (_X, _X),
    aten.mul.Scalar: (_X, 2),
    aten.div.Scalar: (_X, 2),
    aten.neg.default: (_X,),
    aten.relu.default: (_X,),
    aten.threshold_backward.default: (_X, _X, 0),
    aten.gelu.default: (_X,),
    aten.gelu_backward.default: (_X, _X),
    aten.silu.default: (_X,),
    aten.silu_backward.default: (_X, _X),
    aten.sigmoid.default: (_X,),
    aten.sigmoid_backward.default: (_X, _X),
    aten.tanh.default: (_X,),
    aten.tanh_backward.default: (_X, _X),
    aten.convolution.default: (_IMAGE, (8, 4, 3, 3), _ROW, *_STRIDE, False, [0, 0], 1),
    aten.native_batch_norm.default: (_IMAGE, _C, _C, _C, _C, True, 0.1, 1e-5),
    aten.cudnn_batch_norm_backward.default: (_IMAGE, _IMAGE, *(_C for _ in range(5)), 1e-5, (0,)),
    aten.addmm.default: (_ROW, (4, 6), (6, 8)),
    aten.sum.dim_IntList: (_X, [0, -1], True),
    aten._to_copy.default: (_X,),
    aten.zeros_like.default: (_X,),
    aten.add_.Tensor: (_X, _X),
    aten.sub_.Tensor: (_X, _ROW),
    aten.mul_.Tensor: (_X, 2),
    aten.div_.Tensor: (_X, ()),
    aten.copy_.default: (_X, (4, 1, 8)),
    aten.fill_.Scalar: (_X, 0.5),
    aten.zero_.default: (_X,),
    aten.relu_.default: (_X,),
    aten.bernoulli_.float: (_X, 0.5),
    aten._foreach_add_.Scalar: (_LIST, 1e-8),
    aten._foreach_add_.List: (_LIST, _LIST),
    aten._foreach_mul_.Scalar: (_LIST, 0.9),
    aten._foreach_div_.ScalarList: (_LIST, [2.0, 3]),
    aten._foreach_lerp_.Scalar: (_LIST, _LIST, 0.1),
    aten._foreach_addcmul_.Scalar: (_LIST, _LIST, _LIST, 0.5),
    aten._foreach_addcdiv_.ScalarList: (_LIST, _LIST, _LIST, [2.0, 3]),
    aten._foreach_sqrt.default: (_LIST,),
}
# Where a rule has to hold its tongue, or could be wrong: nothing, one row, dimensions of one,
# broadcasting, other types, parts of an answer.
CORNERS: list[tuple[Any, tuple[Any, ...]]] = [
    *((op, ((0, 3), (0, 3))) for op in (aten.add.Tensor, aten.mul.Tensor)),
    *((op, ((1, 4, 1, 1), (1, 4, 1, 1))) for op in (aten.add.Tensor, aten.gelu_backward.default)),
    *((op, (_X, _ROW)) for op in (aten.add.Tensor, aten.div.Tensor)),
    *((op, (_X, 2)) for op in (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor)),
    *((op, (_X, 2j)) for op in (aten.add.Tensor, aten.mul.Tensor, aten.mul.Scalar)),
    (aten.add.Tensor, ((), ())),
    (aten.add.Tensor, ((), _X)),
    (aten.addmm.default, ((1,), (1, 6), (6, 1))),
    (aten.addmm.default, ((4, 8), (4, 6), (6, 8))),
    (aten.addmm.default, ((1,), (4, 6), (6, 8))),
    (aten.sum.dim_IntList, (_X, [0, -1])),
    (aten.sum.dim_IntList, (_X, [])),
    (aten.sum.dim_IntList, (_X, None, True)),
    (aten.sum.dim_IntList, ((1, 6, 1), [1], True)),
    *(
        (aten.convolution.default, (x, weight, None, *_STRIDE, transposed, [0, 0], groups))
        for x, weight, transposed, groups in (
            (_IMAGE, (8, 4, 3, 3), True, 1),
            (_IMAGE, (8, 1, 3, 3), False, 4),
            (_IMAGE, (8, 2, 3, 3), False, 2),
            (_IMAGE, (8, 4, 1, 1), False, 1),
            ((2, 1, 6, 7), (8, 1, 3, 3), False, 1),
            ((1, 4, 6, 7), (1, 4, 3, 3), False, 1),
            ((2, 4, 1, 1), (8, 4, 1, 1), False, 1),
            (_IMAGE, (8, 3, 3, 3), False, 1),
            (_IMAGE, (8, 4, 9, 9), False, 1),
        )
    ),
    (
        aten.convolution.default,
        ((2, 4, 5, 6, 7), (8, 4, 3, 3, 3), _ROW, [2] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1),
    ),
    (aten.convolution.default, ((2, 4, 9), (8, 4, 3), _ROW, [2], [1], [1], False, [0], 1)),
    (aten.native_batch_norm.default, (_IMAGE, _C, _C, _C, _C, False, 0.1, 1e-5)),
    (aten.native_batch_norm.default, (_IMAGE, None, None, None, None, True, 0.1, 1e-5)),
    (aten.native_batch_norm.default, ((2, 4, 5, 6, 7), _C, _C, _C, _C, True, 0.1, 1e-5)),
    (aten.native_batch_norm.default, ((9, 4), _C, _C, _C, _C, True, 0.1, 1e-5)),
    *((op, (_X, (4, 6, 1))) for op in (aten.add.Tensor, aten.mul.Tensor)),
    *((op, ((4, 1, 8), _X)) for op in (aten.add.Tensor, aten.mul.Tensor)),
    *((op, ((4, 1, 1), (1, 6, 8))) for op in (aten.add.Tensor, aten.mul.Tensor)),
    (aten.mul.Tensor, ((4, 1, 8), (1, 1, 8))),
    (aten.mul.Tensor, ((4, 6), (3, 4, 6))),
    *((op, (_ROW, _X)) for op in (aten.add_.Tensor, aten.copy_.default)),
    *((op, ((4, 6), (4, 5))) for op in (aten.sub_.Tensor, aten.copy_.default)),
    (aten.mul_.Tensor, (_X, 2j)),
    (aten.add_.Tensor, ((0, 3), (0, 3))),
    (aten._to_copy.default, ((0, 3),)),
    (aten._foreach_add_.List, (_LIST, [_X])),
    (aten._foreach_add_.List, (_LIST, [_X, _X])),
    (aten._foreach_add_.List, ([_X, _X], [_ROW, (4, 6, 1)])),
    (aten._foreach_add_.Scalar, ([(0, 3)], 1)),
    (aten._foreach_add_.Scalar, (_LIST, 2j)),
    (aten._foreach_div_.ScalarList, (_LIST, [2.0])),
    (aten._foreach_sqrt.default, ([(), (1,)],)),
]


def _described(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_described(item) for item in value]
    if value is None:
        return None
    assert isinstance(value, FakeTensor)
    x, storage = value, value.untyped_storage().nbytes()
    return x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, storage, x.requires_grad


def _made(mode: FakeTensorMode, op: Any, call: tuple[Any, ...], kind: str) -> Any:
    """What ``op`` makes the second time, of tensors of ``kind``."""

    def make(shape: tuple[int, ...]) -> Tensor:
        if kind == "transposed" and len(shape) > 1:
            return torch.empty(shape).mT.clone().mT
        if kind == "permuted" and len(shape) > 1:
            return torch.empty(*shape[1:], shape[0]).movedim(-1, 0)
        if kind == "channels last" and len(shape) == 4:
            return torch.empty(shape).to(memory_format=torch.channels_last)
        dtype = {"double": torch.float64, "half": torch.float16, "int": torch.int64}.get(kind)
        return torch.empty(shape, dtype=dtype, requires_grad=kind == "trained")

    def given(value: Any) -> Any:
        if isinstance(value, tuple):
            return make(value)
        is_list = isinstance(value, list) and value and isinstance(value[0], tuple)
        return [make(shape) for shape in value] if is_list else value

    with mode:
        arguments = [given(value) for value in call]
        try:
            op(*arguments)
        except RuntimeError as error:
            return type(error)
        return op(*arguments)


_KINDS = ("trained", "plain", "transposed", "permuted", "channels last", "double", "half", "int")


@pytest.mark.matrix(2)
@pytest.mark.parametrize("kind", _KINDS)
def test_operators_give_the_same(kind: str) -> None:
    ours, torchs = FakeMode(), FakeTensorMode()
    for op, call in [*CALLS.items(), *CORNERS]:
        if op in (aten.view.default, aten._unsafe_view.default):
            if kind == "permuted":
                continue  # such a tensor cannot be viewed so
            if kind == "transposed":
                call = (call[0], [4, 6, 4, 2] if op is aten.view.default else [2, 2, 6, 8])
        if kind == "half" and 2j in call:  # torch warns of complex halves
            continue
        expected = _described_or_error(_made(torchs, op, call, kind))
        assert _described_or_error(_made(ours, op, call, kind)) == expected, (op, call)


def _described_or_error(value: Any) -> Any:
    return value if isinstance(value, type) else _described(value)


def test_every_operator_that_is_quick_is_tried() -> None:
    assert set(CALLS) == CPP_VIEWS | CPP_KERNELS | SHAPE_RULES.keys() | LIST_RULES.keys()


def test_a_tensor_is_not_taken_for_one_of_another_shape_that_it_had() -> None:
    for _ in range(2):
        with FakeMode():
            x = torch.empty(4, 6)
            assert (x + x).shape == (4, 6)
            x.resize_(2, 3)
            assert (x + x).shape == (2, 3)
            assert torch.empty(0).set_(x).shape == (2, 3)
            x.unsqueeze_(0)
            assert (x + x).shape == (1, 2, 3)


def test_the_default_type_counts() -> None:
    with FakeMode():
        ints = torch.empty(3, dtype=torch.int64)
        assert (ints / ints).dtype == torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert (ints / ints).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


def test_what_is_written_to_is_no_longer_known() -> None:
    with FakeMode(allow_non_fake_inputs=True):
        number = torch.tensor(4.0)
        alias = number.detach()
        assert number.item() == 4 and alias.item() == 4
        number.add_(torch.empty(()))
        for changed in (number, alias):
            with pytest.raises(DataDependentOutputException):
                changed.item()


def test_a_known_value_stays_known() -> None:
    with FakeMode(allow_non_fake_inputs=True):
        assert torch.tensor([4])[0].item() == 4


class _Heard(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.operators.append(str(func))
        return func(*args, **kwargs)


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
