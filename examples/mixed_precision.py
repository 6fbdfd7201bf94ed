"""bfloat16 autocast over 2 stages x 2 replicas, and the same seed twice: the same bits."""

from __future__ import annotations

import torch
from digits_data_parallel import ConvNet, partitions
from machine import SPECS, run_on
from torch import nn

import placer

SPEC = SPECS / "mixed_precision.json"


def train(seed: int = 0, steps: int = 20, rows: int = 64) -> tuple[list[float], nn.Module]:
    """Losses of some steps with dropout, and the trained module."""
    torch.manual_seed(seed)
    ((images, labels),) = partitions(1)
    model = placer.compile(ConvNet(), placer.load_spec(SPEC), (images[:rows],), run_on=run_on(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        part = slice(step * rows, (step + 1) * rows)
        loss = model.step(images[part], target=labels[part], loss_fn=nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def main() -> bool:
    first, model = train()
    second, again = train()
    same = first == second and all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )
    print(f"loss {first[0]:.4f} -> {first[-1]:.4f} in bfloat16; same seed, same bits: {same}")
    return same


if __name__ == "__main__":
    main()
