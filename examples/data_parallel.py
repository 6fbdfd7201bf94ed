"""The nn.DataParallel tutorial, as a spec: one stage, several replicas.

Original: https://pytorch.org/tutorials/beginner/blitz/data_parallel_tutorial.html. There the model
prints its sizes in ``forward``; a forward hook does that here, and the model stays as it is. Run it
with the number of replicas: ``python examples/data_parallel.py 3``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from machine import SPECS, run_on
from torch import nn
from torch.utils.data import DataLoader

import placer


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


def note(_: nn.Module, args: Any, output: torch.Tensor) -> None:
    """A hook that prints the sizes of a replica's slice. It keeps none: that would be refused."""
    print(f"\tIn Model: input size {args[0].size()} output size {output.size()}")


def main(replicas: int = 2) -> None:
    """Run 100 rows in batches of 30, and print the sizes inside the model and outside."""
    loader = DataLoader(torch.randn(100, 5), batch_size=30)
    spec = placer.load_spec(SPECS / "data_parallel.json").model_copy(update={"replicas": replicas})
    model = placer.compile(Model(), spec, (torch.randn(30, 5),), run_on=run_on(replicas))
    model.fc.register_forward_hook(note)
    for batch in loader:
        output = model(batch)
        print(f"Outside: input size {batch.size()} output_size {output.size()}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
