"""A moving average of the weights (EMA) of a placed module, with ``torch.optim.swa_utils``.

`AveragedModel` copies the placed module; the copy is placed as the original is, and can be called.
Under torchrun a rank cannot be copied: average the tensors of ``placed.named_parameters()`` there.
"""

from __future__ import annotations

import torch
from machine import run_on
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import placer

SPEC = {"devices": ["cuda:0", "cuda:1"]}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))


def data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 8, dtype=dtype)
    return x, x.square().sum(1, keepdim=True)


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int = 20) -> AveragedModel:
    """Adam steps of ``model``, placed or not; the average of its weights and buffers."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        output = model(x)
        nn.functional.mse_loss(output, y.to(output.device)).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return average


def main() -> None:
    torch.manual_seed(0)
    x, y = data()
    placed = placer.compile(network(), SPEC, (x,), run_on=run_on(2))
    average = train(placed, x, y).eval()
    for name, model in (("last weights", placed.eval()), ("their average", average)):
        print(f"{name}: loss {nn.functional.mse_loss(model(x).cpu(), y).item():.3f}")


if __name__ == "__main__":
    main()
