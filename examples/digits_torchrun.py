"""Training on handwritten digits with one process per device.

The hand-written version partitions the dataset over ranks, runs ``average_gradients`` over gloo
after every backward, and prints each rank's loss per epoch
(https://pytorch.org/tutorials/intermediate/dist_tuto.html). Here the spec says what a rank is:

    torchrun --nproc-per-node 4 examples/digits_torchrun.py
    torchrun --nproc-per-node 4 examples/digits_torchrun.py specs/digits_torchrun_pipeline.json
    python examples/digits_torchrun.py

Four replicas; two replicas of two stages; the same in one process. With ``--checkpoint FOLDER`` it
saves after every epoch and goes on from there when it is started again.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from digits_data_parallel import ConvNet, batches, partitions
from machine import SPECS, run_on
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import placer


def train(
    spec_path: Path = SPECS / "digits_data_parallel.json",
    *,
    epochs: int = 5,
    rows: int = 128,
    dropout: float = 0.5,
    dtype: torch.dtype = torch.float32,
    checkpoint: Path | None = None,
) -> list[float]:
    """Train on batches of ``rows`` over all replicas; print and return this rank's loss per epoch.

    Every replica has a partition of the digits of its own. A rank that does not run the last stage
    sees no loss and prints none.
    """
    torch.manual_seed(1234)
    spec = placer.load_spec(spec_path)
    replicas = int(spec.replicas)
    parts = partitions(replicas, dtype)
    images, labels = map(torch.cat, zip(*batches(parts, rows // replicas), strict=True))
    num_devices = int(os.environ.get("LOCAL_WORLD_SIZE", replicas * len(spec.devices)))
    model = ConvNet(dropout).to(dtype)
    placed = placer.compile(model, spec, (images[:rows],), run_on=run_on(num_devices))
    sampler = placed.sampler(images, rows, shuffle=False)
    loader = DataLoader(TensorDataset(images, labels), batch_sampler=sampler)
    optimizer = torch.optim.SGD(placed.parameters(), lr=0.05, momentum=0.9)
    first = 0
    if checkpoint is not None:
        first = placer.load(placed, optimizer, checkpoint, missing_ok=True).get("epochs", 0)

    rank = dist.get_rank() if dist.is_initialized() else 0
    history = []
    for epoch in range(first, epochs):
        losses: list[Tensor] = []

        def loss_fn(output: Tensor, target: Tensor, losses: list[Tensor] = losses) -> Tensor:
            losses.append(F.cross_entropy(output, target))
            return losses[-1]

        for x, y in loader:
            optimizer.zero_grad()
            placed.step(x, target=y, loss_fn=loss_fn, own_rows=True)
            optimizer.step()
        if losses:
            history.append(torch.stack([loss.detach() for loss in losses]).mean().item())
            print(f"Rank {rank}, epoch {epoch}: {history[-1]:.4f}", flush=True)
        if checkpoint is not None:
            placer.save(placed, optimizer, checkpoint, extra={"epochs": epoch + 1})
    return history


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("spec", nargs="?", type=Path, default=SPECS / "digits_data_parallel.json")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()
    train(options.spec, epochs=options.epochs, checkpoint=options.checkpoint)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
