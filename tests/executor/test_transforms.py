"""``torch.func`` and gradients of gradients: what research code does with a model goes with a placed one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import assert_close
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, stack_module_state, vmap

import placer

# torch's own rules of forward mode are scripted when it is first used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

_LAYERS = {"0": "cpu:0", "2": "cpu:1", "6": "cpu:1"}
_REPLICAS = {
    "replicas": 2, "microbatches": 2, "replica_devices": [["cpu:2", "cpu:3"]],
}  # fmt: skip
_FIELDS: dict[str, dict[str, Any]] = {
    "two stages": {},
    "replicas": _REPLICAS,
    "recomputed": {"checkpoint": ["0", "2"]},
    "offloaded": {"offload": ["0", "2"]},
}


def _model() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv1d(3, 3, 3, padding=1), nn.Tanh(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(3, 4),
    ).double()  # fmt: skip


def _input(length: int = 6) -> Tensor:
    return torch.randn(4, 2, length, dtype=torch.float64)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def _per_sample(model: nn.Module, x: Tensor) -> Any:
    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(model, weights, (row[None],)).square().sum()  # type: ignore[no-any-return]

    return vmap(grad(loss), in_dims=(None, 0))(_weights(model), x)


def _ensemble(model: nn.Module, x: Tensor) -> Any:
    torch.manual_seed(1)
    weights, buffers = stack_module_state([_model() for _ in range(2)])
    return vmap(lambda w, b: functional_call(model, (w, b), (x,)))(weights, buffers)


def _forward_mode(model: nn.Module, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.cos()))))


def _batch_of_gradients(model: nn.Module, x: Tensor) -> Any:
    return torch.autograd.functional.jacobian(model, x, vectorize=True)


_TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "gradients per sample": _per_sample,
    "jacrev": lambda model, x: jacrev(model)(x),
    "jacfwd": lambda model, x: jacfwd(model)(x),
    "hessian": lambda model, x: hessian(lambda y: model(y).square().sum())(x[:2]),
    "vmap": lambda model, x: vmap(model)(torch.stack([x, x.sin()])),
    "ensemble": _ensemble,
    "forward mode": _forward_mode,
    "batch of gradients": _batch_of_gradients,
}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("fields", _FIELDS)
@pytest.mark.parametrize("transform", _TRANSFORMS)
def test_transforms(transform: str, fields: str) -> None:
    torch.manual_seed(0)
    model, x = _model(), _input()
    spec = {"devices": ["cpu:0", "cpu:1"], "layers": _LAYERS, **_FIELDS[fields]}
    placed = placer.compile(copy.deepcopy(model), spec, x)
    for other in (x, _input(9)):  # of a size that is captured inside of the transform
        found = torch.utils._pytree.tree_leaves(_TRANSFORMS[transform](placed, other))
        wanted = torch.utils._pytree.tree_leaves(_TRANSFORMS[transform](model, other))
        for index, (one, two) in enumerate(zip(found, wanted, strict=True)):
            assert_close(one, two, f"{transform}, {index}")
