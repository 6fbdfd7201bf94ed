"""Packed sequences: packed in forward, with lengths that change from call to call, or given by the caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from other_inputs import CUT, UNCUT, Arguments, assert_equal_calls, compile_way
from torch import Tensor, nn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
)

import placer
from placer import CaptureError
from placer.program import lower


class Tagger(nn.Module):
    """Embeds tokens, packs them, and reads the padded states of a recurrent layer."""

    def __init__(self, cell: Any = nn.LSTM, *, is_sorted: bool = False, **options: Any) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(20, 8), cell(8, 6, batch_first=True, **options)
        width = (self.rnn.proj_size or 6) * (2 if self.rnn.bidirectional else 1)
        self.head, self.is_sorted = nn.Linear(width, 3), is_sorted

    def states(self, tokens: Tensor, lengths: Any) -> tuple[Tensor, Tensor, Any]:
        packed = pack_padded_sequence(
            self.embed(tokens), lengths, batch_first=True, enforce_sorted=self.is_sorted
        )
        states, last = self.rnn(packed)
        padded, counts = pad_packed_sequence(states, batch_first=True)
        return padded, counts, last

    def forward(self, tokens: Tensor, lengths: Any) -> Any:
        padded, counts, last = self.states(tokens, lengths)
        return self.head(padded), counts, last


class Pooled(Tagger):
    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        padded, counts, _ = self.states(tokens, lengths)
        mask = torch.arange(padded.size(1))[None] < counts[:, None]
        return self.head((padded * mask[..., None]).sum(1) / counts[:, None])


class OnSteps(Tagger):
    """Computes on the packed data, and returns packed sequences."""

    def forward(self, tokens: Tensor, lengths: Tensor) -> Any:
        packed = pack_padded_sequence(
            self.embed(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        states, _ = self.rnn(packed._replace(data=packed.data.tanh()))
        return states, self.head(states.data)


class TotalLength(Tagger):
    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.embed(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        padded, _ = pad_packed_sequence(
            self.rnn(packed)[0], batch_first=True, total_length=tokens.size(1)
        )
        return self.head(padded)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": Tagger,
    "sorted": lambda: Tagger(is_sorted=True),
    "projected": lambda: Tagger(proj_size=4),
    "two bidirectional layers": lambda: Tagger(nn.GRU, bidirectional=True, num_layers=2),
    "tanh": lambda: Tagger(nn.RNN),
    "masked": Pooled,
    "computes on packed data": OnSteps,
    "total length": TotalLength,
}
LENGTHS = ((9, 7, 6, 4), (8, 3, 3, 1), (9, 9, 9, 9), (5, 4), (7, 6, 5, 2, 2, 1))


def tokens_and(lengths: Any) -> Callable[[], Arguments]:
    return lambda: (torch.randint(20, (len(lengths), 9)), lengths)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("way", UNCUT)
@pytest.mark.parametrize("name", MODELS)
def test_lengths_may_change_with_every_call(name: str, way: str) -> None:
    calls = [tokens_and(torch.tensor(lengths)) for lengths in LENGTHS]
    if way == "stages":
        pins = {"embed": "cuda:0", "rnn": "cuda:1", "head": "cuda:1"}
        placed = assert_equal_calls(MODELS[name], calls, way, layers=pins)
        assert len(placed.plan.stages) == 2
    else:
        assert_equal_calls(MODELS[name], calls, way)


def test_no_capture_for_other_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = compile_way(Tagger(), tokens_and(torch.tensor(LENGTHS[0]))(), "stages")
    monkeypatch.setattr("placer.executor.calls.program_cache.same_program", None)
    for lengths in LENGTHS:
        if len(lengths) == len(LENGTHS[0]):
            placed(*tokens_and(torch.tensor(lengths))())


def test_lengths_in_a_list() -> None:
    assert_equal_calls(Tagger, [tokens_and(list(lengths)) for lengths in LENGTHS[:3]])


@pytest.mark.matrix(1)
@pytest.mark.parametrize("way", CUT)
def test_slices_are_refused(way: str) -> None:
    model, lengths = Tagger(is_sorted=True), LENGTHS[0]
    with pytest.raises(CaptureError, match=r"packs the sequences of the batch(.|\n)*use 1 replica"):
        compile_way(model, tokens_and(torch.tensor(lengths))(), way)
    with pytest.raises(CaptureError, match=r"4 lengths are given for(.|\n)*use 1 replica"):
        compile_way(model, tokens_and(list(lengths))(), way)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("way", CUT)
def test_slices_that_the_user_wants_are_equal_with_a_total_length(way: str) -> None:
    calls = [tokens_and(torch.tensor(lengths)) for lengths in LENGTHS]
    said = {"tokens": {"batch_dim": 0}, "lengths": {"batch_dim": 0}}
    assert_equal_calls(TotalLength, calls, way, inputs=said)


class Fills(Tagger):
    """Its code asks how long the longest sequence is."""

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        padded, _, _ = self.states(tokens, lengths)
        if padded.size(1) < tokens.size(1):
            missing = padded.new_zeros(len(padded), tokens.size(1) - padded.size(1), 6)
            padded = torch.cat([padded, missing], 1)
        return self.head(padded)


class Walks(Tagger):
    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        padded, _, _ = self.states(tokens, lengths)
        found = torch.zeros_like(padded[:, 0])
        for step in range(padded.size(1)):
            found = 0.5 * found + padded[:, step]
        return self.head(found)


class Around(nn.Module):
    def __init__(self, inside: type[nn.Module]) -> None:
        super().__init__()
        self.inside, self.last = inside(), nn.Linear(3, 2)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        return self.last(self.inside(tokens, lengths))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("way", UNCUT)
@pytest.mark.parametrize("inside", [Fills, Walks])
def test_code_that_depends_on_the_lengths_keeps_its_module_whole(
    inside: type[nn.Module], way: str
) -> None:
    calls = [tokens_and(torch.tensor(lengths)) for lengths in LENGTHS]
    assert_equal_calls(lambda: Around(inside), calls, way)
    program = lower(Around(inside), calls[0]())
    assert [w.layer for w in program.captured.whole_modules] == ["inside"]
    assert "lengths of packed sequences" in program.captured.whole_modules[0].reason


class OfPacked(nn.Module):
    def __init__(self, cell: Any = nn.GRU) -> None:
        super().__init__()
        self.rnn, self.head = cell(6, 8), nn.Linear(8, 2)

    def forward(self, packed: PackedSequence) -> tuple[Tensor, Tensor]:
        states, last = self.rnn(packed)
        last = last if isinstance(last, Tensor) else last[0]
        return self.head(last[-1]), self.head(pad_packed_sequence(states)[0])


def packed_of(*lengths: int, is_sorted: bool) -> Callable[[], Arguments]:
    def make() -> Arguments:
        rows = [torch.randn(n, 6, dtype=torch.float64) for n in lengths]
        return (pack_sequence(rows, enforce_sorted=is_sorted),)

    return make


@pytest.mark.matrix(1)
@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("cell", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize("way", UNCUT)
def test_the_caller_packs(way: str, cell: Any, is_sorted: bool) -> None:
    lengths = (5, 3, 2), (7, 7, 1), (4, 1), (6, 5, 4, 3)
    calls = [packed_of(*each, is_sorted=is_sorted) for each in lengths]
    assert_equal_calls(lambda: OfPacked(cell), calls, way)


@pytest.mark.parametrize("way", CUT)
def test_what_the_caller_packs_is_not_split(way: str) -> None:
    with pytest.raises(CaptureError, match="input packed: is a packed sequence, which cannot be"):
        compile_way(OfPacked().double(), packed_of(5, 3, 2, is_sorted=True)(), way)


def test_as_many_lengths_as_sequences() -> None:
    with pytest.raises(CaptureError, match="3 lengths are given for a batch of 4 sequences"):
        placer.compile(
            Tagger(is_sorted=True),
            {"devices": ["cpu"]},
            (torch.randint(20, (4, 9)), torch.tensor([5, 4, 3])),
        )
