"""A placed model in another mode, and on inputs of other sizes than the captured ones."""

from __future__ import annotations

import copy
import functools
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from models import ConvNet
from oracle import assert_close, mean_square, run_cuts
from torch import Tensor, nn
from torch.nn import functional as F

import placer
from placer import PlacementSpec
from placer.executor.calls import program_cache as programs
from placer.program import lower

D = torch.float64


class TwoFaces(nn.Module):
    """Functional dropout, a branch on the mode, and another structure of the result in training."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 8)
        self.mid = nn.Linear(8, 8)
        self.aux = nn.Linear(8, 2)
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        x = F.dropout(self.inp(x), 0.4, self.training)
        if self.training:
            x = x + torch.randn_like(x)
        aux = self.aux(x)
        x = self.out(torch.relu(self.mid(x)))
        return {"out": x, "aux": aux} if self.training else x


class Windows(nn.Module):
    """Pads to a multiple of four in Python, as window attention does, and mixes positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Conv1d(2, 4, 3, padding=1)
        self.mix = nn.Linear(4, 4)
        self.out = nn.Conv1d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inp(x))
        length = x.shape[-1]
        if length % 4:
            x = F.pad(x, (0, 4 - length % 4))
        rows, width = x.shape[:2]
        x = self.mix(x.reshape(rows, width, -1, 4)).reshape(rows, width, -1)
        total = x.new_zeros(rows, width, 1)
        for part in range(x.shape[-1] // 4):  # as many operations as there are windows
            total = total + x[..., part * 4 : part * 4 + 4].mean(-1, keepdim=True)
        return self.out(torch.relu(x + total))[..., :length]


class ByBatch(nn.Module):
    """Computes something else for every batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inp(x))
        for row in range(len(x)):
            x = x * (1 + row / 10)
        return self.out(x)


def _place(model: nn.Module, x: Tensor, **fields: Any) -> placer.PlacedModule:
    fields = {"devices": ["cpu:0", "cpu:1"]} | fields
    return placer.compile(model, PlacementSpec(**fields), x)


def _same(placed: placer.PlacedModule, plain: nn.Module, x: Tensor) -> None:
    """One training step without update: results and gradients, called and under a schedule."""
    cuts = placed.plan.replicas, placed.plan.microbatches
    expected = copy.deepcopy(plain)
    torch.manual_seed(1)
    loss = mean_square(run_cuts(expected, (x,), {}, *cuts))
    loss.backward()
    placed.zero_grad()
    torch.manual_seed(1)
    found = mean_square(placed(x))
    found.backward()
    assert_close(found, loss, "loss")
    for (name, a), b in zip(placed.named_parameters(), expected.parameters(), strict=True):
        assert_close(a.grad, b.grad, name)
    if max(cuts) == 1:
        placed.zero_grad()
        torch.manual_seed(1)
        assert_close(placed.step(x, loss_fn=mean_square), loss.detach(), "loss of step()")
        for (name, a), b in zip(placed.named_parameters(), expected.parameters(), strict=True):
            assert_close(a.grad, b.grad, f"step(), {name}")


@pytest.mark.parametrize("captured_in_training", [True, False])
def test_train_and_eval_are_two_programs(captured_in_training: bool) -> None:
    torch.manual_seed(0)
    model = TwoFaces().double().train(captured_in_training)
    x = torch.randn(6, 4, dtype=D)
    placed = _place(model, x)
    for training in (True, False, True):
        placed.train(training)
        model.train(training)
        _same(placed, model, x)
    assert isinstance(placed(x), dict)


def test_a_submodule_in_another_mode() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), TwoFaces()).double()
    x = torch.randn(6, 4, dtype=D)
    placed = _place(model, x)
    for part in (placed, model):
        part[1].eval() if isinstance(part, nn.Sequential) else part.get_submodule("1").eval()
    _same(placed, model, x)
    twin = copy.deepcopy(placed)
    twin.train()
    assert isinstance(twin(x), dict)
    assert isinstance(placed(x), Tensor)


class Keys(nn.Module):
    """The same operations always; the key of the result is that of the mode, or of the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 4)
        self.out = nn.Linear(4, 2)
        self.prefix = ""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        key = "many" if len(x) > 4 else "trained" if self.training else "tested"
        return {self.prefix + key: self.out(torch.tanh(self.inp(x)))}


def test_the_same_operations_in_another_structure() -> None:
    torch.manual_seed(0)
    model = Keys().double()
    x = torch.randn(4, 4, dtype=D)
    placed = _place(model, x)
    for training, prefix, rows in ((True, "", 4), (False, "", 4), (True, "", 6), (True, "a_", 4)):
        model.train(training)
        placed.train(training)
        model.prefix = placed.prefix = prefix
        x = torch.randn(rows, 4, dtype=D)
        assert list(placed(x)) == list(model(x))
        _same(placed, model, x)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("replicas", [1, 2])
def test_other_lengths(replicas: int) -> None:
    torch.manual_seed(0)
    model = Windows().double()
    placed = _place(model, torch.randn(4, 2, 12, dtype=D), replicas=replicas, microbatches=replicas)
    for rows, length in ((4, 8), (4, 12), (3, 9), (1, 16)):
        _same(placed, model, torch.randn(rows, 2, length, dtype=D))


def test_a_program_that_depends_on_the_batch() -> None:
    torch.manual_seed(0)
    model = ByBatch().double()
    x = torch.randn(4, 4, dtype=D)
    with pytest.raises(placer.CaptureError, match="something else for another batch size"):
        _place(model, x, microbatches=2)
    placed = _place(
        model, x, microbatches=2, inputs={"x": {"batch_dim": 0}}
    )  # slices by themselves
    for rows in (4, 5, 1):  # in micro-batches of 2 + 2, 3 + 2, and 1
        _same(placed, model, torch.randn(rows, 4, dtype=D))


class ReadsRows(nn.Module):
    """Does what ``read`` says with the number of rows, in Python, where capture does not see it."""

    def __init__(self, read: str, *, in_training: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        self.read, self.in_training = read, in_training

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.training and not self.in_training:
            return self.b(x)
        rows = x.size(0)
        number: Any = {
            "one": lambda: 3 if rows == 1 else 2,
            "most": lambda: max(int(rows), 100) - 98,
            "even": lambda: 2 if rows % 2 == 0 else 3,
            "odd": lambda: 3 if rows % 2 else 2,
            "length": lambda: 3 if len(x) < 3 else 2,
            "half": lambda: 3 if float(rows) / 2 < 1.5 else 2,
            "plain": lambda: int(rows),
        }[self.read]()
        return self.b(x * number)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("in_training", [True, False])
@pytest.mark.parametrize("read", ["one", "most", "even", "odd", "length", "half", "plain"])
def test_code_that_looks_at_the_number_of_rows(read: str, in_training: bool) -> None:
    torch.manual_seed(0)
    model = ReadsRows(read, in_training=in_training).double()
    placed = _place(model, torch.randn(4, 4, dtype=D))
    for training in (True, False):
        model.train(training)
        placed.train(training)
        for rows in (4, 6, 3, 1, 102):
            _same(placed, model, torch.randn(rows, 4, dtype=D))


class ExpandsRows(nn.Module):
    """Expands positions to the rows of a batch, but not to a single one, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.out = nn.Linear(4, 2)
        self.act = functools.partial(F.gelu, approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(3)[None]
        if x.size(0) != positions.shape[0]:
            positions = positions.expand(x.size(0), -1)
        return self.out(self.act(self.body(x + self.embed(positions))))


def test_a_single_row_that_is_an_exception_does_not_make_a_model_one_node() -> None:
    model = nn.Sequential(ExpandsRows(), nn.Linear(2, 2)).double()
    program = lower(model, (torch.randn(1, 3, 4, dtype=D),))
    assert not program.captured.whole_modules
    assert "another batch size" in program.captured.fixed_batch_reason
    placed = _place(model, torch.randn(1, 3, 4, dtype=D))
    for rows in (1, 4, 2):
        _same(placed, model, torch.randn(rows, 3, 4, dtype=D))


def test_sizes_that_change_nothing_share_the_captured_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(programs, "lower", None)  # a second capture would fail
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 2)
    ).double()
    placed = _place(model, torch.randn(4, 1, 16, 16, dtype=D))
    for shape in ((4, 1, 16, 16), (2, 1, 16, 16), (4, 1, 24, 20), (1, 1, 9, 9)):
        _same(placed, model, torch.randn(shape, dtype=D))


@pytest.mark.parametrize("sizes", [(8, 1, 9, 9), (8, 2, 8, 8)])
def test_sizes_that_the_model_cannot_do_are_one_clear_error(sizes: tuple[int, ...]) -> None:
    placed = _place(ConvNet().double(), torch.randn(8, 1, 8, 8, dtype=D))
    if sizes[1] == 1:
        placed(torch.randn(sizes, dtype=D))  # 9 // 2 // 2 is 8 // 2 // 2
        sizes = (8, 1, 16, 16)
    with pytest.raises(placer.CaptureError) as error:
        placed(torch.randn(sizes, dtype=D))
    assert "models.py:" in str(error.value)
    assert "fake" not in str(error.value).lower()


BRANCHES = 4


class RandomBranches(nn.Module):
    """Branches that draw: whichever device they are on, they draw in the program's order."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 4)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(BRANCHES)
        )
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        return self.out(sum(branch(x) * (i + 1) for i, branch in enumerate(self.branches)))


@pytest.mark.matrix(2)
@pytest.mark.parametrize("order", ["0101", "1010", "1100", "0110"])
def test_random_numbers_are_drawn_in_order_whatever_the_pins(order: str) -> None:
    torch.manual_seed(0)
    model = RandomBranches().double()
    x = torch.randn(6, 4, dtype=D)
    layers = {f"branches.{i}": f"cpu:{device}" for i, device in enumerate(order)}
    _same(_place(model, x, layers={"inp": "cpu:0"} | layers), model, x)


def test_threads_call_a_model_in_a_mode_that_is_new() -> None:
    """As a server does. Each of them finds that the program of this mode has to be captured."""
    torch.manual_seed(0)
    model = TwoFaces().double()
    x = torch.randn(4, 4, dtype=D)
    placed = _place(model, x)
    placed.eval()
    model.eval()
    together = threading.Barrier(4)

    def call(number: int) -> Tensor:
        together.wait()
        return placed(x + number)  # type: ignore[no-any-return]

    with ThreadPoolExecutor(4) as threads, torch.no_grad():
        for number, found in enumerate(threads.map(call, range(4))):
            assert_close(found.detach(), model(x + number), "result")
    assert nn.Module.__call__.__module__ == "torch.nn.modules.module"


class _AsksFlags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        factors = [x.requires_grad, hidden.requires_grad, self.last.weight.requires_grad]
        return self.last(hidden * sum(10**i for i, asked in enumerate(factors) if asked))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_model_that_asks_which_tensors_require_gradients(microbatches: int) -> None:
    plain = _AsksFlags().double()
    x = torch.randn(6, 4, dtype=torch.float64)
    placed = placer.compile(plain, {"devices": ["cpu"], "microbatches": microbatches}, x)
    for of_input, enabled, first, last in itertools.product((False, True), repeat=4):
        for model in (plain, placed):
            model.first.requires_grad_(first), model.last.requires_grad_(last)
        given = x.clone().requires_grad_(of_input)
        with torch.set_grad_enabled(enabled):
            torch.testing.assert_close(placed(given), plain(given))


class _KeepsType(nn.Module):
    """Reads the data type of a value that autocast casts, and asks for autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        x = (x * 0.333).to(y.dtype)
        return x * 3 if torch.is_autocast_enabled("cpu") else x


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_programs_hold_for_one_autocast(precision: str) -> None:
    plain, x = _KeepsType(), torch.randn(6, 4)
    placed = placer.compile(plain, {"devices": ["cpu"], "precision": precision}, x)
    for dtype in (None, torch.bfloat16, torch.float16, None):
        of_plain = torch.bfloat16 if precision == "bf16" else dtype
        with torch.autocast("cpu", of_plain or torch.bfloat16, of_plain is not None):
            expected = plain(x)
        with torch.autocast("cpu", dtype or torch.bfloat16, dtype is not None):
            found = placed(x)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)
