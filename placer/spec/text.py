"""The text of a spec, in JSON, YAML or TOML: its values, and where in the text each of them is."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from placer.errors import KeyProblem, Location, SpecError, nearest
from placer.jsonfile import JSONError, escape_token, read_text
from placer.spec.check import Problem
from placer.spec.toml_places import Span, TomlPlaces

if TYPE_CHECKING:
    import yaml

Format = Literal["JSON", "YAML", "TOML"]

FORMATS: Mapping[str, Format] = {  # by the end of a file's name; others are JSON
    ".json": "JSON", ".jsonc": "JSON", ".json5": "JSON",
    ".yaml": "YAML", ".yml": "YAML", ".toml": "TOML",
}  # fmt: skip
_Parsed = tuple[Any, dict[str, Span], dict[str, Span], dict[str, None]]
_LARGEST = 1_000_000  # characters of a text in which places are looked for
_MOST = 100_000  # values, which a small YAML file can exceed by aliases of aliases
# What JSON5 has and YAML has not: comments of other languages, and tabs. In strings they are text.
_FOREIGN = re.compile(
    r""" "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' | (?P<blank> //[^\n]* | /\*.*?\*/ | \t ) """,
    re.DOTALL | re.VERBOSE,
)
_TOML_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)")
_TOML_TWICE = "Cannot overwrite a value"
_TOML_REMEDIES = {
    "Invalid value": "write text in quotes",
    _TOML_TWICE: "this key is written twice: keep one",
    "Unclosed array": "write ']' where it ends",
}
_MISPLACED = "this does not go with the lines above; is it indented like them?"
# What PyYAML says of the text that it did not expect, in words of ours.
_WORDS = {
    r"but got": "but found",
    r"expected <block end>, but found .*": _MISPLACED,
    r"expected the node content": "expected a value",
    r"mapping values are not allowed here": "found a second ':'; put text with ': ' in quotes",
    r"expected '<document start>', but found": "expected the end, but found",
    r"found character '\\t'.*": "found a tab; indent by spaces",
    r"'<scalar>'": "a value",
    r"'\\x00'": "the end",
}
_MISSING = "is a comma, a quote or a bracket missing before it?"


@dataclass(frozen=True)
class SpecText:
    """A text that a user wrote; ``source`` names it in errors."""

    source: str
    text: str
    format: Format = "JSON"

    @classmethod
    def read(cls, path: Path) -> SpecText:
        """The text of a file, whose name says the format. Raises ``SpecError`` if it cannot be read."""
        try:
            text = read_text(path, FORMATS)
        except JSONError as error:
            raise SpecError(str(path), [(error.where, error.problem, error.remedy)]) from None
        return cls(str(path), text, FORMATS.get(path.suffix.lower(), "JSON"))

    def values(self) -> Any:
        """What the text says. JSON may have comments, trailing commas, unquoted keys and 'single quotes'.

        YAML is version 1.2 with JSON's words: ``yes`` is text. Raises ``SpecError``, with the place, for what
        is not the format, and for keys that are written twice.
        """
        if twice := self.twice():
            raise SpecError(self.source, twice, [self.locate(each) for each in twice])
        return self.last_values()

    def last_values(self) -> Any:
        """`values`, but of a key that is written twice it is the last value, for who tells of `twice`."""
        return self._read[0]

    def twice(self) -> list[Problem]:
        """A problem for each key that is written twice in an object."""
        return self._read[1]

    @cached_property
    def _read(self) -> tuple[Any, list[Problem]]:
        if not self.text.strip():
            raise self._wrong(0, "there is no text", "write an object")
        if self.format == "JSON":
            try:
                return json.loads(self.text, object_pairs_hook=_unique), []
            except json.JSONDecodeError as error:
                if len(self.text) > _LARGEST:
                    raise self._wrong(error.pos, error.msg) from None
            except (ValueError, RecursionError):  # a key is there twice; or limits of Python
                pass
        data, _, _, twice = self._parsed
        return data, [KeyProblem(where, "is written twice", "keep one") for where in twice]

    def locate(self, problem: Problem) -> Location | None:
        """Where in the text the key or value with the problem is; for a missing key, its object."""
        where = problem[0] if problem[0] != "/" else ""
        try:
            _, keys, values, _ = self._parsed
        except SpecError:  # of a text that is not the format, which has been said
            return None
        if isinstance(problem, KeyProblem) and where in keys:
            return self._location(keys[where])
        while where and where not in values:
            where = where.rpartition("/")[0]
            if where in values:
                return self._location(keys.get(where) or (values[where][0],) * 2)
        return self._location(values[where]) if where in values else None

    @cached_property
    def _parsed(self) -> _Parsed:
        """The values, the spans of keys and values by their JSON pointers, and the keys written twice."""
        if self.format == "TOML":
            return self._parsed_toml()
        if len(self.text) > _LARGEST:
            raise self._wrong(0, f"it has more than {_LARGEST} characters")
        try:
            root = self._compose()
            reader = _Reader(self)
            return reader.read(root, ""), reader.keys, reader.values, reader.twice
        except RecursionError:
            raise self._wrong(0, "it is nested too deep") from None

    def _compose(self) -> yaml.Node:
        import yaml

        text = self.text if self.format == "YAML" else _FOREIGN.sub(_without_foreign, self.text)
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.reader.ReaderError as error:
            raise self._wrong(error.position, "it has a character that is not text") from None
        except yaml.MarkedYAMLError as error:
            raise self._wrong_yaml(error, text) from None
        if root is None:
            raise self._wrong(0, "there is nothing but comments", "write an object")
        return root

    def _wrong_yaml(self, error: yaml.MarkedYAMLError, text: str) -> SpecError:
        problem, mark = str(error.problem), error.problem_mark or error.context_mark
        assert mark is not None
        if error.context_mark is not None and "end of stream" in problem:
            return self._wrong(error.context_mark.index, "this is not closed")
        if error.context_mark is not None and problem == "could not find expected ':'":
            return self._wrong(error.context_mark.index, "there is no ':' after this")
        opened = None if error.context_mark is None else error.context_mark.index
        if opened is None or text[opened : opened + 1] not in ("[", "{"):
            opened = _open_bracket(text)
        if "<stream end>" in problem and opened is not None:
            closing = {"[": "]", "{": "}"}.get(text[opened])
            remedy = f"write {closing!r} where it ends" if closing else ""
            return self._wrong(opened, f"{text[opened]!r} is not closed", remedy)
        try:
            json.loads(text if self.format == "JSON" else "{}")
        except json.JSONDecodeError as strict:
            # JSON's own parser is more exact here, but does not say which bracket is open.
            if "delimiter" in strict.msg and text[strict.pos : strict.pos + 1] not in "]}":
                problem = strict.msg.replace("Expecting", "expected").removesuffix(" delimiter")
                return self._wrong(strict.pos, problem, _MISSING)
        if problem.startswith("mapping values"):
            # A line that is indented further continues the value above it.
            key = text[text.rfind("\n", 0, mark.index) + 1 : mark.index]
            if ": " not in key:
                return self._wrong(mark.index - len(key.lstrip()), _MISPLACED)
        for words, ours in _WORDS.items():
            problem = re.sub(words, ours, problem)
        if not problem.startswith("expected ',' or") or opened is None:
            return self._wrong(mark.index, problem)
        line = text.count("\n", 0, opened) + 1
        problem += f", since {text[opened]!r} of line {line} is open"
        return self._wrong(mark.index, problem, _MISSING)

    def _parsed_toml(self) -> _Parsed:
        try:
            data = tomllib.loads(self.text)
        except tomllib.TOMLDecodeError as error:
            place = _TOML_PLACE.search(str(error))
            index = max(len(self.text.rstrip()) - 1, 0)
            if place is not None and place[1]:
                starts = [0, *(m.end() for m in re.finditer("\n", self.text))]
                index = min(starts[int(place[1]) - 1] + int(place[2]) - 1, len(self.text) - 1)
            problem = _TOML_PLACE.sub("", str(error))
            if problem == _TOML_TWICE and len(self.text) <= _LARGEST // 10:
                places = TomlPlaces(self.text)
                if places.twice:
                    data = replace(self, text=places.once)._parsed_toml()[0]
                    return data, places.keys, places.values, places.twice
            remedy = _TOML_REMEDIES.get(problem, "")
            raise self._wrong(index, problem[0].lower() + problem[1:], remedy) from None
        except RecursionError:
            raise self._wrong(0, "it is nested too deep") from None
        if len(self.text) > _LARGEST // 10:  # places take a while
            return data, {}, {}, {}
        places = TomlPlaces(self.text)
        return data, places.keys, places.values, {}

    def _wrong(self, index: int, problem: str, remedy: str = "") -> SpecError:
        """The error for a text that is not the format, from the character at ``index``."""
        wrong = ("", f"is not {self.format}: {problem}", remedy)
        return SpecError(self.source, [wrong], [self._location((index, index + 1))])

    def _location(self, span: Span) -> Location:
        start, end = span
        begin = self.text.rfind("\n", 0, start) + 1
        stop = self.text.find("\n", start)
        line = self.text[begin : stop if stop >= 0 else None]
        return Location(
            file=self.source,
            line=self.text.count("\n", 0, start) + 1,
            column=start - begin + 1,
            width=max(1, min(end, begin + len(line)) - start),
            text=line,
        )


def _open_bracket(text: str) -> int | None:
    """Where the innermost bracket is that is open at the end of ``text``, or where it stops being YAML."""
    import yaml

    opened: list[int] = []
    try:
        for token in yaml.scan(text, Loader=yaml.SafeLoader):
            if isinstance(token, yaml.FlowSequenceStartToken | yaml.FlowMappingStartToken):
                opened.append(token.start_mark.index)
            elif isinstance(token, yaml.FlowSequenceEndToken | yaml.FlowMappingEndToken):
                del opened[-1:]
    except yaml.YAMLError:
        pass
    return opened[-1] if opened else None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is written twice")
    return found


def _without_foreign(match: re.Match[str]) -> str:
    """What YAML cannot read, as blanks, so that nothing else moves."""
    return re.sub(r"[^\n]", " ", match[0]) if match["blank"] else match[0]


class _Reader:
    """Reads PyYAML's nodes, which know their places: values, and the spans of keys and values by pointer."""

    def __init__(self, text: SpecText) -> None:
        self.text = text
        self.keys: dict[str, Span] = {}
        self.values: dict[str, Span] = {}
        self.twice: dict[str, None] = {}  # in the order of the text

    def read(self, node: yaml.Node, pointer: str) -> Any:
        """The value of ``node``. Raises ``SpecError``."""
        import yaml

        start = node.start_mark.index
        self.values[pointer] = (start, node.end_mark.index)
        if len(self.values) > _MOST:
            raise self.text._wrong(start, "it has too many values", "use no aliases (*name)")
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, f"{pointer}/{i}") for i, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            found: dict[str, Any] = {}
            for key, value in node.value:
                name = key.value
                inside = f"{pointer}/{escape_token(str(name))}"
                self.keys[inside] = span = (key.start_mark.index, key.end_mark.index)
                if not isinstance(key, yaml.ScalarNode):
                    raise self.text._wrong(span[0], "a key is not text")
                if name in found:
                    self.twice[inside] = None
                found[name] = self.read(value, inside)
            return found
        return self._scalar(node)

    def _scalar(self, node: yaml.Node) -> Any:
        if node.style is not None:  # in quotes
            return node.value
        try:
            value = json.loads(node.value)
        except (ValueError, RecursionError):
            value = node.value
        if not isinstance(value, str):
            return value
        if self.text.format == "YAML":
            words = {"": None, "~": None, "null": None, "true": True, "false": False}
            return words.get(value.lower(), value)
        index = node.start_mark.index
        if not value:
            raise self.text._wrong(index, "expected a value")
        if value.lstrip("-").isdecimal():
            raise self.text._wrong(index, "a number has too many digits")
        value = value if len(value) <= 60 else f"{value[:57]}..."
        word = nearest(value, ("true", "false", "null"))
        remedy = f"did you mean {word}?" if word else f'write "{value}"'
        raise self.text._wrong(index, f"{value!r} is text without quotes", remedy)
