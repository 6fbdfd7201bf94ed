"""Models that use `torch.distributions`: its checks of values are recorded, and split no model."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import (
    Distribution,
    Independent,
    Normal,
    Uniform,
    constraints,
    kl_divergence,
)

import placer
from placer.program import lower

SPEC = {"devices": ["cpu:0", "cpu:1"], "layers": {"encoder": "cpu:0", "decoder": "cpu:1"}}
SPECS: dict[str, dict[str, Any]] = {
    "stages": SPEC,
    "micro-batches": {**SPEC, "microbatches": 3},
    "replicas": {**SPEC, "devices": [f"cpu:{i}" for i in range(4)], "replicas": 2},
}


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.compile`, which other tests call, disables the checks for the whole process."""
    monkeypatch.setattr(Distribution, "_validate_args", True)


class Autoencoder(nn.Module):
    """Keeps the distribution of its code, and returns what it decodes from it and a log-probability."""

    def __init__(self, *, sampled: bool = False) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(4, 8)
        self.sampled = sampled
        with torch.no_grad():
            self.encoder.bias[4:] = 5.0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Distribution]:
        mean, deviation = self.encoder(x).chunk(2, -1)
        code = Normal(mean, deviation)
        self.code = Independent(code, 1)
        distance = kl_divergence(code, Normal(torch.zeros_like(mean), torch.ones_like(mean)))
        near = Uniform(mean - deviation, mean + deviation).log_prob(mean * 1.01)
        value = code.rsample() if self.sampled else mean
        return self.decoder(value), (distance + near).sum(-1), code


def placed_and_plain(fields: dict[str, Any], *, sampled: bool = False) -> list[nn.Module]:
    torch.manual_seed(0)
    plain = Autoencoder(sampled=sampled).double()
    example = torch.randn(6, 8, dtype=torch.float64)
    return [placer.compile(copy.deepcopy(plain), fields, example, run_on="cpu"), plain]


@pytest.mark.matrix(2)
@pytest.mark.parametrize("fields", SPECS.values(), ids=SPECS)
def test_what_is_computed_and_kept_equals_the_plain_model(fields: dict[str, Any]) -> None:
    nets = placed_and_plain(fields)
    x = torch.randn(12, 8, dtype=torch.float64)
    found = []
    for net in nets:
        value, distance, code = net(x)
        kept = net.code
        (
            value.square().sum() + distance.sum() + code.stddev.sum() + kept.entropy().sum()
        ).backward()
        assert kept.batch_shape == (12,)
        assert code.batch_shape == (12, 4)
        found.append([value, distance, code.mean, kept.log_prob(torch.ones(4)), *grads(net)])
    assert len(nets[0].plan.stages) == 2
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def grads(net: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in net.parameters()]


class _Alternating(constraints.Constraint):
    def check(self, value: Tensor) -> Tensor:
        return value > 0 if value.mean() > 0 else value < 0


class OwnConstraint(Normal):
    arg_constraints: ClassVar[Any] = {"loc": constraints.real, "scale": _Alternating()}


class Alternating(Autoencoder):
    def forward(self, x: Tensor) -> Tensor:
        return OwnConstraint(x, self.encoder(x)).variance


def test_a_constraint_that_branches_on_values_keeps_the_model_whole() -> None:
    program = lower(Alternating(), (torch.randn(6, 8),))
    assert [each.layer for each in program.captured.whole_modules] == [""]


def test_samples_are_those_of_the_plain_model() -> None:
    x, values = torch.randn(6, 8, dtype=torch.float64), []
    for net in placed_and_plain(SPEC, sampled=True):
        torch.manual_seed(1)
        values.append(net(x)[0])
    assert torch.equal(*values)


def test_a_parameter_or_a_value_that_is_not_allowed_is_the_same_error() -> None:
    x = torch.randn(6, 8, dtype=torch.float64)
    for net in placed_and_plain(SPECS["micro-batches"]):
        with torch.no_grad():
            net.encoder.bias[4] = -50.0
        with pytest.raises(ValueError, match=r"(?s)parameter scale .* Normal.* GreaterThan.*-5\d"):
            net(x)
        with torch.no_grad():
            net.encoder.bias[4:] = 0.01
            net.encoder.weight[4:] = 0.0
            net.encoder.bias[:4] = 100.0
        with pytest.raises(
            ValueError, match=r"(?s)value argument .* within the support .*Interval"
        ):
            net(x)
