"""ResNet50 over two GPUs, without a subclass and without ``.to`` in a forward.

The hand-written version is in https://pytorch.org/tutorials/intermediate/model_parallel_tutorial.html:
stem to layer2 on one device, layer3 to fc on the other. Here the split is
``specs/resnet50_two_devices.json``, and the model is torchvision's own.
"""

from __future__ import annotations

import torch
import torchvision
from machine import SPECS, run_on
from rich.console import Console
from torch import nn

import placer
from placer.report import plan_table

SPEC = SPECS / "resnet50_two_devices.json"


def plans(batch: int = 10, size: int = 1024) -> tuple[placer.Plan, placer.Plan]:
    """The plan of the split by hand, and that of the automatic one; nothing is allocated."""
    with torch.device("meta"):
        model, images = torchvision.models.resnet50(), torch.empty(batch, 3, size, size)
    spec = placer.load_spec(SPEC)
    auto = placer.auto_spec(
        *(model, (images,)),
        devices=spec.devices,
        optimizer=spec.optimizer,
        objective="memory",  # of whole layers, one after the other, as in the tutorial
        replicas=1,
        space=1,
        microbatches=1,
        checkpoint=[],
    )
    return placer.make_plan(model, spec, (images,)), placer.make_plan(model, auto, (images,))


def train(batch: int = 4, size: int = 64, steps: int = 3) -> list[float]:
    """Losses of some SGD steps on random images, as in the tutorial."""
    torch.manual_seed(0)
    images = torch.randn(batch, 3, size, size)
    model = placer.compile(
        torchvision.models.resnet50(), placer.load_spec(SPEC), (images,), run_on=run_on(2)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    losses = []
    for _ in range(steps):
        labels = nn.functional.one_hot(torch.randint(0, 1000, (batch,)), 1000).float()
        optimizer.zero_grad()
        output = model(images)
        loss = nn.functional.mse_loss(output, labels.to(output.device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    console = Console()
    for title, plan in zip(("split by hand", "auto"), plans(), strict=True):
        console.rule(f"ResNet50, 10 x 3 x 1024 x 1024, {title}", align="left")
        console.print(plan_table(plan))
    console.print("Losses of three steps at 64 pixels:", [f"{loss:.4f}" for loss in train()])


if __name__ == "__main__":
    main()
