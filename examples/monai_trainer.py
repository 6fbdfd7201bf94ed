"""MONAI's trainer and sliding window inference with a 3D U-Net over two devices.

pip install monai pytorch-ignite; python examples/monai_trainer.py
"""

from __future__ import annotations

from typing import Any

import torch
from ignite.engine import Events
from machine import run_on
from monai.data import DataLoader, Dataset
from monai.engines import SupervisedTrainer
from monai.inferers import sliding_window_inference
from monai.losses import DiceLoss
from monai.networks.nets import UNet
from torch import Tensor, nn

import placer

SPEC = {"devices": ["cuda:0", "cuda:1"], "microbatches": 2}
WINDOW = (16, 16, 16)


def network() -> nn.Module:
    return UNet(
        spatial_dims=3,
        in_channels=1,
        out_channels=2,
        channels=(4, 8, 16),
        strides=(2, 2),
        num_res_units=1,
        norm="instance",
    )


def samples(count: int = 4, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    """Random volumes, and where they are positive."""
    images = torch.randn(count, 1, *WINDOW, dtype=dtype)
    return [{"image": image, "label": (image > 0).to(dtype)} for image in images]


def train(model: nn.Module, data: list[dict[str, Tensor]], epochs: int = 2) -> list[float]:
    """Losses of ``SupervisedTrainer`` with batches of two volumes; ``model`` is placed or not."""
    losses: list[float] = []

    def keep(engine: Any) -> None:
        losses.append(engine.state.output[0]["loss"])

    trainer = SupervisedTrainer(
        # Where batches go: to the device of results, because the loss is computed there.
        device=getattr(model, "output_device", "cpu"),
        max_epochs=epochs,
        train_data_loader=DataLoader(Dataset(data), batch_size=2),
        network=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loss_function=DiceLoss(softmax=True, to_onehot_y=True),
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED, keep)
    trainer.run()
    return losses


def infer(model: nn.Module, volume: Tensor) -> Tensor:
    """The result of ``model`` for a volume larger than its window, from four windows at a time."""
    model.eval()
    with torch.no_grad():
        found = sliding_window_inference(volume, WINDOW, 4, model, overlap=0.25)
    assert isinstance(found, Tensor)
    return found


def main() -> None:
    torch.manual_seed(0)
    placed = placer.compile(network(), SPEC, (torch.zeros(2, 1, *WINDOW),), run_on=run_on(2))
    losses = train(placed, samples())
    print(f"Dice loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    print("result of a larger volume:", tuple(infer(placed, torch.randn(1, 1, 40, 32, 24)).shape))


if __name__ == "__main__":
    main()
