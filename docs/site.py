"""Hooks of mkdocs: puts pages from outside of docs/ into the site, and writes the reference pages.

The README is the first page. Links of the repository, which are relative to a file, become links of the site.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import placer
from placer.machine.machine import Machine
from placer.spec import spec_schema

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("benchmarks/results")
# Files outside of docs/ -> pages of the site.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "ARCHITECTURE.md": "architecture.md",
    **{str(RESULTS / page.name): f"results/{page.name}" for page in (ROOT / RESULTS).glob("*.md")},
}
_LINK = re.compile(r"\[((?:[^\[\]]|`[^`]*`)*)\]\(([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add what is listed in folders to the navigation."""
    *_, benchmarks = config.nav
    benchmarks["Benchmarks"] += sorted(uri for uri in PAGES.values() if uri.startswith("results/"))
    config.nav.append({"Project": ["changelog.md", "architecture.md", "contributing.md"]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of `PAGES`, what they link to, and the reference pages."""
    for source, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
    for path in sorted(set(_linked_files())):
        files.append(File.generated(config, f"files/{path}", abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, "api.md", content=api_page()))
    files.append(File.generated(config, "fields.md", content=fields_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make the links of a file of the repository those of the page."""
    if page.file.abs_src_path is None:  # made here
        return markdown
    source = Path(page.file.abs_src_path).resolve()
    return _LINK.sub(lambda match: _link(match, source, page.file.src_uri), markdown)


def _link(match: re.Match[str], source: Path, uri: str) -> str:
    text, target = match.groups()
    path, hash_mark, anchor = target.partition("#")
    if ":" in target or not path:
        return match[0]
    there = (source.parent / path).resolve()
    if there.is_dir():
        return text  # a site has no listings
    up = "../" * uri.count("/")
    return f"[{text}]({up}{_uri_of(there)}{hash_mark}{anchor})"


def _uri_of(path: Path) -> str:
    """Where the site has a file of the repository."""
    name = path.relative_to(ROOT).as_posix()
    if name in PAGES:
        return PAGES[name]
    return name.removeprefix("docs/") if name.startswith("docs/") else f"files/{name}"


def _linked_files() -> Iterator[str]:
    """The files outside of docs/, other than pages, that any page links to."""
    for source in (*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in PAGES)):
        for _, target in _LINK.findall(source.read_text(encoding="utf-8")):
            path = (source.parent / target.partition("#")[0]).resolve()
            if ":" not in target and path.is_file() and _uri_of(path).startswith("files/"):
                yield path.relative_to(ROOT).as_posix()


def api_page() -> str:
    """The public names of `placer`, from their docstrings."""
    titles = {
        "api": "Place a model",
        "executor.module": "The placed module",
        "spec": "Specs",
        "plan": "Plans",
        "program": "Calls",
        "checkpoint": "Checkpoints",
        "profiling": "Measuring",
        "verification": "Comparing",
        "errors": "Errors",
    }
    lines = [
        "# Python",
        "",
        "Everything here is a name of `placer`: `placer.compile`, `placer.Plan`.",
        "",
    ]
    for start, title in titles.items():
        lines += [f"## {title}", ""]
        for home, names in placer._NAMES.items():
            if f"{home}.".startswith(f"{start}."):
                lines += [f"::: placer.{home}.{name}\n" for name in names]
    return "\n".join(lines)


def fields_page() -> str:
    """Every field of a spec and of a machine, from their schemas."""
    text = [
        "# Every field",
        "This page is made from the JSON Schema that `placer schema` prints and that editors use. "
        "[The spec](spec.md) explains the fields with examples.",
        *_fields("A spec", spec_schema()),
        *_fields("A machine", Machine.model_json_schema()),
    ]
    return "\n\n".join(text)


def _fields(title: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """A section for an object of ``schema``, and one for each object that it refers to."""
    yield f"## {title}"
    for name, field in schema["properties"].items():
        facts = [f"**type** {_type(field)}"]
        if "default" in field:
            facts.append(f"**default** `{json.dumps(field['default'])}`")
        elif name in schema.get("required", ()):
            facts.append("**required**")
        yield f"### `{name}`\n\n{' · '.join(facts)}\n\n{_text(field.get('description', ''))}"
    for name, nested in schema.get("$defs", {}).items():
        for each in (nested, *nested.get("anyOf", ())):
            if "properties" in each:
                yield from _fields(f"`{name}`", each)


def _text(text: str) -> str:
    return re.sub(r"([*<])", r"\\\1", text)


def _type(field: Mapping[str, Any]) -> str:
    """A field's JSON type in words."""
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    if "enum" in field:
        return ", ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    if ref := field.get("$ref"):
        return f"`{ref.rpartition('/')[2]}`"
    for key in ("anyOf", "oneOf"):
        if key in field:
            return " or ".join(dict.fromkeys(_type(each) for each in field[key]))
    found = str(field.get("type", "any"))
    if found == "array" and isinstance(field.get("items"), Mapping):
        return f"list of {_type(field['items'])}"
    if found == "object" and isinstance(field.get("additionalProperties"), Mapping):
        return f"object of {_type(field['additionalProperties'])}"
    return found
