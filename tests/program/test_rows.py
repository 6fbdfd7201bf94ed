"""Models whose rows depend on each other are not split; all others give what the whole batch gives."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import placer
from placer.program.rows.dependence import Rows, rows_by_size

SPEC = {"devices": ["cuda:0", "cuda:1"], "replicas": 2, "microbatches": 2}


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(6, 6), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


def _first_row(y: Tensor, *, in_place: bool) -> Tensor:
    y = y * 2
    if in_place:
        y[0].zero_()
    else:
        y[:1] = 0
    return y


def _written_first(y: Tensor) -> Tensor:
    y[0] = 1
    return y


def _narrowed(y: Tensor) -> Tensor:
    y.narrow(0, 1, 1).add_(1)
    return y


def _chosen(y: Tensor) -> Tensor:
    """Numbers of rows that the rows say."""
    return (y[:, 0] > 0).long()


def _numbers(y: Tensor) -> Tensor:
    """The numbers of the rows."""
    return torch.arange(y.size(0))


def _written(y: Tensor, *, by_copy: bool) -> Tensor:
    """What is read later is not the view that is written."""
    columns = torch.zeros_like(y)
    if by_copy:
        columns[:, :3].copy_(y[:, :3])
    else:
        columns[:, :3] = y[:, :3]
    return columns


MIXING: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "statistic": (lambda y: y - y.mean(0), "it uses a statistic of the batch"),
    "pairs": (lambda y: y @ y.T, "it pairs the rows of the batch with each other"),
    "softmax": (lambda y: y.softmax(0), "it computes along the rows of the batch"),
    "sum of rows": (lambda y: y.cumsum(0), "it computes along the rows of the batch"),
    "sum along an axis": (
        lambda y: torch.cumsum(y, axis=0),
        "it computes along the rows of the batch",
    ),
    "rolled": (lambda y: y.roll(1, 0), "it computes along the rows of the batch"),
    "flipped": (lambda y: y.flip(1, 0), "it computes along the rows of the batch"),
    "regrouped": (lambda y: y.reshape(-1, 3)[1:], "it regroups the rows of the batch"),
    "parts of rows in columns": (
        lambda y: y.reshape(6, -1).T,
        "it regroups the rows of the batch",
    ),
    "columns in rows": (lambda y: y.T.reshape(-1, 6), "it regroups the rows of the batch"),
    "columns in flat rows": (
        lambda y: nn.Flatten(0)(y.T).view(-1, 6),
        "it regroups the rows of the batch",
    ),
    "strides": (
        lambda y: y.as_strided((y.size(0), 6), (1, y.size(0))),
        "it computes along the rows of the batch",
    ),
    **{
        name: (function, "it computes along the rows of the batch")
        for name, function in {
            "product": lambda y: torch.eye(y.size(0)).roll(1, 0) @ y,
            "triangle": lambda y: y.tril(),
            "convolution": lambda y: nn.functional.conv1d(y.T[None], torch.ones(6, 6, 1))[0].T,
            "layer norm": lambda y: nn.functional.layer_norm(y, y.shape),
            "group norm": lambda y: nn.functional.group_norm(y.T[None], 2)[0].T,
            "lengths": lambda y: nn.functional.normalize(y, dim=0),
            "pooling": lambda y: nn.functional.max_pool1d(y.T, 3, 1, 1).T,
            "in another order": lambda y: y[y[:, 0].argsort()],
            "largest": lambda y: y.topk(y.size(0), 0).values,
            "frequencies": lambda y: torch.fft.fft(y, dim=0).real,
        }.items()
    },
    "first row": (lambda y: _first_row(y, in_place=False), "it writes some of the rows"),
    "first row in place": (lambda y: _first_row(y, in_place=True), "it writes some of the rows"),
    "numbers of rows": (
        lambda y: y + torch.arange(y.size(0), dtype=y.dtype)[:, None],
        "it uses the numbers of the rows, which begin anew in every slice",
    ),
    "statistic of what is written": (
        lambda y: y - _written(y, by_copy=False).mean(0),
        "it uses a statistic of the batch",
    ),
    "statistic of what a view writes": (
        lambda y: y - _written(y, by_copy=True).mean(0),
        "it uses a statistic of the batch",
    ),
    **{
        f"numbers of rows {name}": (
            function,
            "it uses the numbers of the rows, which begin anew in every slice",
        )
        for name, function in {
            "that pick columns": lambda y: y[_numbers(y), _numbers(y) % 3],
            "that gather columns": lambda y: y.gather(1, (_numbers(y) % 3)[:, None]),
            "in a triangle": lambda y: y * torch.ones_like(y).tril(),
            "in a diagonal": lambda y: y * torch.eye(y.size(0), 6),
            "in a mask": lambda y: y * _written_first(torch.zeros_like(y)),
            "in a mask, by a view": lambda y: y * _narrowed(torch.zeros_like(y)),
        }.items()
    },
    "part of the rows": (lambda y: _narrowed(y * 2), "it writes some of the rows"),
    **{
        f"indices into rows: {name}": (function, "it computes along the rows of the batch")
        for name, function in {
            "add": lambda y: y.index_add(0, _chosen(y), y),
            "add in place": lambda y: torch.zeros_like(y).index_add_(0, _chosen(y), y),
            "copy": lambda y: torch.zeros_like(y).index_copy(0, _chosen(y), y),
            "fill": lambda y: y.index_fill(0, torch.tensor([1]), 0.0),
        }.items()
    },
    "count of rows": (lambda y: y * y.size(0), "it computes with the number of rows"),
    "length": (lambda y: y / len(y), "it computes with the number of rows"),
    "root of the length": (lambda y: y / len(y) ** 0.5, "it computes with the number of rows"),
    "filled with the length": (
        lambda y: y + torch.full((y.size(0), 1), 1 / len(y)),
        "it computes with the number of rows",
    ),
    "count in a division": (lambda y: y / y.numel(), "it computes with the number of rows"),
}


class Words(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        by_frequency = kind.startswith("frequency")
        layer = nn.EmbeddingBag if "bag" in kind else nn.Embedding
        self.words = layer(9, 6, scale_grad_by_freq=by_frequency)
        self.last, self.as_function = nn.Linear(6, 2), kind.endswith("function")

    def forward(self, words: Tensor, offsets: Tensor | None = None) -> Tensor:
        more = () if offsets is None else (offsets,)
        if self.as_function:
            x = nn.functional.embedding(words, self.words.weight, scale_grad_by_freq=True)
        else:
            x = self.words(words, *more)
        y: Tensor = self.last(x)
        return y


@pytest.mark.parametrize("kind", ["frequency", "frequency in a function", "frequency of bags"])
def test_gradients_by_the_frequency_in_the_batch_are_not_those_of_slices(kind: str) -> None:
    words = torch.randint(9, (8, 3))
    with pytest.raises(placer.CaptureError, match="divides gradients by how often"):
        placer.compile(Words(kind), SPEC, words, run_on="cpu")


def test_bags_by_offsets_are_not_split() -> None:
    words, offsets = torch.randint(9, (8,)), torch.arange(0, 8, 2)
    with pytest.raises(placer.CaptureError, match="takes bags out of one row of indices"):
        placer.compile(Words("bags"), SPEC, (words, offsets), run_on="cpu")


@pytest.mark.matrix(3)
@pytest.mark.parametrize("kind", MIXING)
def test_a_model_that_mixes_rows_is_not_split(kind: str) -> None:
    function, reason = MIXING[kind]
    x = torch.randn(8, 6)
    with pytest.raises(placer.CaptureError, match=reason) as raised:
        placer.compile(Net(function), SPEC, x, run_on="cpu")
    assert "test_rows.py" in raised.value.problem
    whole = {**SPEC, "replicas": 1, "microbatches": 1}
    placed = placer.compile(Net(function), whole, x, run_on="cpu")
    placed(x)
    said = {**SPEC, "inputs": {"x": {"batch_dim": 0}}}
    assert placer.compile(Net(function), said, x, run_on="cpu").plan.notes


def _masked(y: Tensor) -> Tensor:
    """As the windows of a Swin transformer are numbered."""
    mask = y.new_zeros(6)
    mask[:3] = 1
    return y * (mask - mask.mean())


def test_numbers_that_are_written_do_not_depend_on_rows() -> None:
    net, x = Net(_masked), torch.randn(8, 6)
    placed = placer.compile(net, SPEC, x, run_on="cpu")
    torch.testing.assert_close(placed(x), net(x))


@pytest.mark.parametrize("by_copy", [False, True])
def test_rows_that_are_written_into_a_new_tensor_are_split(by_copy: bool) -> None:
    net, x = (
        Net(lambda y: _written(y, by_copy=by_copy).mean(1, keepdim=True) + y),
        torch.randn(8, 6),
    )
    placed = placer.compile(net, SPEC, x, run_on="cpu")
    torch.testing.assert_close(placed(x), net(x))


def _rearranged(seed: int, y: Tensor) -> Tensor:
    """``y``, whose elements a random sequence of views and copies puts elsewhere."""
    choose, batch = random.Random(seed), y.size(0)
    for _ in range(choose.randint(2, 4)):
        dims = list(range(y.dim()))
        part = choose.choice([d for d in (1, 2, 3, 6) if y.numel() // batch % d == 0])
        shape = choose.sample([part, y.numel() // batch // part, batch], 3)
        at = choose.choice(dims)
        ways: list[Callable[[], Tensor]] = [
            lambda y=y, shape=shape: y.reshape(shape),
            lambda y=y, dims=dims: y.permute(choose.sample(dims, len(dims))),
            lambda y=y, at=at: y.flatten(0, at),
            lambda y=y, at=at: torch.cat([y, y * 2], at),
            lambda y=y, at=at: torch.stack([y, y + 1], at),
            lambda y=y: y.expand(2, *y.shape),
        ]
        y = choose.choice(ways)()
    return y.reshape(batch, -1) if choose.random() < 0.6 else y


def test_rearranged_rows_are_right_or_refused() -> None:
    torch.manual_seed(0)
    refused = 0
    for seed in range(30):
        model = Net(partial(_rearranged, seed)).double()
        x = torch.randn(8, 6, dtype=torch.float64)
        try:
            placed = placer.compile(copy.deepcopy(model), SPEC, x, run_on="cpu")
        except placer.CaptureError as error:
            assert "the rows of the batch" in error.problem
            refused += 1
            continue
        for inputs in (x, torch.randn(7, 6, dtype=torch.float64)):
            torch.testing.assert_close(placed(inputs), model(inputs))
    assert 5 < refused < 25


SEPARATE: dict[str, Callable[[Tensor], Any]] = {
    "each row": lambda y: y - y.mean(1, keepdim=True),
    "softmax": lambda y: y.softmax(1),
    "shapes": lambda y: y.view(y.size(0), 2, 3).transpose(0, 1).reshape(2, y.size(0) * 3)[0],
    "mean of rows": lambda y: y.mean(0),
    "sum by hand": lambda y: y.sum(0) / y.size(0),
    "sum by the length": lambda y: y.sum(0) / len(y),
    "column of each row": lambda y: y[_numbers(y), y.argmax(1)],
    "sum": lambda y: (y.sum(), y.square().sum(0)),
    "expanded": lambda y: y + y.new_ones(6).expand(y.size(0), 6),
    "batch second": lambda y: y.T,
    "first column": lambda y: _first_row(y.T, in_place=False).T,
    "own convolutions": lambda y: nn.functional.conv1d(
        y.view(1, -1, 3), y.view(-1, 1, 3), groups=y.size(0) * 2
    ).view(-1, 2),
    "repeated": lambda y: y.repeat(2, 1).softmax(-1).view(2, -1, 6).mean(0),
    "pooled": lambda y: nn.functional.avg_pool1d(y, 2),
    "looked up": lambda y: y * torch.ones(6, dtype=y.dtype).cumsum(0)[y.argmax(1)][:, None],
    "joined along an axis": lambda y: torch.cat([y, y], axis=1).reshape(y.size(0), 3, 4),
}


@pytest.mark.parametrize("kind", SEPARATE)
def test_a_model_of_separate_rows_is_split(kind: str) -> None:
    torch.manual_seed(0)
    model = Net(SEPARATE[kind]).double()
    x = torch.randn(8, 6, dtype=torch.float64)
    placed = placer.compile(copy.deepcopy(model), SPEC, x, run_on="cpu")
    for inputs in (x, torch.randn(8, 6, dtype=torch.float64), x[:7]):
        torch.testing.assert_close(placed(inputs), model(inputs))


class Replaces(nn.Module):
    """Its buffer gets other data, which no operator writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("average", torch.zeros(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        self.average.data = 0.9 * self.average.data + 0.1 * self.layer.weight.data
        return self.layer(x) @ self.average


class _KeepsPart(nn.Module):
    """It writes a statistic into a part of a buffer, and reads the whole, which no node has made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.average[:3] = y.detach().mean(0)[:3]
        return y - self.average


def test_rows_that_read_state_of_the_batch_are_mixed() -> None:
    with pytest.raises(placer.CaptureError, match="it uses a statistic of the batch"):
        placer.compile(_KeepsPart(), SPEC, torch.randn(8, 6), run_on="cpu")


def test_halves_of_rows_beside_whole_rows_are_mixed() -> None:
    """Both have two entries per row: one after the other in one, one block after the other in the other."""
    model = Net(lambda y: torch.cat([y, y])[:, :3] + y.view(-1, 3))
    with pytest.raises(placer.CaptureError, match="it pairs the rows of the batch"):
        placer.compile(model, SPEC, torch.randn(8, 6), run_on="cpu")


def test_the_dimension_that_grows_with_the_batch_has_the_rows() -> None:
    one, two = torch.Size([3, 4, 5]), torch.Size([3, 8, 5])
    assert rows_by_size(one, two) == Rows(dim=1, combination=None, depends=True)
    assert rows_by_size(one, one) == Rows(combination=None, depends=True)
    assert rows_by_size(one, torch.Size([6, 8, 5])).dim is None
    assert rows_by_size(2, 2) == Rows() and rows_by_size(2, 4).combination is None


@pytest.mark.parametrize("inside", [False, True])
def test_state_whose_data_is_replaced_is_not_set_once_per_slice(*, inside: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Replaces()) if inside else Replaces()
    with pytest.raises(placer.CaptureError, match=r"it sets the buffer .*average"):
        placer.compile(model, SPEC, torch.randn(8, 6), run_on="cpu")
    whole = {**SPEC, "replicas": 1, "microbatches": 1}
    placed = placer.compile(copy.deepcopy(model), whole, torch.randn(8, 6), run_on="cpu")
    x = torch.randn(8, 6)
    torch.testing.assert_close(placed(x), model(x))
    torch.testing.assert_close(dict(placed.named_buffers()), dict(model.named_buffers()))


WRITES: dict[str, tuple[Callable[[Tensor, Tensor], object], bool]] = {
    "mean": (lambda w, y: w.add_(y.detach().mean(0)), True),
    "constant": (lambda w, y: w.add_(1), True),
    "sum": (lambda w, y: w.add_(y.detach().sum(0)), False),
    "last row": (lambda w, y: w.copy_(y.detach()[-1]), False),
    "part": (lambda w, y: w[:2].copy_(y.detach().mean(0)[:2]), False),
}


@pytest.mark.parametrize("kind", WRITES)
def test_a_tensor_outside_of_the_model_that_slices_write_is_combined_or_refused(kind: str) -> None:
    write, combined = WRITES[kind]
    held = torch.ones(6, dtype=torch.float64)

    def function(y: Tensor) -> Tensor:
        write(held, y)
        return y

    model = Net(function).double()
    x = torch.randn(8, 6, dtype=torch.float64)
    if not combined:
        with pytest.raises(placer.CaptureError, match='"stored"'):
            placer.compile(model, {**SPEC, "replicas": 1}, x, run_on="cpu")
        return
    placed = placer.compile(model, {**SPEC, "replicas": 1}, x, run_on="cpu")
    found = []
    for each in (placed, model):
        held.fill_(1)
        each(x)
        found.append(held.clone())
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


SMALLER: dict[str, Callable[[Tensor], Any]] = {
    "one row": lambda y: y * 2 if y.size(0) == 1 else y,
    "few rows": lambda y: y * 2 if y.size(0) > 4 else y,
    "squeezed": lambda y: y.squeeze(),
    "squeezed column": lambda y: y[:, :1].squeeze(),
}


@pytest.mark.parametrize("kind", SMALLER)
def test_slices_that_are_smaller_than_the_example_are_right_or_refused(kind: str) -> None:
    model = Net(SMALLER[kind]).double()
    x = torch.randn(30, 6, dtype=torch.float64)
    placed = placer.compile(copy.deepcopy(model), SPEC, x, run_on="cpu")
    for count in (30, 8, 4, 1):
        if count == 4 if kind != "few rows" else count == 8:
            with pytest.raises(placer.PlacerError, match=r"(?s)slice.* use 1 replica"):
                placed(x[:count])
        else:
            torch.testing.assert_close(placed(x[:count]), model(x[:count]))
