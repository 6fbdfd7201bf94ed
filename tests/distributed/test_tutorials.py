"""The tutorials with one process per device, against what they replace, written by hand."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from jobs import Job
from torch.nn import functional as F
from torch.optim.swa_utils import get_ema_multi_avg_fn

import placer

EXAMPLES = Path(__file__).parents[2] / "examples"
OPTIONS = {"epochs": 1, "rows": 256, "dropout": 0.0, "dtype": torch.float64}


def _train(spec: str, **options: object) -> list[float]:
    sys.path.insert(0, str(EXAMPLES))
    import digits_torchrun

    return digits_torchrun.train(digits_torchrun.SPECS / spec, **options)


def test_pipeline_trains_as_one_process_and_goes_on_from_its_checkpoint(
    job_of: Callable[[int], Job], tmp_path: Path
) -> None:
    spec = "digits_torchrun_pipeline.json"
    found = job_of(4).run(_train, spec, checkpoint=tmp_path / "c", **OPTIONS)
    assert [bool(losses) for losses in found] == [False, True, False, True]
    # Two micro-batches each, a loss for every one of them: the mean over all is one process's.
    one_process = _train(spec, checkpoint=tmp_path / "c", **{**OPTIONS, "epochs": 2})
    assert len(one_process) == 1  # it went on after the first epoch
    straight = _train(spec, **{**OPTIONS, "epochs": 2})
    both = [(a + b) / 2 for a, b in zip(found[1], found[3], strict=True)]
    assert [*both, *one_process] == pytest.approx(straight, rel=1e-9)


def _run_as_spawned(*args: object) -> str:
    """What ``digits_spawn.worker`` prints in a process that is in no process group yet."""
    sys.path.insert(0, str(EXAMPLES))
    import digits_spawn

    rank = dist.get_rank()
    dist.destroy_process_group()
    del os.environ["LOCAL_RANK"]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            digits_spawn.worker(rank, *args)
    finally:
        os.environ["LOCAL_RANK"] = str(rank)
    return printed.getvalue()


@pytest.mark.matrix(0)
def test_spawn(job_of: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes that are there already, and have imported torch."""
    sys.path.insert(0, str(EXAMPLES))
    import digits_spawn

    printed: list[str] = []

    def spawn(function: object, args: tuple[object, ...], nprocs: int) -> None:
        assert function is digits_spawn.worker
        printed.extend(job_of(nprocs).run(_run_as_spawned, *args))

    monkeypatch.setattr(digits_spawn.mp, "spawn", spawn)
    digits_spawn.main(steps=2)
    lines = "".join(printed).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        *(f"two replicas, step {i}" for i in range(2)),
        *(f"two stages, step {i}" for i in range(2, 4)),
    ]
    losses = [float(line.split()[-1]) for line in lines]
    assert losses == sorted(losses, reverse=True)


def _train_in_space() -> tuple[list[float], list[float]]:
    sys.path.insert(0, str(EXAMPLES))
    import unet3d_in_space

    return unet3d_in_space.train(), unet3d_in_space.train_plain()


@pytest.mark.matrix(0)
def test_a_unet_split_in_space_trains_as_the_plain_one(job_of: Callable[[int], Job]) -> None:
    for found, expected in job_of(2).run(_train_in_space):
        assert found == pytest.approx(expected, rel=1e-10)


def _train_with_lightning(folder: Path) -> tuple[list[float], float, list[str]]:
    """Two epochs, and one more from the checkpoint in a new placement, as ``torchrun`` would start it."""
    sys.path.insert(0, str(EXAMPLES))
    import lightning_module as example

    values = {"RANK": dist.get_rank(), "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4, "GROUP_RANK": 0}
    values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}  # unused: there is a process group
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        first, second = (example.Manual(example.place(torch.float64)) for _ in range(2))
        rows = example.data(torch.float64)
        saved = example.train(first, rows, folder, epochs=2).checkpoint_callback.best_model_path
        trainer = example.train(second, rows, folder, epochs=3, checkpoint=saved)
        with pytest.raises(ValueError, match="automatic_optimization"):
            example.train(example.Automatic(second.network), rows, folder)
        from torchmetrics import SumMetric

        for sync, counted in ((True, 4), (False, 1)):  # what every rank has is counted by each
            metric = SumMetric(sync_on_compute=sync)
            metric.update(1.0)
            assert metric.compute() == counted
        assert trainer.callback_metrics["loss"].item() == second.losses[-1]
        accuracy = float(trainer.callback_metrics["accuracy"])
        return first.losses + second.losses, accuracy, sorted(second.state_dict())
    finally:
        for name in values:
            del os.environ[name]


@pytest.mark.filterwarnings("default")  # Lightning's own
def test_lightning_trains_as_in_one_process(job_of: Callable[[int], Job], tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("torchmetrics")
    found = job_of(4).run(_train_with_lightning, tmp_path / "job")
    sys.path.insert(0, str(EXAMPLES))
    import lightning_module as example

    module = example.Manual(example.place(torch.float64))
    rows = example.data(torch.float64)
    trainer = example.train(module, rows, tmp_path / "one", epochs=3)
    for losses, accuracy, _ in found:
        assert losses == pytest.approx(module.losses, rel=1e-10)
        assert accuracy == float(trainer.callback_metrics["accuracy"])
    assert {name for _, _, names in found for name in names} == set(module.state_dict())


def _use_libraries() -> None:
    """A moving average, and with the libraries that are here: adapters, and inference in windows."""
    sys.path.insert(0, str(EXAMPLES))
    import moving_average

    spec = {"devices": ["cpu:0", "cpu:1"], "microbatches": 2}
    torch.manual_seed(0)
    model, plain = (moving_average.network().double() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    x, y = moving_average.data(torch.float64)
    placed = placer.compile(model, {"devices": ["cpu:0", "cpu:1"]}, x)
    optimizer = torch.optim.Adam(placed.parameters(), lr=0.01)
    update = get_ema_multi_avg_fn(0.9)
    averages: list[torch.Tensor] = []
    for step in range(3):
        placed.step(x, target=y, loss_fn=F.mse_loss)
        optimizer.step()
        optimizer.zero_grad()
        own = [p.detach() for p in placed.parameters()]
        if not averages:  # as AveragedModel does
            averages = [p.clone() for p in own]
        update(averages, own, step)
    expected = dict(moving_average.train(plain, x, y, 3).module.named_parameters())
    for (name, _), found in zip(placed.named_parameters(), averages, strict=True):
        torch.testing.assert_close(found, expected[name].detach(), rtol=1e-10, atol=1e-12)
    with pytest.raises(placer.PlacerError, match="cannot be pickled or copied"):
        moving_average.AveragedModel(placed)

    if importlib.util.find_spec("peft"):
        import lora

        torch.manual_seed(0)
        model = lora.network().double()
        plain, x, y = copy.deepcopy(model), torch.randn(8, 16).double(), torch.randint(4, (8,))
        placed = placer.compile(model, spec, x)
        placed.step(x, target=y, loss_fn=F.cross_entropy)
        F.cross_entropy(plain(x), y).backward()
        wanted = dict(plain.named_parameters())
        for name, p in placed.named_parameters():
            assert (p.grad is not None) is p.requires_grad is wanted[name].requires_grad, name
            if p.grad is not None:
                torch.testing.assert_close(p.grad, wanted[name].grad, rtol=1e-10, atol=1e-12)

    if importlib.util.find_spec("monai") and importlib.util.find_spec("ignite"):
        import monai_trainer

        torch.manual_seed(0)
        model, volume = monai_trainer.network().double(), torch.randn(1, 1, 24, 20, 16).double()
        plain = copy.deepcopy(model)
        window = torch.zeros(2, 1, *monai_trainer.WINDOW, dtype=torch.float64)
        placed = placer.compile(model, spec, window)
        results = [monai_trainer.infer(each, volume) for each in (placed, plain)]
        torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)
        with pytest.raises(placer.PlacerError, match="step"):
            monai_trainer.train(placed.train(), monai_trainer.samples(2, torch.float64))


@pytest.mark.matrix(0)
def test_other_libraries(job_of: Callable[[int], Job]) -> None:
    job_of(2).run(_use_libraries)
