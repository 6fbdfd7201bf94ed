"""The judge of the model zoo: it passes correct models and reports wrong ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks.zoo.compare import Failed, compare, train
from benchmarks.zoo.judge import judge
from benchmarks.zoo.subject import Subject, positional


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)), nn.BatchNorm1d(8))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self.drop(self.layers(x))}


def test_a_sound_model_passes() -> None:
    verdict = judge(Subject(name="net", build=Net, call=positional((2, 8))))
    assert verdict.problem == ""
    assert verdict.passed
    assert (verdict.dtype, verdict.other_batch) == ("float64", "equal")
    assert verdict.pieces == 8
    assert 0.5 <= verdict.best_share <= verdict.largest_share < 0.7


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        (Subject(name="a", build=lambda: 1 / 0, call=positional((2, 8))), "build: traceback"),
        (Subject(name="b", build=Net, call=positional((2, 7))), "plan for 2 stages from meta"),
        (
            Subject(name="c", build=lambda: nn.Linear(8, 8), call=positional((2, 8))),
            "split: 1 pieces, at least 5",
        ),
    ],
)
def test_what_does_not_pass_says_where(subject: Subject, problem: str) -> None:
    verdict = judge(subject)
    assert not verdict.passed
    assert verdict.problem.startswith(problem)


@pytest.mark.parametrize("kind", ["gradient of layers.0.weight", "buffer layers.6.running_mean"])
def test_one_wrong_tensor_is_seen(kind: str) -> None:
    torch.manual_seed(0)
    model, call = Net().double(), ((torch.randn(2, 8, dtype=torch.float64),), {})
    expected = train(model, call)
    found = train(model, call)
    compare(found, expected, 1e-9)
    value = found[kind]
    assert value is not None
    found[kind] = value.roll(1, 0)
    with pytest.raises(Failed, match=f"{kind} differs from eager"):
        compare(found, expected, 1e-9)


def test_only_a_gradient_that_is_rounding_may_be_off_as_much_as_eager_is() -> None:
    true = {"gradient of a": torch.tensor([1.0]), "gradient of b": torch.tensor([3e-7])}
    moved = {"gradient of a": torch.tensor([1.1]), "gradient of b": torch.tensor([-2e-7])}
    noise = {**true, "gradient of b": torch.tensor([-1e-7])}
    compare(noise, true, 1e-4, lambda: moved)
    with pytest.raises(Failed, match="gradient of b"):
        compare(noise, true, 1e-4)
    with pytest.raises(Failed, match="gradient of b"):
        compare({**true, "gradient of b": torch.tensor([1e-5])}, true, 1e-4, lambda: moved)
    with pytest.raises(Failed, match="gradient of a"):
        compare({**true, "gradient of a": torch.tensor([1.05])}, true, 1e-4, lambda: moved)
