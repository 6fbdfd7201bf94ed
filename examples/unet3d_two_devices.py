"""A 3D U-Net with its encoder on one device and its decoder on the other.

The skip connections cross the boundary by themselves: ``specs/unet3d_two_devices.json`` says where
the layers are, and ``forward`` stays what it was.
"""

from __future__ import annotations

import torch
from machine import SPECS, run_on
from rich.console import Console
from torch import nn
from unet3d import unet3d

import placer
from placer.report import plan_table

SPEC = SPECS / "unet3d_two_devices.json"


def plan(size: int = 128) -> placer.Plan:
    """The plan for one volume of ``size`` cubed; nothing is allocated."""
    with torch.device("meta"):
        model, volume = unet3d(), torch.empty(1, 1, size, size, size)
    return placer.make_plan(model, placer.load_spec(SPEC), (volume,))


def train(size: int = 16, steps: int = 5) -> list[float]:
    """Losses of some Adam steps of a small network on one random volume."""
    torch.manual_seed(0)
    volume = torch.randn(1, 1, size, size, size)
    labels = (volume[:, 0] > 0).long()
    model = placer.compile(
        unet3d(width=8, depth=3), placer.load_spec(SPEC), (volume,), run_on=run_on(2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model.step(volume, target=labels, loss_fn=nn.functional.cross_entropy)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    console = Console()
    console.print(plan_table(plan()))
    console.print("Losses of five steps at 16^3:", [f"{loss:.3f}" for loss in train()])


if __name__ == "__main__":
    main()
