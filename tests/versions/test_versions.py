"""The releases placer runs on, and what is said where torch cannot do what is asked."""

from __future__ import annotations

import ast
import importlib
import os
import re
import tomllib
from collections import Counter
from collections.abc import Set
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.overrides
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import placer
from placer import _torch, versions
from placer.versions import PYTHON, RANGES, TORCH, Range, explain_failed_import

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
    """Have torch lack ``names``, as another release does."""
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
    monkeypatch.setattr("placer.api.lower", lambda *_: pytest.fail("captured"))
    model, x = _model()
    with pytest.raises(placer.VersionError) as raised:
        placer.compile(model, placer.PlacementSpec(devices=["cpu:0", "cpu:1"]), x)
    assert raised.value.where == "torch 2.99.0"
    assert PROCESSES in raised.value.problem
    assert str(TORCH) in raised.value.problem
    assert raised.value.remedy.startswith("python -m pip install 'torch>=2.11,<2.16' torchvision")
    assert not dist.is_initialized()


def test_a_torch_that_lacks_something_is_named_before_a_model_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _forget(monkeypatch, "torch.library._scoped_library", "torch._C.DisableTorchFunction")
    model, x = _model()
    with pytest.raises(placer.VersionError, match=r"torch 2\.99\.0: has no torch") as raised:
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
    assert not _torch.missing_names()


def test_private_names_are_in_the_tables_of_the_files_that_may_use_them() -> None:
    """``_torch.py`` and its patches use what is listed, and all of it; other files what may be shared."""
    listed = {part for name in _torch.PRIVATE_NAMES for part in name.split(".")}
    of_objects = {name for names in _torch.OBJECT_ATTRIBUTES.values() for name in names}
    shared = {name for names in _torch.SHARED_ATTRIBUTES.values() for name in names}
    assert not of_objects & shared
    texts = {path: path.read_text() for path in sorted((ROOT / "placer").rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    inherited = {name for tree in trees.values() for name in _defined(tree)}
    users = [path for path in texts if path.name in ("_torch.py", "_torch_patches.py")]
    for path, tree in trees.items():
        found = _private_names(tree, inherited) - shared
        assert found <= (listed | of_objects if path in users else set()), path
    words = Counter(re.findall(r"\w+", " ".join(texts[path] for path in users)))
    assert all(words[name] > 1 for name in of_objects)  # in the table, and where it is used
    assert all(words[name.rpartition(".")[2]] > 1 for name in _torch.PRIVATE_NAMES)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("hooks = module._backward_hooks", {"_backward_hooks"}),
        ("class A:\n    def f(self): self._own = other._own", set()),
        ("self._inherited, super()._inherited, other._inherited.x", {"_inherited"}),
        ("self._inherited, super()._inherited", set()),
        ("torch.ops.aten._to_copy, aten._softmax.default, os._exit, f._replace", set()),
        ("from torch._dynamo import OptimizedModule", {"_dynamo"}),
        ("from torch._subclasses.fake_tensor import FakeTensor, _is", {"_is"}),
        ("import torch._inductor.config", {"_inductor"}),
        ("getattr(module, '_state_dict_hooks')", {"_state_dict_hooks"}),
        ("f'{name}_apply'", set()),
        ("class A(nn.Module):\n    def _apply(self, f): self._apply(f)", {"_apply"}),
    ],
)
def test_private_names_are_found(source: str, found: set[str]) -> None:
    assert _private_names(ast.parse(source), {"_inherited"}) == found


_BASES: tuple[object, ...] = (  # of placer's classes
    nn.Module(),
    torch.autograd.Function,
    torch.fx.Interpreter,
    torch.fx.graph.CodeGen(),
    torch.overrides.TorchFunctionMode,
    TorchDispatchMode,
)


@cache
def _is_of_torch(name: str) -> bool:
    return any(hasattr(base, name) for base in _BASES)


@cache
def _nodes(tree: ast.AST) -> list[ast.AST]:
    return list(ast.walk(tree))


def _defined(tree: ast.AST) -> set[str]:
    """Functions, classes, variables and attributes that are defined here, and override none of torch."""
    found = {"_replace", "_fields", "_asdict", "_make"}  # of named tuples, which are public
    for node in _nodes(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(name, ast.Store()):
                found.add(name)
            case ast.Attribute(ast.Name("self" | "cls"), name, ast.Store()):
                found.add(name)
    return {name for name in found if not _is_of_torch(name)}


def _private_names(tree: ast.AST, inherited: Set[str]) -> set[str]:
    """Names that begin with one underscore and are not the file's own, nor of ``self`` and ``inherited``.

    Found are attributes, what is imported from torch, overridden methods, and strings that are the name
    of an attribute of a module.
    """
    own = _defined(tree)
    found: set[str] = set()
    parts_of_texts: set[ast.AST] = set()
    for node in _nodes(tree):
        match node:
            case ast.Attribute(ast.Name("self") | ast.Call(ast.Name("super")), name):
                found.update({name} - inherited)
            case ast.Attribute(value, name) if _last_name(value) not in ("aten", "os", "sys"):
                found.add(name)
            case ast.JoinedStr(values):
                parts_of_texts.update(values)
            case ast.FunctionDef(name=name) if _is_of_torch(name):
                found.add(name)
            case ast.Constant(str(name)) if _is_of_torch(name) and node not in parts_of_texts:
                found.add(name)
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("torch"):
                found.update({module, *(each.name for each in names)})
            case ast.Import(names):
                found.update(each.name for each in names if each.name.startswith("torch"))
    return {part for name in found - own for part in _private_parts(name)}


def _last_name(value: ast.AST) -> str:
    match value:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
    return ""


def _private_parts(name: str) -> list[str]:
    """The parts of the dotted ``name`` that begin with one underscore, below the shared modules."""
    for module in _torch.SHARED_MODULES:
        if name == module or name.startswith(module + "."):
            name = name.removeprefix(module)
    return [x for x in name.split(".") if x.startswith("_") and not x.startswith("__")]
