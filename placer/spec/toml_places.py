"""Where in a TOML text its keys and values are, which tomllib does not say."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

from placer.jsonfile import escape_token

Span = tuple[int, int]  # characters of a text: from, to


class TomlPlaces:
    """The spans of keys and values of a TOML text, by pointer. What is not valid has none.

    tomllib has no places, but each statement of TOML can be read alone. Its keys and values are then found in
    its text, in their order. ``twice`` are the keys that are written twice, and ``once`` is the text
    with blanks in place of statements that repeat one.
    """

    def __init__(self, text: str) -> None:
        self.keys: dict[str, Span] = {}
        self.values: dict[str, Span] = {"": (0, 0)}
        self.twice: dict[str, None] = {}
        self.once = ""
        self._text = text
        self._end = 0  # of what has been read
        self._tables: dict[str, int] = {}  # of an array of tables, the index of the last one
        table, start = "", 0
        for end in (match.end() for match in re.finditer(r"[^\n]*\n|[^\n]+", text)):
            statement = text[start:end]
            try:
                data = tomllib.loads(statement)
            except tomllib.TOMLDecodeError:
                continue  # it goes on in the next line
            self._end, start, known = start, end, len(self.twice)
            if statement.lstrip().startswith("["):
                table = self._header(data)
            else:
                self._add(table, data)
            repeats = len(self.twice) > known
            self.once += re.sub(r"[^\n]", " ", statement) if repeats else statement
        self.once += text[start:]

    def _header(self, data: Any) -> str:
        pointer = ""
        while data:
            ((key, data),) = data.items()
            pointer = f"{pointer}/{escape_token(key)}"
            self.keys[pointer] = self.values[pointer] = self._find(key)
            if isinstance(data, list):
                self._tables[pointer] = self._tables.get(pointer, -1) + 1
                data = data[0]
            if pointer in self._tables:
                span = self.values[pointer]
                pointer = f"{pointer}/{self._tables[pointer]}"
                self.values[pointer] = span
        return pointer

    def _add(self, pointer: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                inside = f"{pointer}/{escape_token(key)}"
                self.keys[inside] = span = self._find(key)
                if inside in self.values and not isinstance(inner, dict):
                    self.twice[inside] = None
                    continue
                self.values[inside] = span
                self._add(inside, inner)
        elif isinstance(value, list):
            for index, inner in enumerate(value):
                inside = f"{pointer}/{index}"
                if isinstance(inner, dict | list):
                    self.values[inside] = self._find("{" if isinstance(inner, dict) else "[")
                self._add(inside, inner)
        else:
            self.values[pointer] = self._find(json.dumps(value, default=str).strip('"'))

    def _find(self, word: str) -> Span:
        """The next place of ``word``, after what has been read; the end of that if it is spelt otherwise."""
        begin = self._text.find(word, self._end)
        if begin < 0:
            return self._end, self._end + 1
        self._end = begin + len(word)
        quoted = self._text[begin - 1 : begin] in ("'", '"')
        return begin - quoted, self._end + quoted
