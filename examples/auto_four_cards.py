"""A 3D U-Net on four cards of 12 GB: which way of training it is the fastest that fits?

Replicas, stages, shards in space, micro-batches and recomputation are compared, without a GPU. Prints the
answer, and why each other way lost.

    python examples/auto_four_cards.py
"""

from __future__ import annotations

import torch
from rich.console import Console
from unet3d import unet3d

import placer
from placer.plan.types import Plan
from placer.report import plan_table


def answer(size: int = 192, memory: str | None = None, *, width: int = 32) -> Plan:
    """The plan for two volumes of ``size`` cubed in a step, in bfloat16; a card has what its kind has."""
    with torch.device("meta"):
        model = unet3d(width=width)
        volumes = torch.empty(2, 1, size, size, size)
    cards = [{"name": f"cuda:{i}", "memory": memory, "kind": "rtx3060-12gb"} for i in range(4)]
    return placer.auto_plan(model, volumes, devices=cards, precision="bf16")


def main() -> None:
    Console().print(plan_table(answer()))


if __name__ == "__main__":
    main()
