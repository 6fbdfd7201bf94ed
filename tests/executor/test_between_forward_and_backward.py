"""Recomputing and offloading use what forward used, whatever the caller changes before the backward."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import placer
from placer.errors import PlacerError

Change = Callable[[nn.Sequential], object]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    middle = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.1), nn.Linear(8, 8))
    return nn.Sequential(nn.Linear(8, 8), middle, nn.Linear(8, 3)).double()


def new_weight(net: nn.Sequential) -> None:
    net.get_submodule("1.0").weight = nn.Parameter(torch.ones(8, 8, dtype=torch.float64))


def new_layer(net: nn.Sequential) -> None:
    net[1] = nn.Linear(8, 8).double()


def new_setting(net: nn.Sequential) -> None:
    net.get_submodule("1.1").negative_slope = 0.7


def assigned(net: nn.Sequential) -> None:
    net.load_state_dict({key: x * 2 for key, x in net.state_dict().items()}, assign=True)


def frozen(net: nn.Sequential) -> None:
    net[0].requires_grad_(False)


def written(net: nn.Sequential) -> None:
    with torch.no_grad():
        net.get_parameter("1.0.weight").mul_(2)


def new_data(net: nn.Sequential) -> None:
    weight = net.get_parameter("1.0.weight")
    weight.data = weight.data * 2


def gradients(
    net: nn.Module, change: Change, changed: nn.Sequential, weights: dict[str, Tensor] | None = None
) -> list[Tensor | None]:
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(4, 8).requires_grad_()
    read = [x, *(weights or dict(net.named_parameters())).values()]
    result = torch.func.functional_call(net, weights or {}, (x,))
    change(changed)
    result.square().sum().backward()
    return [tensor.grad for tensor in read]


def placed_network(policy: str, microbatches: int = 1) -> nn.Module:
    spec = {"devices": ["cpu:0", "cpu:1"], policy: ["*"], "microbatches": microbatches}
    x = torch.zeros(4, 8, dtype=torch.float64)
    return placer.compile(network(), spec, x, run_on="cpu")


@pytest.mark.matrix(8)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("policy", ["checkpoint", "offload"])
@pytest.mark.parametrize("change", [new_weight, new_layer, new_setting, assigned, frozen])
def test_backward_has_what_forward_had(change: Change, policy: str, microbatches: int) -> None:
    net, placed = network(), placed_network(policy, microbatches)
    expected = gradients(net, change, net)
    assert isinstance(placed, nn.Sequential)
    for found, wanted in zip(gradients(placed, change, placed), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("policy", ["checkpoint", "offload"])
def test_functional_call(policy: str) -> None:
    net, placed = network(), placed_network(policy)

    def weights() -> dict[str, Tensor]:
        return {key: (x.detach() / 2).requires_grad_() for key, x in net.named_parameters()}

    expected = gradients(net, lambda _: None, net, weights())
    found = gradients(placed, lambda _: None, net, weights())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("policy", "change"),
    [("checkpoint", written), ("checkpoint", new_data), ("offload", written)],
)
def test_a_write_is_an_error(policy: str, change: Change) -> None:
    """Without a policy, autograd itself raises for most of them."""
    placed = placed_network(policy)
    assert isinstance(placed, nn.Sequential)
    with pytest.raises(PlacerError, match=r"1\.0\.weight: was changed in place after the forward"):
        gradients(placed, change, placed)
