"""Methods of the model besides ``forward``, called on the placed model."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import placer

STAGES = {"devices": ["cuda:0", "cuda:1"], "layers": {"enc": "cuda:0", "dec": "cuda:1"}}
SPLIT = {**STAGES, "devices": [f"cuda:{i}" for i in range(4)], "replicas": 2, "microbatches": 2}


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = nn.Linear(6, 8), nn.Linear(4, 6)
        self.drop = nn.Dropout(0.0)
        self.seen: list[int] = []

    def encode(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """The mean and the logarithm of the variance."""
        mean, log = (self.enc(x) * scale).chunk(2, 1)
        self.last_mean = mean
        return mean, log.tanh()

    def decode(self, z: Tensor) -> dict[str, Tensor]:
        return {"image": self.dec(self.drop(z))}

    def describe(self, times: int = 1) -> str:
        return "coder" * times

    def sample_twice(self, x: Tensor) -> Tensor:
        return self(x) + self(x)

    def noisy(self, x: Tensor, generator: torch.Generator, settings: Any) -> Tensor:
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        return self(x) * noise * settings.scale

    def peek(self, x: Tensor) -> Tensor:
        return self.enc(x) if x.sum() > 0 else -self.enc(x)

    def mixed(self, x: Tensor) -> Tensor:
        return self(self.enc(x)[:, :6])

    def late(self, x: Tensor) -> Tensor:
        found: Tensor = self.enc(x)
        return found if found.sum() > 0 else -found

    def largest(self, x: Tensor) -> Tensor:
        found: Tensor = self.enc(x).amax()
        return found

    def forward(self, x: Tensor) -> Tensor:
        mean, log = self.encode(x)
        return self.decode(mean * log.exp())["image"]


def _pair(spec: dict[str, Any]) -> tuple[Any, Any, Tensor]:
    torch.manual_seed(0)
    plain = Coder().double()
    x = torch.randn(8, 6, dtype=torch.float64)
    return placer.compile(copy.deepcopy(plain), spec, x, run_on="cpu"), plain, x


def test_a_result_that_cannot_be_joined_is_named_with_its_method() -> None:
    placed, _, x = _pair(SPLIT)
    with pytest.raises(placer.PlacerError, match=r"^result of largest: has no row"):
        placed.largest(x)


@pytest.mark.parametrize("spec", [STAGES, SPLIT], ids=["stages", "split"])
def test_methods_run_on_the_placed_stages(spec: dict[str, Any]) -> None:
    placed, plain, x = _pair(spec)
    for mode, inputs in ((True, x), (True, torch.randn_like(x)), (False, x[:5])):
        for model in (placed, plain):
            model.train(mode)
            model.zero_grad()
            mean, log = model.encode(inputs, scale=0.5)
            image = model.decode(z=mean)["image"]
            model.found = mean, log, image
            (image.square().mean() + log.square().mean()).backward()
        torch.testing.assert_close(placed.found, plain.found)
        torch.testing.assert_close(placed.last_mean, plain.last_mean)
        for (name, a), b in zip(placed.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, msg=name)
        torch.testing.assert_close(placed(inputs), plain(inputs))


def test_methods_that_call_no_layers_before_they_look_at_values_run_as_they_were_written() -> None:
    placed, plain, x = _pair(SPLIT)
    for inputs in (x, -x):
        torch.testing.assert_close(placed.sample_twice(inputs), plain.sample_twice(inputs))
        torch.testing.assert_close(placed.peek(inputs), plain.peek(inputs))


def test_methods_may_get_objects() -> None:
    placed, plain, x = _pair(STAGES)
    for seed in (1, 2):
        settings = SimpleNamespace(scale=seed)
        found = [m.noisy(x, torch.Generator().manual_seed(seed), settings) for m in (placed, plain)]
        torch.testing.assert_close(*found)


def test_a_placed_model_is_one_of_the_models_class() -> None:
    placed, plain, x = _pair(STAGES)
    assert isinstance(placed, Coder)
    assert isinstance(placed, placer.PlacedModule)
    assert type(placed).__name__ == "Coder"
    assert type(type(placed)()) is Coder
    placed.note = "set on the placed module"
    for other in (copy.deepcopy(placed), pickle.loads(pickle.dumps(placed))):
        assert type(other) is type(placed)
        assert other.note == placed.note
        other.note = "another"
        torch.testing.assert_close(other(x), plain(x))
    assert placed.note == "set on the placed module"


def test_a_name_of_ours_in_the_class_is_an_error() -> None:
    class Steps(Coder):
        def step(self) -> None: ...

    with pytest.raises(placer.CaptureError, match=r"Steps\.step: placed modules have an attribute"):
        placer.compile(Steps(), STAGES, torch.randn(8, 6), run_on="cpu")


def test_a_method_keeps_its_name_and_documentation() -> None:
    placed, _, _ = _pair(STAGES)
    assert placed.encode.__name__ == "encode"
    assert placed.encode.__doc__ == "The mean and the logarithm of the variance."
    assert placed.describe(2) == "codercoder"


def test_a_method_that_cannot_be_captured_is_an_error_that_names_the_line() -> None:
    placed, plain, x = _pair(STAGES)
    with pytest.raises(placer.CaptureError, match=r"mixed: .* calls the model itself"):
        placed.mixed(x)
    with pytest.raises(
        placer.CaptureError, match=r"late: .*value of a tensor \(.*test_methods.py:5"
    ):
        placed.late(x)
    with pytest.raises(placer.CaptureError, match=r"encode has no argument 'scal'(.|\n)*'scale'"):
        placed.encode(x, scal=1.0)
    with pytest.raises(placer.CaptureError, match=r"encode: .* and 'object'"):
        placed.encode(x, scale=object())
    torch.testing.assert_close(placed(x), plain(x))
