"""The fast path of torch's encoder layers, in eval mode without gradients: the plain model's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from other_inputs import WAYS, Arguments, assert_equal_calls
from torch import Tensor, nn

from placer import CaptureError
from placer.program import lower

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")


def layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)


class Net(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.first, self.inside, self.last = nn.Linear(8, 8), inside, nn.Linear(8, 3)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.last(self.inside(self.first(x), src_key_padding_mask=padding))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inside = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Any:
        x = self.first(x)
        return self.inside(x, x, x, key_padding_mask=padding)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: Net(nn.TransformerEncoder(layer(), 2)),
    "encoder with a norm": lambda: Net(nn.TransformerEncoder(layer(), 2, nn.LayerNorm(8))),
    "encoder without mask check": lambda: Net(nn.TransformerEncoder(layer(), 2, mask_check=False)),
    "encoder without nested tensors": lambda: Net(
        nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False)
    ),
    "one layer": lambda: Net(layer()),
    "attention": Attends,
}


def padded(*lengths: int, left: bool = False) -> Callable[[], Arguments]:
    def make() -> Arguments:
        padding = torch.arange(6)[None] >= torch.tensor(lengths)[:, None]
        padding = padding.flip(1) if left else padding
        return torch.randn(len(lengths), 6, 8, dtype=torch.float64), padding

    return make


CALLS = [padded(6, 4, 3, 5), padded(3, 6, 2, 1), padded(3, 4, 2, 1), padded(2, 6, 5, 4, 1, 2)]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_padding_is_what_it_is_in_the_plain_model(name: str, way: str, train: bool) -> None:
    assert_equal_calls(MODELS[name], CALLS, way, train=train)


def test_padding_before_the_sequences_has_no_fast_path() -> None:
    calls = [*CALLS[:2], padded(6, 4, 3, 5, left=True)]
    assert_equal_calls(MODELS["encoder"], calls, train=False)


def test_a_model_that_is_an_encoder() -> None:
    def make() -> nn.Module:
        return nn.TransformerEncoder(layer(), 2, nn.LayerNorm(8))

    def call(padding: Callable[[], Arguments]) -> Callable[[], Arguments]:
        return lambda: ((given := padding())[0], None, given[1])

    assert_equal_calls(make, [call(each) for each in CALLS], train=False)


def test_frozen_weights_have_the_fast_path_with_gradients_enabled() -> None:
    model = MODELS["encoder"]().double().eval().requires_grad_(False)
    program = lower(model, CALLS[0]())
    assert any("fill_padding" in name for name in program.order)


class Nested(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        nested = torch.nested.as_nested_tensor([x[0], y[0]])
        return torch.nested.to_padded_tensor(nested, 0.0)


def test_nested_tensors_of_the_model_are_refused() -> None:
    with pytest.raises(CaptureError, match="cannot run this operator without data"):
        lower(Nested(), (torch.randn(2, 6, 8), torch.randn(2, 5, 8)))
