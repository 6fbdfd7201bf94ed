"""Code that decides by values of the batch is refused with several slices; checks of values are not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import placer
from placer.program import capture, lower
from placer.program.fake import converter

LAYERS = {"0": "cuda:0", "1": "cuda:0", "2": "cuda:1"}
STAGES = {"devices": ["cuda:0", "cuda:1"], "layers": LAYERS}
SLICES: dict[str, dict[str, Any]] = {
    "replicas": {**STAGES, "devices": [f"cuda:{i}" for i in range(4)], "replicas": 2},
    "micro-batches": {**STAGES, "microbatches": 2},
}
SAYS = {"inputs": {"input": {"batch_dim": 0}}}


@pytest.fixture(autouse=True)
def _few_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops that the guess 1 never ends are given up sooner."""
    monkeypatch.setitem(converter._MOST_READS, 1, 20)


class Code(nn.Module):
    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.code = nn.Linear(6, 6), code
        self.register_buffer("flag", torch.zeros((), dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self.linear(x))


class Flagged(Code):
    """Decides by a buffer, which is the same for all slices."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.flag.item() else self.linear(-x)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)

    @torch.jit.script
    def scripted(x: Tensor) -> Tensor:
        return x if bool(x.mean() > 0) else -2 * x

    @torch.jit.script
    def scripted_check(x: Tensor) -> Tensor:
        if bool(x.isnan().any()):
            raise ValueError("not a number")
        return x.tanh()


def _asserts(x: Tensor) -> Tensor:
    assert torch.isfinite(x).all() and not torch.isnan(x).any()
    assert x.abs().max().item() > 1e-9
    return x.tanh()


def _raises(x: Tensor) -> Tensor:
    if torch.isnan(x).any():
        raise ValueError("not a number")
    return x.tanh()


def _validates(x: Tensor) -> Tensor:
    return torch.distributions.Normal(x, x.square() + 1, validate_args=True).mean


def _rows(x: Tensor) -> Tensor:
    return x * [1.0, 2.0][int((x.sum() > 0).item())]


def _shape(x: Tensor) -> Tensor:
    """An operation, not a check, fails where there are no such columns."""
    return x * x[:, : 1 + int((x.mean() > 0).item())].view(len(x), 2, -1).mean((1, 2))[:, None]


def _limits(x: Tensor) -> Tensor:
    """A check that any guess passes."""
    assert x.max().item() < 1e9
    return x.tanh()


def _computes_with_what_it_checks(x: Tensor) -> Tensor:
    scale = x.abs().max().item()
    assert scale > 0.01
    return x / scale


CHECKS = {
    "limit": _limits,
    "assert": _asserts,
    "raise": _raises,
    "distribution": _validates,
    "script": lambda x: scripted_check(x),
}
DECIDES = {
    "branch": lambda x: x if x.mean() > 0 else -2 * x,
    "number": lambda x: x * x.mean().item(),
    "list": lambda x: x * max(x.max(1).values.tolist()),
    "array": lambda x: x * float(x.detach().numpy().mean()),
    "equal": lambda x: x if torch.equal(x, x.abs()) else -2 * x,
    "loop": lambda x: _halved(x),
    "index": _rows,
    "shape": _shape,
    "script": lambda x: scripted(x),
    "far away": lambda x: x if x.max().item() < 1e9 else -x,
    "checked": _computes_with_what_it_checks,
    "after a check": lambda x: _asserts(x) if x.mean() > 0 else -x,
}


def _halved(x: Tensor) -> Tensor:
    while x.abs().mean() > 0.1:
        x = x / 2
    return x


def _net(code: Callable[[Tensor], Tensor], kind: type[Code] = Code) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), kind(code), nn.Linear(6, 6)).double()
    return net, torch.randn(8, 6, dtype=torch.float64)


def _assert_equal(net: nn.Module, x: Tensor, spec: dict[str, Any]) -> None:
    placed = placer.compile(copy.deepcopy(net), spec, x, run_on="cpu")
    for given in (x, -x):
        torch.testing.assert_close(placed(given), net(given))


@pytest.mark.matrix(2)
@pytest.mark.parametrize("spec", SLICES)
@pytest.mark.parametrize("name", CHECKS)
def test_checks_of_values_are_harmless(name: str, spec: str) -> None:
    _assert_equal(*_net(CHECKS[name]), SLICES[spec])


@pytest.mark.parametrize("spec", SLICES)
def test_a_branch_by_a_buffer_is_the_same_for_all_slices(spec: str) -> None:
    _assert_equal(*_net(torch.tanh, Flagged), SLICES[spec])


@pytest.mark.matrix(2)
@pytest.mark.parametrize("spec", SLICES)
@pytest.mark.parametrize("name", DECIDES)
def test_what_decides_by_values_of_the_batch_is_refused(name: str, spec: str) -> None:
    net, x = _net(DECIDES[name])
    line = r"1: it decides by values of the batch what it computes \(.*test_readings.py:"
    with pytest.raises(placer.CaptureError, match=line) as refused:
        placer.compile(net, SLICES[spec], x, run_on="cpu")
    assert '"inputs": {"input": {"batch_dim": 0}}' in refused.value.remedy
    assert placer.compile(net, {**SLICES[spec], **SAYS}, x, run_on="cpu").plan.notes


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", sorted({*DECIDES} - {"shape"}))
def test_one_slice_decides_as_the_plain_model_does(name: str) -> None:
    _assert_equal(*_net(DECIDES[name]), STAGES)


class Root(nn.Module):
    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.code = nn.Linear(6, 6), code

    def forward(self, input: Tensor) -> Tensor:
        return self.linear(self.code(input))


def test_a_model_that_is_a_single_node_is_refused_too() -> None:
    net, x = Root(DECIDES["loop"]).double(), torch.randn(8, 6, dtype=torch.float64)
    spec = {"devices": ["cuda:0", "cuda:1"], "replicas": 2}
    with pytest.raises(placer.CaptureError, match="Root: it decides by values of the batch"):
        placer.compile(net, spec, x, run_on="cpu")
    _assert_equal(net, x, {"devices": ["cuda:0"]})


@pytest.mark.parametrize("name", ["assert", "raise"])
def test_a_model_that_is_a_single_node_may_check_values(name: str) -> None:
    net, x = Root(CHECKS[name]).double(), torch.randn(8, 6, dtype=torch.float64)
    _assert_equal(net, x, {"devices": ["cuda:0", "cuda:1"], "replicas": 2})


def test_a_later_call_is_refused_where_only_it_decides_by_values() -> None:
    """Only evaluation branches."""

    class Evaluates(Code):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).tanh() if self.training else super().forward(x)

    net, x = _net(DECIDES["branch"], Evaluates)
    placed = placer.compile(net, SLICES["micro-batches"], x, run_on="cpu")
    placed(x)
    with pytest.raises(placer.CaptureError, match="it decides by values of the batch"):
        placed.eval()(x)


class Finite(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        assert torch.isfinite(x).all()
        return super().forward(x)


class Number(nn.Linear):
    """It needs True of one value and False of the next, in each of two conditions."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.isnan(x).any() or not (x.abs() < 1e9).all():
            raise ValueError("not a number")
        assert torch.isfinite(x).all() and not torch.isnan(x).any()
        return super().forward(x)


def test_modules_whose_checks_need_other_answers_stay_whole() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(Number(6, 6), Finite(6, 6), Number(6, 6))
    net, x = nn.Sequential(nn.Linear(6, 6), inner, nn.Linear(6, 6)), torch.randn(8, 6)
    assert [each.layer for each in lower(net, (x,)).captured.whole_modules] == ["1.0", "1.1", "1.2"]
    for spec in (STAGES, {**STAGES, "checkpoint": ["**"]}):
        _assert_equal(net, x, spec)


def test_layers_that_are_alike_stay_whole_after_one_recording(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = mock.Mock(wraps=capture.record_model)
    monkeypatch.setattr(capture, "record_model", recorded)
    counts = []
    for layers in (1, 4):
        net = nn.Sequential(*(Number(6, 6) for _ in range(layers)))
        assert len(lower(net, (torch.randn(8, 6),)).captured.whole_modules) == layers
        counts.append(recorded.call_count)
    assert counts[1] == 2 * counts[0]


def test_what_fails_with_every_guess_is_an_error_that_names_the_line() -> None:
    class Impossible(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum().item() != 3:
                raise ValueError("always")
            return super().forward(x)

    with pytest.raises(placer.CaptureError, match=r"ValueError: always \(.*test_readings.py:"):
        lower(nn.Sequential(nn.Linear(6, 6), Impossible(6, 6)), (torch.randn(8, 6),))


def test_a_batch_that_no_guess_lets_pass_changes_no_guess() -> None:
    class Picks(nn.Linear):
        """It picks one of its settings, and takes no more than sixteen rows: twice the batch fails."""

        def forward(self, x: Tensor) -> Tensor:
            scale = (2.0,)[int(torch.isnan(x).any())]
            if len(x) > 16:
                raise ValueError("too many rows")
            return super().forward(x) * scale

    _assert_equal(
        nn.Sequential(Picks(6, 6), nn.Linear(6, 6)), torch.randn(16, 6), {"devices": ["cpu"]}
    )
