"""What the processes of a job run in tests of checkpoints; in a module so that they can import it."""

from __future__ import annotations

import copy
import os
import shutil
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import models
import torch
from distributed_cases import compile_captured, make_spec
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

import placer
from placer.program import Program, lower

IDS = torch.randint(0, 17, (8, 6), generator=torch.Generator().manual_seed(0))
Layout = tuple[int, int]  # stages, replicas


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def make_plain(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return models.TiedTransformer(depth=2).double()


def make_placed(layout: Layout, *, seed: int) -> placer.PlacedModule:
    stages, replicas = layout
    return place_plain(seed, make_spec(stages, replicas, 2), train=True)


@cache
def capture_plain(seed: int, *, train: bool) -> Program:
    return lower(make_plain(seed).train(train), (IDS,))


def place_plain(seed: int, spec: placer.PlacementSpec, *, train: bool) -> placer.PlacedModule:
    return compile_captured(capture_plain(seed, train=train), spec, IDS)


def make_optimizer(module: nn.Module) -> Optimizer:
    """Two groups with different options; a rank may have no parameter of the first group."""
    norms = [p for n, p in module.named_parameters() if "norm" in n]
    others = [p for n, p in module.named_parameters() if "norm" not in n]
    return AdamW([{"params": norms, "weight_decay": 0.0, "lr": 3e-3}, {"params": others}], lr=1e-2)


def train(module: nn.Module, optimizer: Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        if isinstance(module, placer.PlacedModule):
            loss = module.step(IDS, target=IDS, loss_fn=loss_of)
        else:
            loss = loss_of(module(IDS), IDS)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def clip_apart(layout: Layout, folder: Path) -> tuple[list[str], list[str]]:
    """The warnings of a save after clipping gradients together, and after each rank clipped its own."""
    placed = make_placed(layout, seed=0)
    optimizer = torch.optim.SGD(placed.parameters(), lr=0.1)
    found = []
    for own in (False, True):
        optimizer.zero_grad()
        placed.step(IDS, target=IDS, loss_fn=loss_of)
        if own:
            grads = [p.grad for p in placed.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
            torch.nn.utils.clip_grads_with_norm_(placed.parameters(), 0.01, norm)
        else:
            placed.clip_grad_norm_(0.01)
        optimizer.step()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            placer.save(placed, optimizer, folder / str(own))
        found.append([str(w.message) for w in caught if "placer.save" in str(w.message)])
    return found[0], found[1]


def save_and_go_on(layout: Layout, path: Path, *, dropout: bool) -> dict[str, Any]:
    """Train 2 steps, save, train 2 more: the later losses and this rank's weights."""
    placed = make_placed(layout, seed=0)
    placed.train(dropout)
    optimizer = make_optimizer(placed)
    train(placed, optimizer, 2)
    placer.save(placed, optimizer, path, extra={"steps": 2})
    return {"losses": train(placed, optimizer, 2), "state": placed.state_dict()}


def load_and_go_on(layout: Layout, path: Path, *, dropout: bool) -> dict[str, Any]:
    """The same, starting from the checkpoint with a module that was trained differently before."""
    placed = make_placed(layout, seed=1)
    placed.train(dropout)
    optimizer = make_optimizer(placed)
    train(placed, optimizer, 1)
    assert placer.load(placed, optimizer, path) == {"steps": 2}
    return {"losses": train(placed, optimizer, 2), "state": placed.state_dict()}


def errors(layout: Layout, path: Path) -> list[str]:
    """The error messages for state that cannot be loaded or saved: equal on all ranks, and no rank hangs."""
    placed = make_placed(layout, seed=0)
    optimizer = make_optimizer(placed)
    found = []
    saved = path / "plain"
    if placed.own_share[0] == 0 and 0 in placed.stage_indices:
        placer.save(nn.Linear(2, 2), None, saved)  # not placed: this process alone
    for target, given in (
        (saved, {}),
        (path / "none", {}),
        (path / "new", {"extra": {"f": Path()}}),
    ):
        try:
            if given:
                placer.save(placed, optimizer, target, **given)
            else:
                torch.distributed.barrier()
                placer.load(placed, optimizer, target)
        except placer.PlacerError as error:
            found.append(str(error))
    return found


def load_damaged(layout: Layout, path: Path) -> tuple[list[str], bool]:
    """The messages of this rank for damaged copies of a checkpoint: nothing changed, none waits.

    And whether the good one loads after all of them.
    """
    placed = make_placed(layout, seed=0)
    optimizer = make_optimizer(placed)
    train(placed, optimizer, 1)
    placer.save(placed, optimizer, path / "good")
    if torch.distributed.get_rank() == 0:
        for name, file, at in (
            ("a weight of rank 1", "__1_0.distcp", -900),
            ("the table", "contents.json", 200),
        ):
            shutil.copytree(path / "good", path / name)
            data = bytearray((path / name / file).read_bytes())
            data[at] ^= 1
            (path / name / file).write_bytes(data)
        shutil.copytree(path / "good", path / "cut short")
        os.truncate(path / "cut short" / "__0_0.distcp", 3000)
    good = copy.deepcopy(placed.state_dict())
    train(placed, optimizer, 1)
    before = copy.deepcopy((placed.state_dict(), optimizer.state_dict()))
    found = []
    for name in ("a weight of rank 1", "the table", "cut short"):
        torch.distributed.barrier()
        try:
            placer.load(placed, optimizer, path / name)
        except placer.CheckpointError as error:
            found.append(str(error))
        assert is_same((placed.state_dict(), optimizer.state_dict()), before), name
    placer.load(placed, optimizer, path / "good")
    return found, is_same(placed.state_dict(), good)


def is_same(one: Any, other: Any) -> bool:
    """Whether both are equal bit for bit, in tensors and in containers."""
    if isinstance(one, Tensor):
        alike = isinstance(other, Tensor) and one.dtype == other.dtype
        return alike and torch.equal(one.view(-1), other.view(-1)) and one.shape == other.shape
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)
