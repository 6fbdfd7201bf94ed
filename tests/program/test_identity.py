"""Which object an attribute holds matters, not only what the object consists of."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import placer

MISSING = object()


class Net(nn.Module):
    """A model with two objects, one of which is the current one."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.first, self.second = make(), make()
        self.current = self.first

    def of(self) -> list[bool]:
        """Which of them the current one is."""
        return [self.current is self.first, self.current is self.second]


class Reads(Net):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * (2 if self.current is self.first else 3)


class Turns(Net):
    def forward(self, x: Tensor) -> Tensor:
        if self.current is self.first:
            self.current = self.second
            return torch.as_tensor(self.layer(x)) * 2
        self.current = self.first
        return torch.as_tensor(self.layer(x)) * 3


class Swaps(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.first, self.second = self.second, self.first
        y: Tensor = self.layer(x)
        return y * (2 if self.current is self.first else 3)


OBJECTS: dict[str, Callable[[], Any]] = {
    "no fields": SimpleNamespace,
    "equal fields": lambda: SimpleNamespace(scale=1),
    "list": list,
    "dict": dict,
}


def calls(model: nn.Module, before: Callable[[int], None]) -> list[Any]:
    seen: list[Any] = []
    for step in range(4):
        before(step)
        x = torch.full((4, 6), step + 1.0, dtype=torch.float64)
        seen += [model(x).detach(), model.of()]  # type: ignore[operator]
    return seen


@pytest.mark.matrix(6)
@pytest.mark.parametrize(
    "spec", [{"devices": ["cpu:0"]}, {"devices": ["cpu:0"], "microbatches": 2}]
)
@pytest.mark.parametrize("objects", OBJECTS)
@pytest.mark.parametrize("kind", [Reads, Turns, Swaps])
def test_every_call_sees_the_present_object(kind: Any, objects: str, spec: Any) -> None:
    def run(model: Any, net: Any) -> list[Any]:
        def turn(step: int) -> None:
            if kind is Reads:
                net.current = net.second if step % 2 else net.first

        return calls(model, turn)

    torch.manual_seed(0)
    net = kind(OBJECTS[objects]).double()
    placed = placer.compile(net, spec, torch.zeros(4, 6, dtype=torch.float64), run_on="cpu")
    torch.testing.assert_close(run(placed, placed), run(net, net))


class Keeps(Net):
    """It adds to the current list, which is one of two."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.current = self.second if self.current is self.first else self.first
        self.current.append(y.mean(1))
        return y


def test_what_is_added_to_the_present_list_is_in_the_caller_s() -> None:
    torch.manual_seed(0)
    net = Keeps(list).double()
    x = torch.ones(4, 6, dtype=torch.float64)
    placed = placer.compile(net, {"devices": ["cpu:0"]}, x)
    for _ in range(3):
        placed(x)
    assert placed.first is net.first
    assert placed.second is placed.current is net.second
    assert [len(net.first), len(net.second)] == [1, 2]


class Once(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 6), MISSING

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * 2 if self.scale is MISSING else y


def test_an_object_that_stands_for_nothing_else() -> None:
    net, x = Once().double(), torch.ones(4, 6, dtype=torch.float64)
    placed = placer.compile(net, {"devices": ["cpu:0"]}, x)
    torch.testing.assert_close(placed(x), net(x))
    net.scale = placed.scale = None
    torch.testing.assert_close(placed(x), net(x))


class Forgets(Once):
    def forward(self, x: Tensor) -> Tensor:
        self.scale = MISSING
        return torch.as_tensor(self.layer(x))


def test_setting_such_an_object_is_an_error() -> None:
    net, x = Forgets(), torch.ones(4, 6)
    net.scale = 2
    with pytest.raises(
        placer.CaptureError, match="that is only equal to itself: use None, or a member"
    ):
        placer.compile(net, {"devices": ["cpu:0"]}, x)


CONFIG, LOG = SimpleNamespace(scale=2.0), [1]


class Returns(Net):
    """Returns and keeps what the caller, the model and its code have."""

    def forward(self, batch: dict[str, Any], kept: list[int]) -> Any:
        batch["y"] = self.layer(batch["x"]) * CONFIG.scale
        self.batch, self.config = [batch], CONFIG
        return batch, (kept, batch["meta"], self.current), {"config": CONFIG, "log": LOG}


@pytest.mark.parametrize("more", [{}, {"replicas": 2, "microbatches": 2}], ids=str)
def test_what_was_there_before_is_returned_and_stored_itself(more: Any) -> None:
    def example() -> tuple[dict[str, Any], list[int]]:
        return {"x": torch.randn(8, 6), "meta": {"names": ["a"]}}, [3]

    model = Returns(list)
    spec = {"devices": ["cpu"], "inputs": {"batch.x": {"batch_dim": 0}}, **more}
    placed = placer.compile(model, spec, example())
    for _ in range(2):
        batch, kept = example()
        result, others, named = placed(batch, kept)
        assert result is placed.batch[0] is batch
        found = (*others, *named.values(), placed.config)
        before = kept, batch["meta"], placed.first, CONFIG, LOG, CONFIG
        assert all(map(operator.is_, found, before))
