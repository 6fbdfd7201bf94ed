"""A GAN: two placed modules with alternating steps, and with a gradient penalty (WGAN-GP).

The generator's loss goes back through the discriminator into the generator, each of which is split
over two devices. A penalty on gradients (Gulrajani et al. 2017, arXiv:1704.00028) differentiates
the discriminator twice: call ``placed(x)`` for that, not ``placed.step``, and do not split it in
space.

    python examples/gan.py
"""

from __future__ import annotations

import torch
from machine import run_on
from torch import Tensor, nn

import placer

SPEC = {"devices": ["cuda:0", "cuda:1"], "microbatches": 2}


def networks() -> tuple[nn.Module, nn.Module]:
    """Generator, (N, 4) -> (N, 2), and discriminator, (N, 2) -> (N, 1)."""
    generator = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    discriminator = nn.Sequential(
        nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )
    return generator, discriminator


def place(generator: nn.Module, discriminator: nn.Module, rows: int = 64) -> list[nn.Module]:
    """Both over the two devices."""
    dtype = next(generator.parameters()).dtype
    return [
        placer.compile(generator, SPEC, (torch.zeros(rows, 4, dtype=dtype),), run_on=run_on(2)),
        placer.compile(discriminator, SPEC, (torch.zeros(rows, 2, dtype=dtype),), run_on=run_on(2)),
    ]


def train(
    generator: nn.Module, discriminator: nn.Module, steps: int = 20, rows: int = 64
) -> list[float]:
    """Losses of the discriminator, of points on a circle against what is generated."""
    dtype = next(generator.parameters()).dtype
    ours = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    theirs = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    losses = []
    for _ in range(steps):
        noise = torch.randn(rows, 4, dtype=dtype)
        real = nn.functional.normalize(torch.randn(rows, 2, dtype=dtype))

        theirs.zero_grad()
        fake = generator(noise)
        difference = discriminator(fake.detach()).mean() - discriminator(real).mean()
        loss = difference + 10 * penalty(discriminator, real, fake.detach())
        loss.backward()
        theirs.step()
        losses.append(loss.item())

        ours.zero_grad()
        (-discriminator(generator(noise))).mean().backward()
        ours.step()
    return losses


def penalty(discriminator: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """How far the norm of the discriminator's gradient is from 1, between real and fake points."""
    share = torch.rand(len(real), 1, dtype=real.dtype)
    between = torch.lerp(real, fake.to(real.device), share).requires_grad_()
    output = discriminator(between)
    (gradient,) = torch.autograd.grad(output.sum(), between, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean().to(output.device)


def main() -> None:
    torch.manual_seed(0)
    losses = train(*place(*networks()))
    print(f"loss of the discriminator: {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
