"""Run by torchrun: a step with a process per GPU, compared with the plain model on the CPU."""

from __future__ import annotations

import copy
import os

import torch
import torch.distributed as dist
from oracle import assert_close, gradient_noise
from torch import Tensor
from unet3d import unet3d

import placer


def _loss(output: Tensor) -> Tensor:
    return output.square().mean()


def main() -> None:
    """Two stages where the number of ranks is even, else one; replicas of them on the others."""
    ranks = int(os.environ["WORLD_SIZE"])
    stages = 2 if ranks % 2 == 0 else 1
    torch.manual_seed(0)
    model = unet3d(width=4, depth=3, norm="group").double()
    x = torch.randn(4, 1, 16, 16, 16, dtype=torch.float64)
    plain = copy.deepcopy(model)
    _loss(plain(x)).backward()
    spec = {
        "devices": [f"cuda:{i}" for i in range(stages)],
        "replicas": ranks // stages,
        "microbatches": 2,
        "schedule": "1F1B",
    }
    placed = placer.compile(model, spec, x)
    placed.step(x, loss_fn=_loss, reduction="mean")
    noise = gradient_noise(plain)
    expected = dict(plain.named_parameters())
    found = [(name, p) for name, p in placed.named_parameters() if p.grad is not None]
    assert found, "a rank has parameters"
    for name, parameter in found:
        assert parameter.grad is not None
        assert parameter.device.type == "cuda"
        assert_close(parameter.grad.cpu(), expected[name].grad, name, floor=noise)
    print("equal", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
