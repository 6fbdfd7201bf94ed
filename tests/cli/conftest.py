"""A small model in a file, specs beside it, and a fixture that runs commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from captured import captured_once
from typer.testing import CliRunner

NET = '''
import sys

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))


class Net(nn.Module):
    def __init__(self, width=64, depth=3, boom=False):
        super().__init__()
        if boom:
            raise ValueError("the width must be even")
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, 2)

    def forward(self, x, scale=None, *, twice=False):
        x = self.blocks(x)
        if twice:
            x = self.blocks(x)
        if scale is not None:
            x = x * scale
        return self.head(x)


class Leaves(nn.Module):
    def forward(self, x):
        sys.exit("no data set")


class Words(nn.Module):
    """Looks at the value of a tensor in its constructor, so meta is not enough."""

    def __init__(self):
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.table = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11)

    def forward(self, ids):
        return self.head(self.table(ids))


class Scenes(nn.Module):
    """Takes a list of tensors and a dict, as detectors do."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, scenes, options=None):
        x = torch.relu(self.a(torch.cat(scenes)))
        return self.head(x) * options["scale"]


class Towers(nn.Module):
    """Takes one dict, whose tensors may have other numbers of rows."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, batch):
        return {"a": self.a(batch["x"]), "b": self.b(batch["y"])}


class Sorted(nn.Module):
    """Its layers are alike. Each stays whole, and sorts values of all rows."""

    def __init__(self, layers=2):
        super().__init__()
        self.blocks = nn.Sequential(*(Sorts() for _ in range(layers)))

    def forward(self, x):
        return self.blocks(x)


class Sorts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        best = torch.zeros(int(0.5 * len(x)), 64)
        return self.layer(x) + (best + x.sort(0).values[: len(best)]).mean()


class Picky(nn.Module):
    """Keeps one submodule whole, and fails for a batch of one."""

    def __init__(self):
        super().__init__()
        self.inner = Chooser()
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.inner(x))


class Chooser(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        if x.sum() > 0:
            return self.a(x)
        return self.a(-x)


def leaving():
    sys.exit()


def two_scenes():
    return [torch.randn(2, 4), torch.randn(3, 4)], {"scale": torch.tensor(2.0)}


def scenes_by_name():
    return {"scenes": [torch.randn(2, 4)], "options": {"scale": 3.0}}


def both_ways():
    return ([torch.randn(2, 4)],), {"options": {"scale": 3.0}}


def far_scenes():
    return [torch.randn(2, 4, device="meta")], {"scale": 1.0}


def no_scenes():
    raise OSError("the disk is asleep")


def numbered():
    return {0: torch.randn(2, 4)}


def not_a_model():
    return 3


def layers():
    return nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 2))


ready = Net()
'''


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``net.py`` and specs that fit, do not fit, and are wrong."""
    path = tmp_path_factory.mktemp("cli")
    (path / "net.py").write_text(NET, encoding="utf-8")
    (path / "broken.py").write_text("import torch\nraise RuntimeError('no licence')\n")
    (path / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    (path / "lacks.py").write_text("import nosuchpackage.part\n")
    (path / "typo.py").write_text("def f(:\n")
    specs: dict[str, Any] = {
        "fits": {"devices": _devices("1GiB"), "reserve": 0},
        "pinned": {
            "devices": _devices("1GiB"),
            "reserve": 0,
            "microbatches": 2,
            "layers": {"head": "cuda:1"},
        },
        "tight": {
            "devices": _devices("200KiB", "cpu"),
            "reserve": 0,
            "layers": {"blocks": "cpu:0", "head": "cpu:1"},
        },
        "halves": {
            "devices": _devices("1GiB"),
            "reserve": 0,
            "layers": {"a": "cuda:0", "head": "cuda:1"},
        },
        "tiny": {"devices": _devices("1KiB", "cpu"), "reserve": 0},
        "wrong": {"devices": ["cuda:0"], "layers": {"hed": "cuda:0"}},
        "unknown_key": {"devices": ["cuda:0"], "replica": 2},
    }
    for name, spec in specs.items():
        (path / f"{name}.json").write_text(json.dumps(spec), encoding="utf-8")
    (path / "not.json").write_text('{"devices": ["cuda:0"}', encoding="utf-8")
    return path


def _devices(memory: str, kind: str = "cuda") -> list[dict[str, str]]:
    return [{"name": f"{kind}:{i}", "memory": memory} for i in range(2)]


@pytest.fixture(scope="module")
def one_model() -> Iterator[None]:
    """Commands that need no weights have one model for the same options, which is captured once."""
    from placer import api
    from placer.cli import loaded_model

    load, loaded = loaded_model.load_model, dict[str, Any]()

    def load_once(options: Any, *, allocate: bool = False, **wanted: Any) -> Any:
        if allocate or wanted.get("moves") is not None:
            return load(options, allocate=allocate, **wanted)
        key = f"{Path.cwd()} {options} {sorted(wanted.items())}"
        if key not in loaded:
            loaded[key] = load(options, **wanted)
        return loaded[key]

    with (
        captured_once(),
        mock.patch.object(loaded_model, "lower_call", api.lower_call),
        mock.patch.object(loaded_model, "load_model", load_once),
    ):
        yield


@pytest.fixture
def placer(folder: Path, one_model: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a command in `folder`; the result has ``exit_code``, ``stdout`` and ``stderr``."""
    from placer.cli.main import app

    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str) -> Any:
        result = CliRunner().invoke(app, list(arguments))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run
