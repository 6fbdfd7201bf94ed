"""Lightning with a placed module: in one process, and with a process per device.

A LightningModule holds the placed network. In one process both kinds of optimization work, with one
device as far as Lightning knows. Under torchrun, with `PlacedStrategy`, optimization is manual:
``placed.step`` runs forward and backward under the plan's schedule and sums gradients itself.

    pip install lightning torchmetrics
    python examples/lightning_module.py
    torchrun --nproc-per-node 4 examples/lightning_module.py
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from machine import run_on
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import placer

SPEC = {"devices": ["cuda:0", "cuda:1"], "replicas": 2, "microbatches": 2}
ROWS = 16


class Automatic(lightning.LightningModule):
    """Forward here, the rest by Lightning. For one process."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.accuracy = MulticlassAccuracy(3)
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.network(x), y)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, y = batch
        output = self.network(x)
        self.accuracy(output, y.to(output.device))
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.network.parameters(), lr=0.01)


class Manual(Automatic):
    """``placed.step`` in manual optimization. For one process, and for torchrun."""

    automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.network.step(x, target=y, loss_fn=F.cross_entropy, own_rows=True)
        optimizer.step()
        self.losses.append(loss.item())
        self.log("loss", loss)  # of the whole batch, and the same on every rank


class PlacedStrategy(ParallelStrategy):
    """Lightning's part in a job whose ranks run a placed module: it wraps, sums and moves nothing.

    Checkpoints are those of ``placer.save``, with what Lightning saves besides weights as ``extra``.
    The module has one optimizer; parameters outside of ``placed`` would not be summed over ranks.
    """

    def __init__(self, placed: placer.PlacedModule) -> None:
        super().__init__(cluster_environment=TorchElasticEnvironment())
        self.placed = placed

    @property
    def root_device(self) -> torch.device:
        return self.placed.output_device

    def setup(self, trainer: lightning.Trainer) -> None:
        if self.lightning_module.automatic_optimization:
            raise ValueError("set automatic_optimization = False and call placed.step")
        outside = set(self.lightning_module.parameters()) - set(self.placed.parameters())
        if outside:
            raise ValueError("make all parameters a part of the model that is placed")
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Weights are on their devices."""

    def barrier(self, name: str | None = None) -> None:
        dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total / self.world_size if reduce_op in ("mean", "avg") else total

    restore_checkpoint_after_setup = True  # the optimizer must exist
    lightning_restore_optimizer = False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str, storage_options: Any = None
    ) -> None:
        Path(filepath).parent.mkdir(parents=True, exist_ok=True)
        placer.save(self.placed, *self.optimizers, filepath, extra=checkpoint)

    def load_checkpoint(self, checkpoint_path: str, weights_only: Any = None) -> dict[str, Any]:
        return placer.load(self.placed, *(self.optimizers or [None]), checkpoint_path)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Was loaded with the checkpoint."""

    def teardown(self) -> None:
        """Weights and optimizer state stay on their devices."""


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))


def data(dtype: torch.dtype = torch.float32) -> TensorDataset:
    x = torch.randn(64, 8, dtype=dtype, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :3].argmax(1))


def place(dtype: torch.dtype = torch.float32) -> placer.PlacedModule:
    torch.manual_seed(0)
    num_devices = int(os.environ.get("LOCAL_WORLD_SIZE", "4"))
    example = torch.zeros(ROWS, 8, dtype=dtype)
    return placer.compile(network().to(dtype), SPEC, (example,), run_on=run_on(num_devices))


def train(
    module: Automatic,
    rows: TensorDataset,
    folder: Path | str,
    *,
    epochs: int = 2,
    checkpoint: Path | None = None,
) -> lightning.Trainer:
    """Fit ``module``, and validate it after each epoch; from ``checkpoint`` on, if given."""
    placed, options = module.network, {}
    loader = DataLoader(rows, batch_size=ROWS)
    validation = loader
    if dist.is_initialized():  # placer.compile made the process group
        options = {"strategy": PlacedStrategy(placed), "use_distributed_sampler": False}
        sampler = placed.sampler(rows, ROWS, shuffle=False)
        loader = DataLoader(rows, batch_sampler=sampler)
    trainer = lightning.Trainer(
        accelerator=getattr(placed, "output_device", torch.device("cpu")).type,
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_epochs=epochs,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, loader, validation, ckpt_path=checkpoint)
    return trainer


def main() -> None:
    module = Manual(place())
    trainer = train(module, data(), "lightning_output")
    if trainer.is_global_zero:
        accuracy = float(trainer.callback_metrics["accuracy"])
        print(f"loss {module.losses[0]:.4f} -> {module.losses[-1]:.4f}, accuracy {accuracy:.2f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
