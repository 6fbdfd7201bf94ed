"""Reads the README and the pages of docs/: their blocks of code, tables and links.

A comment right before a block says how it is tested:

    <!-- file: spec.json -->     it is saved under this name in the page's folder
    <!-- machine: lab.json -->   it is saved under this name, and describes a machine
    <!-- exit: 3 -->             the exit code of its last command; of a spec, that it is wrong
    <!-- not run: the reason --> it is not run
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
FOR_DEVELOPERS = (ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md")

_COMMENT = re.compile(r"<!-- (file|machine|exit|not run): (.+?) -->")
_PATH = re.compile(r"`([\w./]*(?:/|\.py|\.toml)[\w./]*)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block; ``line`` is that of its first line of text in the page."""

    page: Path
    line: int
    language: str
    text: str
    directives: dict[str, str]

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of a console block, with the lines that the page shows of its output."""

    line: str
    shown: list[str]


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of ``page`` in order."""
    directives: dict[str, str] = {}
    fence, start, held = "", 0, list[str]()
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if fence:
            if line != "```":
                held.append(line)
                continue
            text = "\n".join(held) + "\n"
            yield Block(page=page, line=start, language=fence[3:], text=text, directives=directives)
            fence, held, directives = "", [], {}
        elif line.startswith("```"):
            fence, start = line, number + 1
        elif match := _COMMENT.fullmatch(line):
            directives[match[1]] = match[2]
        elif line.strip():
            directives = {}


def commands(block: Block) -> Iterator[Command]:
    """The commands of a console block: ``$`` and what follows, continued after a backslash."""
    text = block.text.replace("\\\n", " ")
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, *shown = part.splitlines()
        yield Command(line=line, shown=shown)


def first_missing(shown: list[str], output: str) -> str | None:
    """The first of the lines ``shown`` that ``output`` does not have after those before it.

    Spaces and line ends do not count; ``…`` stands for anything.

    >>> first_missing(["fits:", "…", "a  b … d"], "it fits: x\\n a b\\n c d")
    >>> first_missing(["fits:", "b", "a"], "it fits: a b")
    'a'
    """
    found, position = " ".join(output.split()), 0
    for line in shown:
        for fragment in line.split("…"):
            wanted = " ".join(fragment.split())
            position = found.find(wanted, position)
            if position < 0:
                return line
            position += len(wanted)
    return None


def links(page: Path) -> list[str]:
    """The targets of the links and images of ``page``, outside of its code blocks."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return _LINK.findall(re.sub(r"`[^`\n]*`", "`code`", text))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings of ``page``."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def first_column(page: Path, heading: str) -> list[str]:
    """The words in backquotes in the first column of the first table below ``heading``."""
    text = page.read_text(encoding="utf-8").partition(f"\n{heading}\n")[2]
    rows = re.search(r"^\|.*\n\|[ \-|:]+\n((?:\|.*\n)+)", text, flags=re.M)
    assert rows is not None, f"{page.name} has no table below {heading!r}"
    cells = [row.split("|")[1] for row in rows[1].splitlines()]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def named_paths(page: Path) -> list[str]:
    """Files and folders that the text of a page names in backquotes."""
    found: list[str] = _PATH.findall(page.read_text(encoding="utf-8"))
    return found
