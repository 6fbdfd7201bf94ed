"""LoRA with peft: adapters are added to the plain model, and the result is placed.

Frozen weights get no gradients, and plans do not count any for them.

    pip install peft; python examples/lora.py
"""

from __future__ import annotations

import tempfile

import torch
from machine import run_on
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import placer

SPEC = {"devices": ["cuda:0", "cuda:1"], "microbatches": 2}


def network() -> nn.Module:
    """(N, 16) -> (N, 4), with adapters of rank 2; only those and the last layer are trained."""
    model = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4)
    )
    config = LoraConfig(r=2, target_modules=["0", "2"], modules_to_save=["4"])
    return get_peft_model(model, config)


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int = 20) -> list[float]:
    """Losses of some Adam steps of the adapters of ``model``, placed or not."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(x)
        loss = nn.functional.cross_entropy(output, y.to(output.device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(32, 16), torch.randint(4, (32,))
    placed = placer.compile(network(), SPEC, (x,), run_on=run_on(2))
    losses = train(placed, x, y)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    with tempfile.TemporaryDirectory() as folder:
        placed.save_pretrained(folder)  # the adapters only, as of a model that is not placed


if __name__ == "__main__":
    main()
