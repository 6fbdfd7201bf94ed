"""A 3D U-Net trained over several hosts; the same program runs in one process.

Started by ``run.sh`` (two hosts on one machine), by ``train.sbatch`` (SLURM), or by hand on each
host; ``python examples/multi_node/train.py`` in one process prints the same losses.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from machine import run_on  # noqa: E402
from unet3d import unet3d  # noqa: E402

import placer  # noqa: E402


def balls(count: int, size: int) -> tuple[Tensor, Tensor]:
    """Noisy volumes (count, 1, size, size, size), each with a bright ball, and the ball's voxels."""
    generator = torch.Generator().manual_seed(0)
    axis = torch.arange(size) / size
    grid = torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij"))
    centres = 0.3 + 0.4 * torch.rand(count, 3, 1, 1, 1, generator=generator)
    inside = (grid - centres).norm(dim=1) < 0.25
    volumes = inside + 0.5 * torch.randn(inside.shape, generator=generator)
    return volumes[:, None], inside.long()


def train(
    replicas: int,
    *,
    epochs: int,
    size: int,
    checkpoint: Path | None = None,
    dtype: torch.dtype = torch.float32,
    lose_rank_in: int | None = None,
) -> list[float]:
    """The loss of every batch, the same on all ranks; the last rank is killed in one epoch, once."""
    torch.manual_seed(0)
    volumes, labels = balls(16, size)
    volumes = volumes.to(dtype)
    spec = placer.load_spec(HERE / "spec.json").model_copy(update={"replicas": replicas})
    num_devices = int(os.environ.get("LOCAL_WORLD_SIZE", replicas * len(spec.devices)))
    model = unet3d(width=8, depth=3, out_channels=2, norm="group").to(dtype)
    placed = placer.compile(model, spec, (volumes[:8],), run_on=run_on(num_devices))
    rank = dist.get_rank() if dist.is_initialized() else 0
    if dist.is_initialized():
        host = os.environ.get("HOST_LABEL", socket.gethostname())
        stages = ", ".join(map(str, placed.stage_indices))
        print(f"rank {rank} on {host}: replica {placed.replica_index}, stage {stages}", flush=True)

    sampler = placed.sampler(volumes, batch_size=8, seed=1)
    loader = DataLoader(TensorDataset(volumes, labels), batch_sampler=sampler)
    optimizer = torch.optim.Adam(placed.parameters(), lr=1e-2)
    first = 0
    if checkpoint is not None:
        first = placer.load(placed, optimizer, checkpoint, missing_ok=True).get("epochs", 0)
    losses = []
    for epoch in range(first, epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            last = dist.is_initialized() and rank == dist.get_world_size() - 1
            if last and epoch == lose_rank_in and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss = placed.step(x, target=y, loss_fn=F.cross_entropy, own_rows=True)
            placed.clip_grad_norm_(1.0)
            optimizer.step()
            losses.append(loss.item())
            if rank == 0:
                print(f"epoch {epoch}: loss {losses[-1]:.8f}", flush=True)
        if checkpoint is not None:
            placer.save(placed, optimizer, checkpoint, extra={"epochs": epoch + 1})
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--size", type=int, default=24, help="voxels along each side")
    parser.add_argument("--checkpoint", type=Path, help="folder that all hosts see")
    parser.add_argument("--lose-rank-in", type=int, metavar="EPOCH", help="to see it recover")
    parser.add_argument("--double", action="store_true", help="float64, to compare placements")
    options = parser.parse_args()
    stages = 2
    replicas = int(os.environ.get("WORLD_SIZE", 2 * stages)) // stages
    train(
        replicas,
        epochs=options.epochs,
        size=options.size,
        checkpoint=options.checkpoint,
        dtype=torch.float64 if options.double else torch.float32,
        lose_rank_in=options.lose_rank_in,
    )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
