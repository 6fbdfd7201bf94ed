"""The DDP guide's program, started by ``mp.spawn`` instead of ``torchrun``, on handwritten digits.

Original: https://pytorch.org/tutorials/intermediate/ddp_tutorial.html. There every process wraps its
own copy of the model in ``DistributedDataParallel``, and a second demo splits a model over two
GPUs by hand first. Here each process calls ``placer.compile`` after ``init_process_group``, and the
spec says whether the processes are replicas or stages. Training, then going on from a checkpoint:
``python examples/digits_spawn.py``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from digits_data_parallel import ConvNet, partitions
from machine import run_on
from torch.nn import functional as F

import placer

SPECS = {
    "two replicas": {"devices": ["cuda:0"], "replicas": 2},
    "two stages": {
        "devices": ["cuda:0", "cuda:1"],
        "layers": {"conv*": "cuda:0", "fc*": "cuda:1"},
        "microbatches": 2,
    },
}


def worker(rank: int, world_size: int, folder: str, steps: int) -> None:
    """What each process does: train, save; then load into another placement and go on."""
    torch.set_num_threads(1)
    dist.init_process_group(init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        start = 0
        for name, spec in SPECS.items():
            start = demo(name, spec, Path(folder) / "checkpoint", start, steps)
    finally:
        dist.destroy_process_group()


def demo(name: str, spec: dict[str, object], checkpoint: Path, start: int, steps: int) -> int:
    """Train ``steps`` from step ``start`` on, from the checkpoint if there is one; the next step."""
    [(images, labels)] = partitions(1)
    x, y = images[:64], labels[:64]
    torch.manual_seed(0)
    world_size = dist.get_world_size()
    placed = placer.compile(ConvNet(dropout=0.0), spec, (x,), run_on=run_on(world_size))
    optimizer = torch.optim.SGD(placed.parameters(), lr=0.05)
    if start:
        start = placer.load(placed, optimizer, checkpoint)["steps"]
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss = placed.step(x, target=y, loss_fn=F.cross_entropy)
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"{name}, step {step}: {loss.item():.6f}", flush=True)
    placer.save(placed, optimizer, checkpoint, extra={"steps": start + steps})
    return start + steps


def main(world_size: int = 2, steps: int = 3) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(world_size, folder, steps), nprocs=world_size)


if __name__ == "__main__":
    main()
