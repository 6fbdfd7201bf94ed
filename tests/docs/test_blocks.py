"""The README and docs/: every block of code runs, every link leads somewhere, no field is missing."""

from __future__ import annotations

import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pages
import pytest
import torch
from typer.testing import CliRunner

from placer import PlacementSpec, SpecError
from placer.cli.main import app
from placer.machine.machine import Machine, find_machine
from placer.spec.load import spec_in
from placer.spec.text import FORMATS, SpecText

_ID = {"ids": lambda page: page.stem}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that has the repository's examples and specs, as the current one."""
    for name in ("examples", "specs"):
        (tmp_path / name).symlink_to(pages.ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("COLUMNS", "160")
    # `placer calibrate` on tiny operations, whose results say nothing about the machine
    monkeypatch.setattr("placer.profiling.calibration._CPU_SCALE", 1 / 64)
    return tmp_path


@pytest.mark.matrix(4)
@pytest.mark.parametrize("page", pages.PAGES, **_ID)
def test_blocks_of_a_page_run_one_after_the_other(
    page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": page.stem}
    for block in pages.blocks(page):  # another test may have imported a module of the same name
        monkeypatch.delitem(sys.modules, Path(block.directives.get("file", "")).stem, raising=False)
    modules = set(sys.modules)
    try:
        for block in pages.blocks(page):
            _run(block, folder, names)
    finally:
        for name in set(sys.modules) - modules:  # those that a page has made
            if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


def _run(block: pages.Block, folder: Path, names: dict[str, Any]) -> None:
    if "not run" in block.directives:
        return
    if "file" in block.directives:
        (folder / block.directives["file"]).write_text(block.text, encoding="utf-8")
    if "machine" in block.directives:
        name = block.directives["machine"]
        (folder / name).write_text(block.text, encoding="utf-8")
        assert find_machine(name).name == Path(name).stem
    elif (form := FORMATS.get(f".{block.language}")) is not None:
        wrong = "exit" in block.directives
        text = SpecText(block.place, block.text, form)
        with pytest.raises(SpecError) if wrong else nullcontext():
            spec_in(text, text.values())
    elif block.language == "python":
        if "file" not in block.directives:
            before = "\n" * (block.line - 1)  # so that a traceback has the page's own lines
            exec(compile(before + block.text, str(block.page), "exec"), names)
    elif block.language == "console":
        *_, last = (_run_command(block, command) for command in pages.commands(block))
        assert last == int(block.directives.get("exit", "0")), block.place
    else:
        pytest.fail(f"{block.place}: nothing is known about a block of {block.language!r}")


def _run_command(block: pages.Block, command: pages.Command) -> int:
    program, *arguments = shlex.split(command.line.partition(" > ")[0])
    assert program == "placer", f"{block.place}: cannot run {program!r} here"
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    missing = pages.first_missing(command.shown, result.output)
    assert missing is None, f"{block.place}: {missing!r} is not in\n{result.output}"
    return result.exit_code


@pytest.mark.parametrize("page", [*pages.PAGES, *pages.FOR_DEVELOPERS], **_ID)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for link in pages.links(page):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in pages.anchors(target), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", pages.FOR_DEVELOPERS, **_ID)
def test_what_a_page_for_developers_names_is_there(page: Path) -> None:
    """Files and folders, and functions as ``module.name``, below the root or below placer/."""
    for path in pages.named_paths(page):
        roots = (pages.ROOT, pages.ROOT / "placer", pages.ROOT / "placer" / "runtime")
        assert any((root / path).exists() for root in roots), f"{page.name} names {path}"


def test_the_table_of_fields_has_every_field_of_a_spec() -> None:
    fields = set(PlacementSpec.known_keys())
    reference = pages.first_column(pages.ROOT / "docs" / "spec.md", "## Fields")
    assert sorted(reference) == sorted(fields)


def test_the_table_of_a_machine_has_every_key() -> None:
    keys = {field.alias or name for name, field in Machine.model_fields.items()} - {"$schema"}
    page = pages.ROOT / "docs" / "machines.md"
    assert sorted(pages.first_column(page, "## A file of your own")) == sorted(keys)


def test_the_readme_names_the_command_that_ci_runs() -> None:
    last = (pages.ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1]
    documented = [
        command.line
        for block in pages.blocks(pages.ROOT / "README.md")
        if block.language == "console"
        for command in pages.commands(block)
    ]
    assert last in documented
