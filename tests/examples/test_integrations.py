"""Examples with other libraries: each trains a placed model as the plain one, in float64."""

from __future__ import annotations

import copy
import importlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import placer

EXAMPLES = Path(__file__).parents[2] / "examples"
D = torch.float64
TWO = {"devices": ["cpu:0", "cpu:1"], "microbatches": 2}


@pytest.fixture(autouse=True)
def _examples_can_be_imported() -> Iterator[None]:
    sys.path.insert(0, str(EXAMPLES))
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # libraries have their own
        yield
    sys.path.remove(str(EXAMPLES))


def _example(name: str, *libraries: str) -> ModuleType:
    for library in libraries:
        pytest.importorskip(library)
    torch.manual_seed(0)
    return importlib.import_module(name)


def _assert_same_state(found: nn.Module, expected: nn.Module) -> None:
    ours, theirs = found.state_dict(), expected.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-10, atol=1e-12, msg=name)


def test_a_moving_average_is_that_of_the_plain_model() -> None:
    example = _example("moving_average")
    model, (x, y) = example.network().to(D), example.data(D)
    plain = copy.deepcopy(model)
    placed = placer.compile(model, {"devices": ["cpu:0", "cpu:1"]}, (x,))
    found, expected = (example.train(each, x, y, steps=4) for each in (placed, plain))
    _assert_same_state(found, expected)
    assert isinstance(found.module, placer.PlacedModule)
    torch.testing.assert_close(found(x), expected(x), rtol=1e-10, atol=1e-12)
    assert not torch.equal(found.module[0].weight, placed[0].weight)


def test_a_gan_with_a_gradient_penalty_trains_as_the_plain_one() -> None:
    example = _example("gan")
    models = [each.to(D) for each in example.networks()]
    plain = copy.deepcopy(models)
    placed = example.place(*models)
    losses = []
    for each in (placed, plain):
        torch.manual_seed(1)
        losses.append(example.train(*each, steps=4))
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    for found, expected in zip(placed, plain, strict=True):
        _assert_same_state(found, expected)


def test_adapters_are_trained_and_frozen_weights_get_no_gradient(tmp_path: Path) -> None:
    example = _example("lora", "peft")
    model = example.network().to(D)
    plain = copy.deepcopy(model)
    x, y = torch.randn(8, 16, dtype=D), torch.randint(4, (8,))
    placed = placer.compile(model, TWO, (x,))
    assert len(placed.plan.stages) == 2
    found, expected = (example.train(each, x, y, steps=4) for each in (placed, plain))
    assert found == pytest.approx(expected, rel=1e-10)
    _assert_same_state(placed, plain)
    adapted = [p.grad is not None for p in placed.parameters()]
    assert adapted == [p.requires_grad for p in plain.parameters()] and not all(adapted)
    for each, folder in ((placed, tmp_path / "placed"), (plain, tmp_path / "plain")):
        each.save_pretrained(folder)
    names = [sorted(p.name for p in (tmp_path / each).iterdir()) for each in ("placed", "plain")]
    assert names[0] == names[1]


def test_trainer_and_sliding_windows_of_monai() -> None:
    example = _example("monai_trainer", "monai", "ignite")
    model, data = example.network().to(D), example.samples(dtype=D)
    plain = copy.deepcopy(model)
    placed = placer.compile(model, TWO, (torch.zeros(2, 1, *example.WINDOW, dtype=D),))
    found, expected = (example.train(each, data, epochs=1) for each in (placed, plain))
    assert len(found) == 2 and found == pytest.approx(expected, rel=1e-10)
    _assert_same_state(placed, plain)
    volume = torch.randn(1, 1, 24, 20, 16, dtype=D)
    results = [example.infer(each, volume) for each in (placed, plain)]
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


def test_accelerate_prepares_a_placed_model() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(D), torch.randn(8, 4)
    placed = placer.compile(copy.deepcopy(model), {"devices": TWO["devices"]}, x.to(D))
    for each in (placed, model):
        accelerator = accelerate.Accelerator(cpu=True)
        prepared, optimizer = accelerator.prepare(each, torch.optim.Adam(each.parameters()))
        for _ in range(3):
            optimizer.zero_grad()
            accelerator.backward(prepared(x.to(D)).square().mean())
            optimizer.step()
    _assert_same_state(placed, model)


@pytest.mark.parametrize("kind", ["Automatic", "Manual"])
def test_lightning_in_one_process(kind: str, tmp_path: Path) -> None:
    """As the plain network with automatic optimization; and on from a checkpoint."""
    example = _example("lightning_module", "lightning", "torchmetrics")
    plain = example.network().to(D)
    placed = example.place(D)
    plain.load_state_dict(placed.state_dict())
    ours, theirs = getattr(example, kind)(placed), example.Automatic(plain)
    metrics = []
    for module, folder in ((ours, tmp_path / "placed"), (theirs, tmp_path / "plain")):
        example.train(module, example.data(D), folder, epochs=1).save_checkpoint(folder / "last")
        trainer = example.train(module, example.data(D), folder, checkpoint=folder / "last")
        metrics.append(float(trainer.callback_metrics["accuracy"]))
    assert len(ours.losses) == 8
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-10)
    assert metrics[0] == metrics[1]
    _assert_same_state(ours, theirs)
