"""A damaged checkpoint is an error that changes nothing, or it loads exactly what was saved."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import is_same
from torch import nn
from torch.optim import Adam, Optimizer

import placer

State = tuple[dict[str, Any], dict[str, Any], torch.Tensor]


def _make(seed: int) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = Adam(model.parameters(), lr=0.1 * (seed + 1))
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def _state_of(model: nn.Module, optimizer: Optimizer) -> State:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))


class Trial:
    """A saved checkpoint, and another model that damaged copies of it are loaded into."""

    def __init__(self, folder: Path) -> None:
        model, optimizer = _make(0)
        self.good = folder / "good"
        self.extra = {"step": 7}
        placer.save(model, optimizer, self.good, extra=self.extra)
        self.saved = _state_of(model, optimizer)
        self.model, self.optimizer = _make(1)
        self.before = _state_of(self.model, self.optimizer)

    def load(self, path: Path) -> placer.CheckpointError | None:
        """The error; asserts that nothing changed, or that all is as it was saved."""
        try:
            extra = placer.load(self.model, self.optimizer, path)
        except placer.CheckpointError as error:
            assert is_same(_state_of(self.model, self.optimizer), self.before), error
            return error
        assert is_same(_state_of(self.model, self.optimizer), self.saved)
        assert extra == self.extra
        self.model, self.optimizer = _make(1)
        return None

    def copied(self, path: Path) -> Path:
        shutil.copytree(self.good, path)
        return path


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path)


# One file each of the tensors, of DCP's own table, which is not read, and of the table that is.
FILES = {"__0_0.distcp": 257, ".metadata": 499, "contents.json": 31}


@pytest.mark.matrix(1)
@pytest.mark.parametrize("file", FILES)
def test_a_flipped_byte(trial: Trial, tmp_path: Path, file: str) -> None:
    path = trial.copied(tmp_path / "c")
    assert {p.name for p in path.iterdir()} == set(FILES)
    data = (path / file).read_bytes()
    errors = []
    for number, at in enumerate(range(0, len(data), FILES[file])):
        flipped = bytearray(data)
        flipped[at] ^= 1 << number % 8
        (path / file).write_bytes(flipped)
        errors.append(trial.load(path))
    refused = [str(error) for error in errors if error is not None]
    if file == ".metadata":
        assert not refused
    else:  # white space of the table, and what lies between the entries, may be anything
        assert len(refused) > 0.6 * len(errors) > 50
        assert all(file in text and str(path) in text for text in refused)
        assert all("nothing was changed" in text for text in refused)


@pytest.mark.parametrize("file", FILES)
def test_a_file_cut_short_or_lost(trial: Trial, tmp_path: Path, file: str) -> None:
    path = trial.copied(tmp_path / "c")
    size = (path / file).stat().st_size
    for length in [size - 1, *range(size - size // 9, 0, -(size // 9)), 1, 0]:
        os.truncate(path / file, length)
        # Only white space may be missing at the end of JSON, and there is none.
        assert (trial.load(path) is None) == (file == ".metadata")
    (path / file).unlink()
    assert (trial.load(path) is None) == (file == ".metadata")
    (path / file).mkdir()
    assert (trial.load(path) is None) == (file == ".metadata")


def _with_checksum(table: Any) -> Any:
    """``table`` as if it had been written so: what is wrong with it is for the other checks to find."""
    entries = {
        name: {"dtype": None, "shape": None, **record} if isinstance(record, dict) else record
        for name, record in table["entries"].items()
    }
    table["crc32"] = zlib.crc32(json.dumps(entries, sort_keys=True).encode())
    return table


def _tables(good: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """What is wrong, the table, and what the error says of it."""
    weight, bias = "model/0.weight", "model/0.bias"
    for value in (None, 3, "x", [], [good], {}, {"entries": {}}):
        yield f"a table {value!r:.30}", value, "is damaged"
    for key in good:
        yield f"no {key}", {k: v for k, v in good.items() if k != key}, f"{key}|Field required"
        yield f"{key} is a list", {**good, key: [1]}, f"/{key}: Input should be"
    for key in good["entries"][weight]:
        without = copy.deepcopy(good)
        del without["entries"][weight][key]
        yield f"no {key} of an entry", _with_checksum(without), "is damaged"

    def changed(name: str, **fields: Any) -> Any:
        table = copy.deepcopy(good)
        table["entries"][name] |= fields
        return _with_checksum(table)

    for number in (-1, 2**63, 10**400, 1.5, True, "1", None, float("nan")):
        for key in ("offset", "length", "crc32"):
            pointer = f"/entries/model~10.weight/{key}"
            yield f"{key} is {number!r:.30}", changed(weight, **{key: number}), pointer
        yield f"a size of {number!r:.30}", changed(weight, shape=[3, number]), "model~10.weight"
    yield "an end beyond the file", changed(weight, offset=2**62), "the file ends at byte"
    for file in ("../good/__0_0.distcp", "/etc/passwd", "__0_0.distcp\n", "", ".", ".metadata"):
        yield f"file {file!r}", changed(weight, file=file), "String should match pattern"
    yield "a file that is not there", changed(weight, file="__9_0.distcp"), "no such file"
    for dtype in ("float", "nn", "int9", 3, ["float32"]):
        yield f"dtype {dtype}", changed(weight, dtype=dtype), "dtype"
    yield "another dtype", changed(weight, dtype="int32"), "is a float32 tensor of shape"
    yield "another shape", changed(weight, shape=[2, 2]), r"0\.weight has shape \(2, 2\)"
    state = "state/0.weight/exp_avg"
    yield "another shape of state", changed(state, shape=[6]), r"0\.weight/exp_avg: is a float32"
    huge = changed(state, shape=[2**40, 2**20])
    yield "a tensor longer than its bytes", huge, "is longer than"
    yield "the bytes of another entry", changed(bias, **good["entries"][weight]), "0.bias has shape"
    fewer = {n: r for n, r in good["entries"].items() if n != weight}
    yield "an entry less", _with_checksum({**good, "entries": fewer}), r"0\.weight is missing"
    more = {**good["entries"], "model/new": good["entries"][bias]}
    yield "an entry more", _with_checksum({**good, "entries": more}), "new is not in the model"
    yield "another checksum of the table", {**good, "crc32": 5}, "5 was saved"


def test_a_table_with_something_wrong_in_it(trial: Trial, tmp_path: Path) -> None:
    path = trial.copied(tmp_path / "c")
    good = json.loads((path / "contents.json").read_text())
    assert _with_checksum(copy.deepcopy(good)) == good
    for what, table, said in _tables(good):
        (path / "contents.json").write_text(json.dumps(table))
        error = trial.load(path)
        assert error is not None, what
        assert re.search(said, str(error)), f"{what}: {error}"


def test_a_table_that_is_no_json(trial: Trial, tmp_path: Path) -> None:
    path = trial.copied(tmp_path / "c")
    good = (path / "contents.json").read_text()
    surrogate = good.replace("model/0.weight", "\\ud800", 1)
    twice = good.replace('"entries": {', '"entries": {}, "entries": {', 1)
    number = good.replace('"version": 1', f'"version": {"1" * 5000}', 1)
    texts = ["", "{", "\0", "[" * 100_000, surrogate, number, good + "x", good[1:]]
    for data in [*(text.encode() for text in texts), b"\xff" + good.encode()]:
        (path / "contents.json").write_bytes(data)
        assert trial.load(path) is not None, data[:40]
    (path / "contents.json").write_text(twice)
    trial.load(path)  # the last one counts, which is the good one; asserts that it does
    (path / "contents.json").write_text(json.dumps(json.loads(good)))
    assert trial.load(path) is None  # JSON is JSON, however it is set


class _Payload:
    """What a pickle can do: run any function."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.marker),)


def test_no_file_of_a_checkpoint_runs_code(trial: Trial, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    code = pickle.dumps(_Payload(marker))
    for file in FILES:
        path = trial.copied(tmp_path / f"code in {file}")
        (path / file).write_bytes(code)
        assert (trial.load(path) is None) == (file == ".metadata")
    # The same with a table that is right about it.
    saved = io.BytesIO()
    torch.save(_Payload(marker), saved)
    for number, data in enumerate((code, saved.getvalue())):
        path = trial.copied(tmp_path / f"{number}")
        (path / "__1_0.distcp").write_bytes(data)
        table = json.loads((path / "contents.json").read_text())
        for entry in ("model/0.weight", "extra"):
            at = {"file": "__1_0.distcp", "offset": 0, "length": len(data)}
            table["entries"][entry] |= {**at, "crc32": zlib.crc32(data)}
        (path / "contents.json").write_text(json.dumps(_with_checksum(table)))
        error = trial.load(path)
        assert error is not None and "extra: is not plain data" in str(error)
        assert "weights_only" not in str(error)
    assert not marker.exists()
    pickle.loads(code)
    assert marker.exists()  # it would have


def _with_entry(trial: Trial, path: Path, entry: str, value: Any) -> Path:
    """A copy of the checkpoint whose ``entry`` holds ``value``, with checksums that are right."""
    saved = io.BytesIO()
    torch.save(value, saved)
    data = saved.getvalue()
    trial.copied(path)
    (path / "__1_0.distcp").write_bytes(data)
    table = json.loads((path / "contents.json").read_text())
    record = {"file": "__1_0.distcp", "offset": 0, "length": len(data), "crc32": zlib.crc32(data)}
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        record |= {"dtype": dtype, "shape": list(value.shape)}
    table["entries"][entry] = record
    (path / "contents.json").write_text(json.dumps(_with_checksum(table)))
    return path


@pytest.mark.parametrize(
    ("entry", "value", "said"),
    [
        ("model/1.weight", torch.zeros(2, device="meta"), "1.weight: is a strided meta tensor"),
        ("model/1.weight", torch.zeros(2).to_sparse(), "1.weight: is a sparse_coo tensor"),
        ("model/1.weight", torch.zeros(2) * 1j, "dtype complex64, the model's is float32"),
        ("model/1.num_batches_tracked", torch.tensor(2.5), "has dtype float32, the model's is int"),
        ("state/1.weight/step", "x", "Adam does not take the state in it (ValueError"),
    ],
)
def test_values_that_cannot_be_loaded_change_nothing(
    trial: Trial, tmp_path: Path, entry: str, value: Any, said: str
) -> None:
    """Somebody wrote them so, with right checksums: nothing is written before that is seen."""
    error = trial.load(_with_entry(trial, tmp_path / "c", entry, value))
    assert error is not None
    assert said in str(error)
    assert "nothing was changed" in error.remedy or "does not match the module" in str(error)


def test_a_checkpoint_without_checksums_is_refused(trial: Trial, tmp_path: Path) -> None:
    """It has torch.distributed.checkpoint's own files and no others."""
    path = trial.copied(tmp_path / "old")
    (path / "contents.json").unlink()
    error = trial.load(path)
    assert error is not None and "has no contents.json" in str(error)
    placer.save(trial.model, None, path)  # it may be replaced
