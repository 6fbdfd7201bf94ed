"""What is done to the modules of a placed model with replicas, as to those of the plain one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import placer
from tests.oracle import assert_close, mean_square, reference_step

D = torch.float64
SPEC = {"devices": ["cpu:0", "cpu:1"], "layers": {"last": "cpu:1"}, "replicas": 2}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.middle = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)
        self.register_buffer("scale", None)
        self.register_parameter("shift", None)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.middle(torch.tanh(self.first(x))))
        y = y if self.scale is None else y * self.scale
        y = y if self.shift is None else y + self.shift
        return self.last(torch.tanh(self.middle(y)))


def with_a_bias(net: Any) -> None:
    net.first = nn.Linear(4, 4, dtype=D)


def several_layers(net: Any) -> None:
    net.middle = nn.Sequential(nn.Linear(4, 4, dtype=D), nn.BatchNorm1d(4, dtype=D))


def another_parameter(net: Any) -> None:
    net.middle.register_parameter("unused", nn.Parameter(torch.ones(4, dtype=D)))


def old_weight_norm(net: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(net.middle)


CHANGES: list[Callable[[Any], Any]] = [
    with_a_bias,
    several_layers,
    another_parameter,
    old_weight_norm,
    lambda net: nn.utils.spectral_norm(net.middle),
    lambda net: parametrizations.weight_norm(net.middle),
    lambda net: parametrizations.spectral_norm(net.middle),
    lambda net: setattr(net, "scale", torch.full((4,), 2.0, dtype=D)),
    lambda net: setattr(net, "shift", nn.Parameter(torch.ones(4, dtype=D))),
]
NAMES = ["bias", "layers", "parameter", "old weight_norm", "old spectral_norm"]
NAMES += ["weight_norm", "spectral_norm", "buffer that was None", "parameter that was None"]


@pytest.mark.matrix(3)
@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.spectral_norm.*")
@pytest.mark.parametrize("change", CHANGES, ids=NAMES)
def test_a_change_of_a_placed_models_modules(change: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    plain, x = Net().double(), torch.randn(6, 4, dtype=D)
    placed = placer.compile(copy.deepcopy(plain), SPEC, (x,), run_on="cpu")
    placed.step(x, loss_fn=mean_square)
    for net in (plain, placed):
        torch.manual_seed(1)
        change(net)
        net.zero_grad()
    assert list(placed.state_dict()) == list(plain.state_dict())
    loss = placed.step(x, loss_fn=mean_square)
    assert_close(loss, reference_step(plain, (x,), {}, 2, 1), "loss")
    ours, theirs = dict(placed.named_parameters()), dict(plain.named_parameters())
    assert list(ours) == list(theirs)
    for name, parameter in theirs.items():
        assert_close(ours[name].grad, parameter.grad, name)
    buffers = dict(placed.named_buffers())
    for name in dict(plain.named_buffers()):
        assert_close(buffers[name], plain.get_buffer(name), name)


class Upgraded(Net):
    """Reads states of an older version, and has state that is no tensor, both in the model itself."""

    steps = 0

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name in [name for name in state_dict if name.startswith(f"{prefix}old_")]:
            state_dict[prefix + name[len(prefix) + 4 :]] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def get_extra_state(self) -> Any:
        return {"steps": self.steps}

    def set_extra_state(self, state: Any) -> None:
        self.steps = state["steps"]


def _add_version(module: Any, state: Any, prefix: str, metadata: Any) -> None:
    state[f"{prefix}version"] = torch.tensor(2)


def _drop_version(module: Any, state: Any, prefix: str, *args: Any) -> None:
    state.pop(f"{prefix}version")


@pytest.mark.parametrize("nested", [False, True], ids=["alone", "in another module"])
def test_state_is_saved_and_loaded_by_the_models_own_code(nested: bool) -> None:
    model, x = Upgraded().double(), torch.randn(6, 4, dtype=D)
    model.register_state_dict_post_hook(_add_version)
    model.register_load_state_dict_pre_hook(_drop_version)
    placed: Any = placer.compile(model, SPEC, (x,), run_on="cpu")
    other = Upgraded().double()
    other.steps = 7
    state = {f"old_{name}": value for name, value in other.state_dict().items()}
    state["version"] = torch.tensor(2)
    state["_extra_state"] = state.pop("old__extra_state")
    saved, loads = (nn.ModuleDict({"net": m}) if nested else m for m in (model, placed))
    loads.load_state_dict({f"net.{n}" if nested else n: v for n, v in state.items()})
    torch.testing.assert_close(placed(x), other(x))
    assert placed.state_dict()["_extra_state"] == {"steps": 7}
    assert list(loads.state_dict()) == list(saved.state_dict())
    assert any(name.endswith("version") for name in loads.state_dict())
