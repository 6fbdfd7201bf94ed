"""Results that are objects of classes made inside of a function, which pickle does not find."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from oracle import assert_close
from torch import Tensor, nn

import placer


def test_a_class_of_a_function() -> None:
    @dataclass
    class Output:
        logits: Tensor
        hidden: list[Tensor]
        name: str = "net"

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Output:
            hidden = self.first(x)
            return Output(self.last(hidden), [hidden])

    model, x = Net().double(), torch.randn(4, 4, dtype=torch.float64)
    layers = {"first": "cpu:0", "last": "cpu:1"}
    spec = {"devices": ["cpu:0", "cpu:1"], "layers": layers, "microbatches": 2}
    placed = placer.compile(model, spec, x)
    found, wanted = placed(x), model(x)
    assert type(found) is Output and found.name == "net"
    assert_close(found.logits, wanted.logits, "logits")
    assert_close(found.hidden[0], wanted.hidden[0], "hidden")
    placed.step(x, loss_fn=lambda output: output.logits.square().mean())
    wanted.logits.square().mean().backward()
    assert_close(placed.get_parameter("first.weight").grad, model.first.weight.grad, "gradient")


class Lazy(nn.Module):
    """It returns what cannot be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> object:
        return (layer(x) for layer in [self.layer])


def test_what_cannot_be_kept_is_said_and_not_blamed_on_the_inputs() -> None:
    with pytest.raises(placer.CaptureError, match="returns an object of type generator") as error:
        placer.compile(Lazy(), {"devices": ["cpu:0"]}, torch.ones(2, 4))
    assert "example inputs" not in str(error.value)
