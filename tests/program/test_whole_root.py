"""A model whose own forward cannot be recorded: what it changes is seen. And hooks that are partials."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import placer

X = torch.randn(8, 4)
TWO: dict[str, Any] = {"devices": ["cpu:0", "cpu:1"]}


class SetsItself(nn.Module):
    """It sets a parameter in its first forward, which it knows by the value of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("ready", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.ready.item() == 0:
            self.scale.data.copy_(1 / x.detach().std(0))
            self.ready.fill_(1)
        return self.last(x * self.scale)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("cut", [{"replicas": 2}, {"microbatches": 2}])
def test_slices_that_would_set_other_weights_are_refused(cut: dict[str, int]) -> None:
    with pytest.raises(placer.CaptureError, match="it sets the parameter scale from the batch"):
        placer.compile(SetsItself(), {**TWO, **cut}, X)
    assert placer.verify(SetsItself(), TWO, X).ok


class Freezes(nn.Module):
    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.first, self.last, self.reads = nn.Linear(4, 4), nn.Linear(4, 4), reads

    def forward(self, x: Tensor) -> Tensor:
        if self.reads and x.sum() > 1e9:
            return x
        y: Tensor = self.last(self.first(x))
        self.last.weight.requires_grad_(False)
        return y


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("reads", [False, True])
def test_requires_grad_changed_after_use_is_refused(reads: bool, inside: bool) -> None:
    model: nn.Module = Freezes(reads=reads)
    if inside:
        model = nn.Sequential(model, nn.Linear(4, 4))
    with pytest.raises(placer.CaptureError, match="changes requires_grad of"):
        placer.compile(model, TWO, X)


class Lazy(nn.Module):
    """Makes what does not depend on values of its input: in the first call, and in every call."""

    def __init__(self, *, of_values: str = "") -> None:
        super().__init__()
        self.layer, self.of_values = nn.Linear(4, 4), of_values
        self.scales: list[float] | None = None
        self.anchors = [torch.arange(4.0)]
        self.seen: list[Tensor] | None = None
        self.sums: list[float] | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert not x.isnan().any()
        if self.scales is None:
            self.scales = [1 / x.size(1)]
        self.anchors = [each.to(x.dtype) * 1 for each in self.anchors]
        if self.of_values == "seen":
            self.seen = [x * 2]
        if self.of_values == "sums":
            self.sums = [x.sum().item()]
        return self.layer(x * self.scales[0] + self.anchors[0])


def test_what_does_not_depend_on_values_may_be_made_by_a_whole_model() -> None:
    model = Lazy()
    placed = placer.compile(copy.deepcopy(model), TWO, X)
    torch.testing.assert_close(placed(X), model(X))
    for name in ("seen", "sums"):
        with pytest.raises(placer.CaptureError, match=f"it sets {name}"):
            placer.compile(Lazy(of_values=name), TWO, X)


class CountsCalls(nn.Module):
    """It replaces its count of calls; in only one of its branches."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        if not buffer:
            del self.calls
            self.calls = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return x
        self.calls = self.calls + 1
        return self.layer(x)


@pytest.mark.parametrize("buffer", [True, False])
def test_a_count_that_a_whole_model_replaces_is_refused(buffer: bool) -> None:
    what = "the buffer calls" if buffer else "calls"
    with pytest.raises(placer.CaptureError, match=rf"it sets {what} .*_root\.py:\d+") as caught:
        placer.compile(CountsCalls(buffer=buffer), TWO, X)
    assert ("self.calls.copy_(…)" in caught.value.remedy) == buffer


class Quantises(nn.Module):
    """A vector quantiser with a moving codebook, whose dead codes are revived."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("codebook", torch.linspace(-1, 1, 32).view(8, 4))
        self.register_buffer("usage", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        index = torch.cdist(x, self.codebook).argmin(-1)
        chosen = self.codebook[index]
        if self.training:
            counts = nn.functional.one_hot(index, 8).to(x)
            self.usage.mul_(0.5).add_(counts.sum(0), alpha=0.5)
            if (self.usage < 0.6).any():
                revived = torch.where((self.usage < 0.6)[:, None], x.detach()[:1], self.codebook)
                self.codebook.copy_(revived)
        return x + (chosen - x).detach()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_quantiser_that_writes_into_its_buffers(wrapped: bool) -> None:
    plain: nn.Module = Quantises()
    if wrapped:
        plain = nn.Sequential(nn.Linear(4, 4), plain, nn.Linear(4, 4))
    placed = placer.compile(copy.deepcopy(plain), TWO, X)
    for _ in range(3):
        torch.testing.assert_close(placed(X), plain(X))
        for name, buffer in plain.named_buffers():
            torch.testing.assert_close(placed.get_buffer(name), buffer)


class Returns(nn.Module):
    """What it returns besides ``y`` is made from values of ``y``, in Python or numpy."""

    def __init__(self, make: Callable[[Tensor], Any], *, inside: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.make = nn.Linear(4, 4), nn.Linear(4, 4), make
        self.part = Returns(make) if inside else None

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        y = self.last(self.first(x))
        return (y, self.make(y)) if self.part is None else self.part(y)


class Box:
    def __init__(self, value: float) -> None:
        self.value = value


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda y: y.detach().numpy().sum(1),
        lambda y: "high" if y.sum() > 0 else "low",
        lambda y: [row for row in y if row.sum() > 0],
        lambda y: Box(y.mean().item()),
    ],
    ids=["array", "string", "length", "object"],
)
def test_a_result_that_values_decide_is_refused(
    make: Callable[[Tensor], Any], inside: bool
) -> None:
    with pytest.raises(placer.CaptureError, match="depends on values of tensors in more"):
        placer.compile(Returns(make, inside=inside), TWO, X)


def test_a_string_that_the_trial_did_not_see_is_refused_in_the_call() -> None:
    net = Returns(lambda y: "high" if y.mean().item() > 5 else "low")
    placed = placer.compile(net, TWO, X)
    assert placed(X)[1] == "low"
    with torch.no_grad():
        placed.last.bias.fill_(9.0)
    with pytest.raises(placer.CaptureError, match="depends on values of tensors in more"):
        placed(X)


def test_numbers_from_values_are_returned_but_not_of_slices() -> None:
    net = Returns(lambda y: y.mean().item())
    assert placer.compile(net, TWO, X)(X)[1] == pytest.approx(net(X)[1])
    placed = placer.compile(net, {**TWO, "replicas": 2}, X)
    with pytest.raises(placer.PlacerError, match="result 1: is another number for every slice"):
        placed(X)


class Labels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        y = self.layer(x)
        return y, y.detach().numpy().argmax(1)


class ReadsLabels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.labels, self.last = Labels(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, labels = self.labels(x)
        result: Tensor = self.last(y) * torch.from_numpy(labels)[:, None]
        return result


def test_an_array_that_a_layer_returns_is_that_of_each_call() -> None:
    assert placer.verify(ReadsLabels(), TWO, X).ok
