"""The releases that placer runs on, and the errors if torch lacks a feature."""

from __future__ import annotations

import ast
import importlib
import os
import tomllib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from torch import nn

import placer
from placer import _torch, versions
from placer.versions import PYTHON, RANGES, TORCH, Range, explain_failed_import, require

ROOT = Path(__file__).parents[2]
PROCESSES = "torch.distributed.distributed_c10d._abort_process_group"


def test_pyproject_allows_the_ranges_that_were_run() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    allowed = {(r := Requirement(text)).name: r.specifier for text in project["dependencies"]}
    assert allowed == {each.package: Requirement(each.requirement).specifier for each in RANGES}
    assert SpecifierSet(project["requires-python"]) == Requirement(PYTHON.requirement).specifier


def test_a_range_goes_by_numbers_not_by_text() -> None:
    torch_range = Range(package="torch", lowest="2.9", highest="2.15", below="2.16")
    assert [r in torch_range for r in ("2.8.9", "2.9", "2.14.1+cpu", "2.15.3", "2.16.0")] == [
        *(False, True, True, True, False)
    ]


def _model() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(2, 4)


def _forget(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Delete ``names`` from torch, as if this were another release."""
    there = _torch._is_there
    monkeypatch.setattr(_torch, "_is_there", lambda name: name not in names and there(name))
    monkeypatch.setattr(versions, "found_release", lambda package: "2.99.0")


def test_a_job_is_refused_before_anything_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _forget(monkeypatch, PROCESSES)
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setitem(os.environ, name, value)
    monkeypatch.setattr("placer.api.capture_model", lambda *_: pytest.fail("captured"))
    model, x = _model()
    with pytest.raises(placer.VersionError) as raised:
        placer.compile(model, placer.PlacementSpec(devices=["cpu:0", "cpu:1"]), x)
    assert raised.value.where == "torch 2.99.0"
    assert PROCESSES in raised.value.problem
    assert str(TORCH) in raised.value.problem
    assert raised.value.remedy.startswith("python -m pip install 'torch>=2.11,<2.16' torchvision")
    assert "one process" in raised.value.remedy
    assert not dist.is_initialized()


def test_what_that_torch_can_do_goes_on_working(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process does not need the missing name, whatever the release."""
    _forget(monkeypatch, PROCESSES)
    model, x = _model()
    spec = placer.PlacementSpec(devices=["cpu:0", "cpu:1"], layers={"0": "cpu:0", "1": "cpu:1"})
    assert torch.equal(placer.compile(model, spec, x)(x), model(x))
    assert placer.make_plan(model, spec, x, processes=True).fits


def test_a_torch_that_cannot_plan_is_named_before_a_model_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _forget(monkeypatch, "torch.library._scoped_library", "torch._C.DisableTorchFunction")
    model, x = _model()
    with pytest.raises(placer.VersionError, match=r"torch 2\.99\.0: cannot capture") as raised:
        placer.make_plan(model, placer.PlacementSpec(devices=["cpu:0"]), x)
    assert "and 1 more" in raised.value.problem


def test_an_import_that_fails_is_explained_outside_the_range_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "needs_newer.py").write_text("import torch\ntorch.not_there_yet\n")
    monkeypatch.syspath_prepend(tmp_path)

    def import_it() -> None:
        with explain_failed_import():
            importlib.import_module("needs_newer")

    with pytest.raises(AttributeError):
        import_it()
    monkeypatch.setattr(versions, "found_release", lambda package: "2.1.0")
    with pytest.raises(placer.VersionError, match=r"torch 2\.1\.0.*not_there_yet"):
        import_it()
    # An error that is not raised while something is imported is somebody's own mistake.
    with pytest.raises(AttributeError), explain_failed_import():
        torch.not_there_yet  # noqa: B018


def test_this_torch_has_the_private_names_that_were_run_with_it() -> None:
    release = ".".join(torch.__version__.split(".")[:2])
    for each in _torch.PRIVATE_NAMES:
        if release in Range(package="torch", lowest=each.lowest, highest="", below="3"):
            assert _torch._is_there(each.name), each
        assert each.highest == TORCH.highest


def test_private_names_are_listed_where_they_are_used() -> None:
    """All names in _torch.py; elsewhere only operators, names in torch's own docs, and one patch."""
    elsewhere = {
        "_subclasses",
        "_pytree",
        "_BatchNorm",
        "_local_scalar_dense",
        "_to_copy",
        "_apply",
    }
    listed = {each.name.rpartition(".")[2] for each in _torch.PRIVATE_NAMES}
    tree = ast.parse((ROOT / "placer" / "_torch.py").read_text(encoding="utf-8"))
    assert _private_attributes(tree) <= listed | {
        "_C",
        "_functorch",
        "_autograd",
        "_dynamo",
        "_op_dk",
    }
    for path in sorted((ROOT / "placer").rglob("*.py")):
        if path.name != "_torch.py":
            found = _private_attributes(ast.parse(path.read_text(encoding="utf-8")))
            assert found <= elsewhere, path


def _private_attributes(tree: ast.AST) -> set[str]:
    """Private parts of dotted names that begin with ``torch``, ``dist``, ``fx`` or ``nn``."""
    found: set[str] = set()
    for node in ast.walk(tree):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in ("torch", "dist", "fx", "nn"):
            found.update(p for p in parts if p.startswith("_") and not p.startswith("__"))
    return found


def test_nothing_is_missing_for_what_this_torch_can_do() -> None:
    require("planning")
    require("running")
