"""A dict that is the only argument of forward is given as it is, like a single tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import placer


class OnBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, batch: Any) -> Any:
        return {"logits": self.b(torch.relu(self.a(batch["image"])) + batch["more"]["bias"])}


class OnNames(OnBatch):
    def forward(self, image: Any, more: Any = None) -> Any:
        return super().forward({"image": image, "more": more})


def _loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output["logits"], target)


def _batch() -> dict[str, Any]:
    rows = torch.randn(6, 4, dtype=torch.float64)
    return {"image": rows, "more": {"bias": torch.ones(6, 4, dtype=torch.float64)}, "name": "x"}


SPEC = {"devices": ["cpu:0", "cpu:1"], "layers": {"a": "cpu:0", "b": "cpu:1"}, "microbatches": 3}


def test_call_and_step_are_those_of_the_model() -> None:
    model, batch, target = OnBatch().double(), _batch(), torch.tensor([0, 1, 1, 0, 1, 0])
    placed = placer.compile(model, SPEC, batch)
    assert torch.equal(placed(batch)["logits"], model(batch)["logits"])
    loss = placed.step(batch, target=target, loss_fn=_loss)
    expected = _loss(model(batch), target)
    expected.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    for ours, theirs in zip(placed.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-14)


def test_every_function_takes_it() -> None:
    model, batch = OnBatch().double(), _batch()
    assert placer.verify(model, SPEC, batch).ok
    assert placer.simulate(model, placer.make_plan(model, SPEC, batch), batch).step_ok
    assert placer.auto_spec(model, batch, devices=["cpu:0"]).devices[0].name == "cpu:0"


@pytest.mark.parametrize("names", [("image",), ("imag",), ("image", "more")])
def test_a_dict_with_names_of_arguments_is_asked_about(names: tuple[str, ...]) -> None:
    """It may have been meant as keywords."""
    batch = {name: torch.ones(6, 4) for name in names}
    with pytest.raises(
        placer.CaptureError, match=r"write kwargs=\{\.\.\.\} if .* or \(batch,\) if"
    ):
        placer.make_plan(OnNames(), SPEC, batch)
