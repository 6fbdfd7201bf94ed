"""Data-parallel training of a ConvNet on handwritten digits, in one process.

The hand-written version partitions the dataset over ranks, runs ``average_gradients`` over gloo
after every backward, and prints each rank's loss per epoch
(https://pytorch.org/tutorials/intermediate/dist_tuto.html). Here a replica stands for a rank: a
batch is the partitions' batches side by side, and each replica gets the rows of its partition.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from machine import SPECS, run_on
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import placer

SPEC = SPECS / "digits_data_parallel.json"


class ConvNet(nn.Module):
    """(N, 1, 8, 8) -> (N, 10), with dropout as in the tutorial."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=3, padding=1)
        self.conv2_drop = nn.Dropout2d(dropout)
        self.fc1 = nn.Linear(80, 50)
        self.drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = self.drop(F.relu(self.fc1(x.flatten(1))))
        return self.fc2(x)


def partitions(count: int, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    """The shuffled digits in ``count`` equal parts: images (n, 1, 8, 8) in 0 … 1, labels (n,)."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(1234))
    images = torch.tensor(digits.images, dtype=dtype)[order, None] / 16
    labels = torch.tensor(digits.target)[order]
    rows = len(order) // count
    return [
        (images[i * rows : (i + 1) * rows], labels[i * rows : (i + 1) * rows]) for i in range(count)
    ]


def batches(parts: list[tuple[Tensor, Tensor]], rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of ``rows`` from every partition, side by side in the order of the replicas."""
    for start in range(0, len(parts[0][0]), rows):
        yield (
            torch.cat([images[start : start + rows] for images, _ in parts]),
            torch.cat([labels[start : start + rows] for _, labels in parts]),
        )


def train(epochs: int = 5, rows: int = 32, seed: int = 1234) -> list[list[float]]:
    """Train, print and return the mean loss of each replica per epoch."""
    torch.manual_seed(seed)
    spec = placer.load_spec(SPEC)
    replicas = int(spec.replicas)
    parts = partitions(replicas)
    example, _ = next(batches(parts, rows))
    model = placer.compile(ConvNet(), spec, (example,), run_on=run_on(replicas))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    history = []
    for epoch in range(epochs):
        sums, count = torch.zeros(replicas), 0
        for images, labels in batches(parts, rows):
            optimizer.zero_grad()
            output = model(images)
            pairs = zip(output.chunk(replicas), labels.chunk(replicas), strict=True)
            losses = torch.stack([F.cross_entropy(o, y.to(o.device)) for o, y in pairs])
            losses.mean().backward()
            optimizer.step()
            sums += losses.detach().cpu()
            count += 1
        for replica, loss in enumerate(sums / count):
            print(f"Replica {replica}, epoch {epoch}: {loss:.4f}")
        history.append((sums / count).tolist())
    return history


if __name__ == "__main__":
    train()
