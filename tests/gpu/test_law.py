"""The law on a GPU, as far as the machine has one: in one process, and with a process per GPU.

`make gpu` runs it. In one process the same runs on the CPU with --law; processes do in tests/distributed.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import models
import pytest
import torch
from oracle import assert_close, gradient_noise
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from unet3d import unet3d

import placer

ROOT = Path(__file__).parents[2]
NEEDS_GPU = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device here; `make gpu` where there is one"
)
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]
HOW: dict[str, dict[str, Any]] = {
    "two stages": {},
    "micro-batches": {"microbatches": 2, "schedule": "1F1B"},
    "a split backward": {"schedule": "InterleavedZeroBubble", "microbatches": 4},
    "two replicas": {"replicas": 2},
    "recomputed": {"checkpoint": ["**"]},
    "offloaded": {"offload": ["**"]},
    "offloaded beside the kernels": {
        "offload": ["**"], "offload_overlap": True, "microbatches": 2, "schedule": "1F1B"
    },
}  # fmt: skip


def _network(name: str, device: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name == "U-Net":
        model, shape = unet3d(width=4, depth=3, norm="batch"), (4, 1, 16, 16, 16)
        return model.double(), torch.randn(shape, dtype=torch.float64)
    transformer = models.TiedTransformer().double()
    for module in transformer.modules():
        # The plain model runs on the CPU, and a GPU draws other masks from the same seed.
        if isinstance(module, nn.Dropout) and device != "cpu":
            module.p = 0.0
    return transformer, torch.randint(0, 17, (8, 6))


def _run_on(device: str, how: str) -> str | None:
    """None where every stage of every replica has a GPU of its own; else where all of them run."""
    needed = 2 * int(HOW[how].get("replicas", 1))
    enough = device == "cuda" and torch.cuda.device_count() >= needed
    return None if enough else ("cuda:0" if device == "cuda" else "cpu")


@pytest.mark.matrix(0)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["U-Net", "tied transformer"])
@pytest.mark.parametrize("device", DEVICES)
def test_one_process_equals_the_plain_model(device: str, name: str, how: str) -> None:
    """On a GPU for every stage of every replica where there are as many, else all on the first."""
    model, x = _network(name, device)
    spec = {"devices": [f"{device}:0", f"{device}:1"], **HOW[how]}
    found = placer.verify(model, spec, x, run_on=_run_on(device, how))
    assert found.ok, found


@pytest.mark.matrix(1)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("device", DEVICES)
def test_a_step_equals_the_plain_models(device: str, how: str) -> None:
    """``placed.step`` follows the schedule; the test above runs forward, then all of backward."""
    torch.manual_seed(0)
    model = unet3d(width=4, depth=3, norm="group").double()
    x = torch.randn(4, 1, 16, 16, 16, dtype=torch.float64)
    plain = copy.deepcopy(model)
    _loss(plain(x)).backward()
    spec = {"devices": [f"{device}:0", f"{device}:1"], **HOW[how]}
    placed = placer.compile(model, spec, x, run_on=_run_on(device, how))
    for _ in range(2):  # the second one finds the first one's queues and pinned memory
        placed.zero_grad()
        placed.step(x, loss_fn=_loss, reduction="mean")
    noise = gradient_noise(plain)
    expected = dict(plain.named_parameters())
    for name, parameter in placed.named_parameters():
        assert parameter.device.type == device
        assert parameter.grad is not None
        assert_close(parameter.grad.cpu(), expected[name].grad, name, floor=noise)


def _loss(output: Tensor) -> Tensor:
    return output.square().mean()


class _Casts(TorchDispatchMode):
    """Counts how often a parameter is copied in another data type."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter):
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("checkpoint", [[], ["**"]])
@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_step_casts_each_weight_once_and_adds_gradients_in_fp32(
    device: str, schedule: str, checkpoint: list[str]
) -> None:
    """Not once for each micro-batch; the gradients are bit for bit those of casts of its own for each."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)
    )
    x = torch.randn(8, 16)
    plain = copy.deepcopy(model).to(device)
    for rows in x.to(device).chunk(4):
        with torch.autocast(device, torch.bfloat16):
            result = plain(rows)
        (_loss(result.float()) / 4).backward()
    spec = {"devices": [f"{device}:0", f"{device}:1"], "precision": "bf16", "microbatches": 4}
    spec |= {"schedule": schedule, "checkpoint": checkpoint}
    placed = placer.compile(model, spec, x, run_on=_run_on(device, "two stages"))
    with _Casts() as casts:
        placed.step(x, loss_fn=lambda result: _loss(result.float()), reduction="mean")
    assert casts.count == len(list(model.parameters()))
    for name, expected in plain.named_parameters():
        found = placed.get_parameter(name).grad
        assert found is not None and torch.equal(found, expected.grad), name  # type: ignore[arg-type]


@pytest.mark.matrix(0)
@pytest.mark.parametrize("fields", [{"space": 2}, {"space": 2, "chunks": 2, "checkpoint": ["**"]}])
@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_volume_split_in_space_equals_the_whole(
    device: str, norm: Literal["group", "batch"], fields: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = unet3d(width=4, depth=2, norm=norm).double()
    x = torch.randn(2, 1, 16, 16, 16, dtype=torch.float64)
    spec = {"devices": [f"{device}:0", f"{device}:1"], **fields}
    found = placer.verify(model, spec, x, run_on=_run_on(device, "two stages"))
    assert found.ok, found


@NEEDS_GPU
def test_a_process_per_device_equals_the_plain_model() -> None:
    """With NCCL on all GPUs (at most four).

    On one GPU there is one rank: NCCL does not take two on the same GPU, and gloo sends and receives
    no CUDA tensors.
    """
    ranks = min(torch.cuda.device_count(), 4)
    paths = [str(ROOT), str(ROOT / "tests"), str(ROOT / "examples")]
    paths += os.environ.get("PYTHONPATH", "").split(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = str(Path(__file__).with_name("ranks.py"))
    done = subprocess.run(
        [*command, f"--nproc-per-node={ranks}", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == ranks
