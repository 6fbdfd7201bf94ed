"""Translate pydantic's errors into problems, each with a JSON pointer into the user's file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from placer.errors import nearest
from placer.jsonfile import json_pointer
from placer.spec.check import Problem

_JSON_WORDS = {
    "a valid tuple": "a list",
    "a valid dictionary": "an object",
    "a valid boolean": "true or false",
    "a valid string": "text",
    "a valid dictionary or instance of DeviceSpec": "a device name or an object",
    "a valid dictionary or instance of LossSpec": "the name of a loss or an object",
}
_JSON_SINGLES = {None: "null", True: "true", False: "false"}
_KEYS = {
    "devices": ["name", "memory", "kind", "allocator"],
    "loss": ["function", "target"],
    "space": ["shards", "grid", "dims", "layers"],
}
_EXAMPLES = {
    "loss": 'write a name such as "cross_entropy", or an object with "function" and "target"',
    "devices": 'write a list such as ["cuda:0", {"name": "cuda:1", "memory": "16GiB"}]',
    "layers": 'write an object such as {"encoder": "cuda:0"}',
    "replica_devices": 'write a list for each further replica, such as [["cuda:2", "cuda:3"]]',
}


def explain_errors(error: ValidationError, data: Any, keys: Sequence[str]) -> list[Problem]:
    """Every error in ``error`` as (JSON pointer, problem, remedy); ``keys`` are the valid keys of a spec."""
    details = error.errors(include_url=False)
    words = {json_pointer(x["loc"], data) for x in details if x["type"] == "literal_error"}
    details = [
        x  # of a number or a word: the words are what is named
        for x in details
        if not (
            x["type"] == "int_type"
            and isinstance(x["input"], str)
            and json_pointer(x["loc"], data) in words
        )
    ]
    return [_explain(detail, data, keys) for detail in details if not _is_echo(detail)]


def _is_echo(detail: ErrorDetails) -> bool:
    """Is it pydantic's "too short" for a list with invalid entries? The errors of the entries suffice."""
    return detail["type"] == "too_short" and bool(detail["input"])


def _explain(detail: ErrorDetails, data: Any, keys: Sequence[str]) -> Problem:
    where = json_pointer(detail["loc"], data)
    found = detail.get("input")
    kind = detail["type"]
    if kind == "extra_forbidden":
        known = (
            keys if len(detail["loc"]) == 1 else _KEYS.get(str(detail["loc"][0]), _KEYS["devices"])
        )
        return where, "is not a key of a placement spec", _hint(str(detail["loc"][-1]), known)
    if kind == "missing":
        key = str(detail["loc"][-1])
        return f"{where}/{key}".replace("//", "/"), "is required", f"add the key {key!r}"
    if kind == "literal_error":
        quoted = re.findall(r"'([^']*)'|(\d+)", str(detail["ctx"]["expected"]))
        words = [text or number for text, number in quoted]
        near = nearest(found, words) if isinstance(found, str) else None
        hint = f"did you mean {near!r}?" if near else ""
        if found == near:
            hint = f"write {near} without quotes"
        if len(words) == 1:
            return where, f"{spell(found)} was found where {words[0]} was expected", hint
        return where, f"{spell(found)} is not one of {', '.join(words)}", hint
    if kind == "value_error":
        return where, str(detail["ctx"]["error"]), ""
    if kind == "too_short":
        return where, "is empty", "list at least one device, such as 'cuda:0' or 'cpu'"
    message = detail["msg"].removeprefix("Input should be ")
    expected = _JSON_WORDS.get(message, message)
    example = _EXAMPLES.get(where.split("/")[1], "")
    return where, f"{spell(found)} was found where {expected} was expected", example


def _hint(word: str, known: Sequence[str]) -> str:
    near = nearest(word, known)
    return f"did you mean {near!r}?" if near else f"the keys are {', '.join(known)}"


def spell(value: Any) -> str:
    """``repr(value)``, shortened to 60 characters; null, true and false as in JSON."""
    text = _JSON_SINGLES.get(value) if value is None or isinstance(value, bool) else repr(value)
    assert text is not None
    return text if len(text) <= 60 else f"{text[:57]}..."
