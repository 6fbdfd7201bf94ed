"""The law for every family of strategies: the module that `auto` places equals the plain one."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch.nn.functional import mse_loss
from unet3d import UNet3D

import placer
from placer.search.strategy import Pool, Strategy
from placer.spec import DeviceSpec, PlacementSpec

POOL = [DeviceSpec(name=f"cpu:{i}") for i in range(8)]
FAMILIES = list(itertools.product((1, 2), (1, 2), (1, 2), (False, True), (False, True)))


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("replicas", "stages", "shards", "recompute", "chunks"), FAMILIES)
def test_a_step_of_every_family_is_the_plain_step(
    replicas: int, stages: int, shards: int, recompute: bool, chunks: bool
) -> None:
    """Other inputs than the recorded ones, two steps, float64."""
    torch.manual_seed(0)
    model = UNet3D(width=4, depth=1, norm="instance").double()
    strategy = Strategy(
        replicas=replicas,
        stages=stages,
        shards=shards,
        microbatches=2,
        schedule="1F1B",
        recompute=recompute,
        chunks=chunks,
    )
    fields = {"checkpoint": ["encoder"]} if recompute else {}  # "auto" finds no need of it here
    wanted = PlacementSpec.model_validate({"devices": POOL, **fields})
    spec = strategy.spec(wanted, Pool(wanted.devices))
    assert spec is not None and spec.replicas * len(spec.devices) == strategy.devices
    if recompute:
        spec = spec.model_copy(update=fields)
    example = torch.randn(5, 1, 16, 16, 16, dtype=torch.float64)
    placed = placer.compile(copy.deepcopy(model), spec, example, run_on="cpu")
    plain = torch.optim.Adam(model.parameters())
    ours = torch.optim.Adam(placed.parameters())
    for _ in range(2):
        x, y = torch.randn_like(example), torch.randn(5, 3, 16, 16, 16, dtype=torch.float64)
        plain.zero_grad()
        ours.zero_grad()
        expected = mse_loss(model(x), y)
        expected.backward()
        found = placed.step(x, target=y, loss_fn=mse_loss)
        assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12)
        for (name, parameter), other in zip(
            model.named_parameters(), placed.parameters(), strict=True
        ):
            assert parameter.grad is not None and other.grad is not None, name
            assert torch.allclose(other.grad, parameter.grad, rtol=1e-9, atol=1e-11), name
        plain.step()
        ours.step()
    assert list(placed.state_dict()) == list(model.state_dict())
