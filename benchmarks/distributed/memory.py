"""Memory of a rank: predicted by its plan, simulated, and counted in real processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import placer
from benchmarks.distributed.contestants import loss_of
from examples.unet3d import unet3d
from placer.executor.place import CALLER
from placer.simulation.ranks import RankLedger


def memory_case(schedule: str, count: int, stages: int) -> tuple[nn.Module, dict[str, Any], Tensor]:
    torch.manual_seed(0)
    model = unet3d(width=8, depth=3, out_channels=3)
    spec = {
        "devices": [f"cpu:{i}" for i in range(stages)],
        "schedule": schedule,
        "microbatches": count,
    }
    return model, spec, torch.randn(8, 1, 32, 32, 32)


def measure_memory() -> list[dict[str, Any]]:
    """Peak bytes of a step on this rank, counted storage by storage on real tensors."""
    found = []
    stages = dist.get_world_size()
    for schedule in ("GPipe", "1F1B", "InterleavedZeroBubble"):
        for count in (2, 4):
            model, spec, x = memory_case(schedule, count, stages)
            target = torch.randint(0, 3, (8, 32, 32, 32))
            placed = placer.compile(model, spec, x)
            optimizer = torch.optim.Adam(placed.parameters())
            placed.step(x, target=target, loss_fn=loss_of)  # finds what crosses, on fake tensors
            optimizer.zero_grad()
            ledger = RankLedger(kernels=lambda _: "cpu")
            ledger.add_state((*placed.parameters(), *placed.buffers()))
            for tensor in (x, target):
                ledger.add(tensor, CALLER, kind="input")
            with ledger:
                for _ in range(2):
                    placed.step(x, target=target, loss_fn=loss_of)
                    optimizer.step()
                    optimizer.zero_grad()
            found.append(
                {
                    "schedule": schedule,
                    "microbatches": count,
                    "stages": stages,
                    "rank": dist.get_rank(),
                    "measured": ledger.peak.nbytes,
                }
            )
    return found


def predict_memory(found: list[dict[str, Any]]) -> None:
    """Add to every entry what the plan says."""
    cases = dict.fromkeys((e["schedule"], e["microbatches"], e["stages"]) for e in found)
    for schedule, count, stages in cases:
        model, spec, x = memory_case(schedule, count, stages)
        target = torch.zeros(8, 32, 32, 32, dtype=torch.long)
        plan = placer.make_plan(model, spec, x, loss_fn=loss_of, target=target, processes=True)
        for entry in found:
            if (entry["schedule"], entry["microbatches"], entry["stages"]) == (
                schedule,
                count,
                stages,
            ):
                entry["planned"] = plan.devices[entry["rank"]].peak
