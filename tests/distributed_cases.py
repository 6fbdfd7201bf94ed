"""What the processes of a test job run; here so that they can import it by name."""

from __future__ import annotations

import copy
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

CASES: dict[str, Callable[[int], Case]] = {
    "convnet": lambda rows: (models.ConvNet(p=0.0), (torch.randn(rows, 1, 8, 8, dtype=D),), {}),
    "resnet18": lambda rows: (
        torchvision.models.resnet18(num_classes=5),
        (torch.randn(rows, 3, 32, 32, dtype=D),),
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
    name: str, spec: placer.PlacementSpec, batches: tuple[int, ...] = (8, 8, 8)
) -> dict[str, Any]:
    """Train this rank's part and the plain model side by side: loss, gradients, weights, buffers."""
    torch.manual_seed(0)
    model, args, kwargs = CASES[name](batches[0])
    model = model.double()
    placed = placer.compile(model, spec, args, kwargs)
    assert isinstance(placed, placer.PlacedModule)
    plain = copy.deepcopy(model)
    ours = torch.optim.SGD(placed.parameters(), lr=0.05, momentum=0.9)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for step, rows in enumerate(batches):
        torch.manual_seed(step)
        _, args, kwargs = CASES[name](rows)
        ours.zero_grad()
        theirs.zero_grad()
        loss = placed.step(*args, loss_fn=mean_square, **kwargs)
        expected = reference_step(
            plain, args, kwargs, placed.plan.replicas, placed.plan.microbatches
        )
        assert_close(loss, expected, f"step {step}, loss")
        compare_state(placed, plain, f"step {step}")
        ours.step()
        theirs.step()
        compare_state(placed, plain, f"after step {step}")
    placed.eval()
    plain.eval()
    with torch.no_grad():
        found, wanted = placed(*args, **kwargs), plain(*args, **kwargs)
    for a, b in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        if isinstance(b, Tensor):
            assert_close(a, b, "inference")
        else:
            assert a == b
    return {"names": list(placed.state_dict()), "stages": placed.stage_indices}


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
