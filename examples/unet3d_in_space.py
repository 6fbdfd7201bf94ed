"""A 3D U-Net of which every device has half of the volume.

For volumes of which not even one layer fits on a device. ``specs/unet3d_in_space.json`` cuts the
volume in two; neighbours exchange the planes that a convolution looks at. ``forward`` returns the
loss, so that this is computed in halves too.

    python examples/unet3d_in_space.py
    torchrun --nproc-per-node 2 examples/unet3d_in_space.py

In one process, and with a process per device. Both train the plain network too, and compare.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from machine import SPECS, run_on
from torch import Tensor, nn
from torch.nn import functional as F
from unet3d import unet3d

import placer

SPEC = SPECS / "unet3d_in_space.json"


class UNetWithLoss(nn.Module):
    """Returns the loss, so that no device needs the whole result."""

    def __init__(self) -> None:
        super().__init__()
        self.net = unet3d(width=4, depth=3)

    def forward(self, volume: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(volume), labels)


def data(size: int = 16) -> tuple[Tensor, Tensor]:
    """A random volume, and the class of each voxel."""
    volume = torch.randn(1, 1, size, size, size, dtype=torch.float64)
    return volume, (volume[:, 0] > 0).long()


def train(steps: int = 3) -> list[float]:
    """Losses of some Adam steps, split in space."""
    torch.manual_seed(0)
    model, (volume, labels) = UNetWithLoss().double(), data()
    num_devices = int(os.environ.get("LOCAL_WORLD_SIZE", "2"))
    placed = placer.compile(
        model, placer.load_spec(SPEC), (volume, labels), run_on=run_on(num_devices)
    )
    optimizer = torch.optim.Adam(placed.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = placed.step(volume, labels, loss_fn=lambda loss: loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_plain(steps: int = 3) -> list[float]:
    """The same without placer."""
    torch.manual_seed(0)
    model, (volume, labels) = UNetWithLoss().double(), data()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(volume, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    losses = train()
    if not dist.is_initialized() or dist.get_rank() == 0:
        for step, (found, expected) in enumerate(zip(losses, train_plain(), strict=True)):
            print(f"step {step}: loss {found:.6f}, without placer {expected:.6f}")
            assert abs(found - expected) < 1e-10 * expected
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
