"""Sparse gradients of embeddings are counted by the rows that are looked up, not by the size of the table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from placements import estimated_plan
from torch import Tensor, nn

import placer
from benchmarks.allocator import allocator_peaks
from placer.cost import mean_square

WORDS, WIDTH, ROWS, LENGTH = 20_000, 32, 16, 8


class Reader(nn.Module):
    def __init__(self, words: nn.Module) -> None:
        super().__init__()
        self.words = words
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.words(x)).tanh())


def reader(*, sparse: bool = True, **options: Any) -> nn.Module:
    return Reader(nn.Embedding(WORDS, WIDTH, sparse=sparse, **options))


def words() -> Tensor:
    return torch.randint(1, WORDS, (ROWS, LENGTH))


DENSE = WORDS * WIDTH * 4
LOOKED_UP = ROWS * LENGTH * (WIDTH * 4 + 8)  # values and indices


@pytest.mark.matrix(2)
@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_real_step_takes_what_the_plan_says(options: dict[str, Any], microbatches: int) -> None:
    torch.manual_seed(0)
    x = words()
    spec = {"devices": ["cpu:0"], "optimizer": "sgd", "loss": "mean_square"}
    spec["microbatches"] = microbatches
    model = reader(**options)
    plan = placer.make_plan(model, spec, x)
    (device,) = placer.simulate(model, plan, x).devices
    measured = allocator_peaks(model, plan, (x,), loss_fn=mean_square).tensors
    assert measured == pytest.approx(device.peak, rel=0.02)
    assert measured == pytest.approx(plan.devices[0].peak, rel=0.02)
    dense = placer.make_plan(reader(sparse=False, **options), spec, x)
    assert dense.devices[0].peak - plan.devices[0].peak > 0.9 * (DENSE - 2 * LOOKED_UP)


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("optimizer", "state"), [("sgd", 0), ("adam", 2), ("sgd_momentum", 1)])
def test_the_optimizer_s_state_is_dense_and_the_gradient_is_not(optimizer: str, state: int) -> None:
    model, x = reader(), words()
    for device in ("cpu:0", "cuda:0"):
        spec = {"devices": [device], "optimizer": optimizer}
        plan = estimated_plan(model, spec, x)
        others = sum(p.nbytes for n, p in model.named_parameters() if n != "words.weight")
        assert plan.stages[0].memory.gradients == LOOKED_UP + others
        assert plan.stages[0].memory.optimizer == state * (DENSE + others)
        (found,) = placer.simulate(model, plan, x).devices
        assert found.peak == pytest.approx(plan.devices[0].peak, rel=0.05)
        assert found.peak < (1 + state) * DENSE + 0.5 * DENSE


@pytest.mark.matrix(2)
@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
@pytest.mark.parametrize("processes", [False, True])
def test_stages_and_schedules(schedule: str, processes: bool) -> None:
    model, x = reader(), words()
    devices, layers = ["cpu:0", "cpu:1"], {"words": "cpu:0", "inner": "cpu:1", "head": "cpu:1"}
    spec = {"devices": devices, "layers": layers, "microbatches": 2, "schedule": schedule}
    plan = placer.make_plan(model, {**spec, "optimizer": "sgd"}, x, processes=processes)
    assert plan.devices[0].peak < 1.2 * DENSE
    report = placer.simulate(model, plan, x, processes=processes)
    assert report.devices[0].peak == pytest.approx(plan.devices[0].peak, rel=0.02)


def test_a_bag_of_words() -> None:
    bag, x = nn.EmbeddingBag(WORDS, WIDTH, sparse=True), words()
    plan = placer.make_plan(Reader(bag), {"devices": ["cpu:0"], "optimizer": "sgd"}, x)
    assert plan.devices[0].peak < 1.1 * DENSE


class Tied(nn.Module):
    """The head reads the same weight, so its gradient is dense after all."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x) @ self.words.weight[:4].t()


def test_a_weight_that_another_operation_reads_has_a_dense_gradient() -> None:
    model, x = Tied(), words()
    spec = {"devices": ["cpu:0"], "optimizer": "sgd"}
    plan = placer.make_plan(model, spec, x)
    assert plan.stages[0].memory.gradients == DENSE
    assert placer.verify(model, spec, x).ok
