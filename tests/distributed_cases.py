"""What the processes of a test job run; here so that they can import it by name."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import models
import torch
import torch.distributed as dist
import torchvision
from oracle import assert_close, gradient_noise, mean_square
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from unet3d import unet3d

import placer

D = torch.float64
Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class ThinResNet18(torchvision.models.ResNet):
    """torchvision's ResNet-18 with an eighth of the channels after the stem."""

    def __init__(self) -> None:
        super().__init__(torchvision.models.resnet.BasicBlock, [2, 2, 2, 2])
        self.fc = nn.Linear(64, 5)

    def _make_layer(self, block: Any, planes: int, *args: Any, **kwargs: Any) -> nn.Sequential:
        return super()._make_layer(block, planes // 8, *args, **kwargs)


CASES: dict[str, Callable[[int], Case]] = {
    "convnet": lambda rows: (models.ConvNet(p=0.0), (torch.randn(rows, 1, 8, 8, dtype=D),), {}),
    "resnet18": lambda rows: (
        ThinResNet18(),
        (torch.randn(rows, 3, 64, 64, dtype=D),),
        {},
    ),
    "3D U-Net": lambda rows: (
        unet3d(width=2, depth=3, norm="group"),
        (torch.randn(rows, 1, 8, 8, 8, dtype=D),),
        {},
    ),
    "3D U-Net, batch norm": lambda rows: (
        unet3d(width=2, depth=2, norm="batch"),
        (torch.randn(rows, 1, 8, 8, 8, dtype=D),),
        {},
    ),
    "tied transformer": lambda rows: (
        _no_dropout(models.TiedTransformer()),
        (torch.randint(0, 17, (rows, 6)),),
        {},
    ),
    "keywords and dict results": lambda rows: (
        models.KeywordModel(),
        (torch.randn(rows, 6, dtype=D),),
        {"scale": torch.randn(rows, 1, dtype=D), "twice": True},
    ),
    "in place": lambda rows: (models.InPlace(), (torch.randn(rows, 2, 5, 5, dtype=D),), {}),
    "recurrent": lambda rows: (models.Recurrent(), (torch.randn(rows, 4, 3, dtype=D),), {}),
}


def _no_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def make_spec(
    stages: int, replicas: int, microbatches: int, schedule: str = "GPipe", **fields: Any
) -> placer.PlacementSpec:
    return placer.PlacementSpec(
        devices=[f"cpu:{i}" for i in range(stages)],
        replicas=replicas,
        microbatches=microbatches,
        schedule=schedule,
        **fields,
    )


def reference_step(
    model: nn.Module, args: Any, kwargs: Any, replicas: int, microbatches: int
) -> Tensor:
    """The plain model on the same cuts, one after the other; gradients accumulate.

    Buffers are those that the first replica's cuts leave.
    """
    leaves, spec = tree_flatten((args, kwargs))
    rows = next(t.size(0) for t in leaves if isinstance(t, Tensor) and t.dim())
    before = {n: b.clone() for n, b in model.named_buffers()}
    after: dict[str, Tensor] = {}
    total = torch.zeros((), dtype=D)
    for number, row in enumerate(torch.arange(rows).chunk(replicas)):
        for name, buffer in model.named_buffers():
            buffer.data = before[name].clone()
        for cut in row.chunk(microbatches):
            part = [
                t[cut[0] : cut[-1] + 1]
                if isinstance(t, Tensor) and t.dim() and len(t) == rows
                else t
                for t in leaves
            ]
            part_args, part_kwargs = tree_unflatten(part, spec)
            loss = mean_square(model(*part_args, **part_kwargs)) * (len(cut) / rows)
            loss.backward()
            total = total + loss.detach()
        if number == 0:
            after = {n: b.clone() for n, b in model.named_buffers()}
    for name, buffer in model.named_buffers():
        buffer.data = after[name]
    return total


def check_equality(
    name: str, plan: placer.Plan, schedules: tuple[str, ...], batches: tuple[int, ...]
) -> dict[str, Any]:
    """Train this rank's part and the plain model side by side: loss, gradients, weights, buffers.

    All schedules cut the batch alike, so one reference serves them all.
    """
    torch.manual_seed(0)
    model, args, kwargs = CASES[name](batches[0])
    model = model.double()
    plans = [dataclasses.replace(plan, schedule=schedule) for schedule in schedules]
    trained = [placer.compile(model, p, args, kwargs) for p in plans]
    plain = copy.deepcopy(model)
    ours = [torch.optim.SGD(placed.parameters(), lr=0.02, momentum=0.9) for placed in trained]
    theirs = torch.optim.SGD(plain.parameters(), lr=0.02, momentum=0.9)
    for step, rows in enumerate(batches):
        torch.manual_seed(step)
        _, args, kwargs = CASES[name](rows)
        theirs.zero_grad()
        expected = reference_step(plain, args, kwargs, plan.replicas, plan.microbatches)
        for placed, optimizer in zip(trained, ours, strict=True):
            when = f"{placed.plan.schedule}, step {step}"
            optimizer.zero_grad()
            loss = placed.step(*args, loss_fn=mean_square, **kwargs)
            assert_close(loss, expected, f"{when}, loss")
            compare_state(placed, plain, when)
            optimizer.step()
        theirs.step()
        for placed in trained:
            compare_state(placed, plain, f"{placed.plan.schedule}, after step {step}")
    plain.eval()
    with torch.no_grad():
        wanted = tree_leaves(plain(*args, **kwargs))
        for placed in trained:
            found = tree_leaves(placed.eval()(*args, **kwargs))
            for a, b in zip(found, wanted, strict=True):
                if isinstance(b, Tensor):
                    assert_close(a, b, f"{placed.plan.schedule}, inference")
    return {"names": list(trained[0].state_dict()), "stages": trained[0].stage_indices}


def compare_state(placed: nn.Module, plain: nn.Module, when: str) -> None:
    expected = dict(plain.named_parameters(remove_duplicate=False))
    floor = gradient_noise(plain)
    for name, parameter in placed.named_parameters(remove_duplicate=False):
        what = f"{when}, rank {dist.get_rank()}, {name}"
        assert_close(parameter.grad, expected[name].grad, f"{what}, gradient", floor=floor)
        assert_close(parameter.detach(), expected[name].detach(), what)
    buffers = dict(plain.named_buffers(remove_duplicate=False))
    for name, buffer in placed.named_buffers(remove_duplicate=False):
        assert_close(buffer, buffers[name], f"{when}, rank {dist.get_rank()}, buffer {name}")
