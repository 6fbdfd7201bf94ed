"""Translate pydantic's errors into problems, each with a JSON pointer into the user's file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from placer.errors import KeyProblem, nearest
from placer.jsonfile import escape_token, json_pointer, spell
from placer.spec.check import Problem

_JSON_WORDS = {
    "a valid tuple": "a list",
    "a valid dictionary": "an object",
    "a valid boolean": "true or false",
    "a valid string": "text",
    "a valid dictionary or instance of DeviceSpec": "a device name or an object",
    "a valid dictionary or instance of LossSpec": "the name of a loss or an object",
}
_YES_AND_NO = {
    **dict.fromkeys(("yes", "on", "true", "1"), "true"),
    **dict.fromkeys(("no", "off", "false", "0"), "false"),
}
_REQUIRED = "is required"
_UNKNOWN = "is not a key of a placement spec"
_DID_YOU_MEAN = "did you mean '{}'?"
_KEYS = {
    "devices": ["name", "memory", "kind", "allocator"],
    "inputs": ["batch_dim", "space_dims"],
    "loss": ["function", "target", "whole_batch"],
    "space": ["shards", "grid", "dims", "layers", "own_boxes"],
}
_DTYPES = {
    **dict.fromkeys(("float32", "float", "32-true"), "fp32"),
    **dict.fromkeys(("float16", "half", "16-mixed"), "fp16"),
    **dict.fromkeys(("bfloat16", "bf16-mixed"), "bf16"),
}
_EXAMPLES = {
    "loss": 'write a name such as "cross_entropy", or an object with "function" and "target"',
    "devices": 'write a list such as ["cuda:0", {"name": "cuda:1", "memory": "16GiB"}]',
    "inputs": 'write "whole", or an object such as {"batch_dim": 1}',
    "layers": 'write an object such as {"encoder": "cuda:0"}, or leave it out, and placer chooses',
    "replica_devices": 'write a list for each further replica, such as [["cuda:2", "cuda:3"]]',
}


def explain_errors(error: ValidationError, data: Any, keys: Sequence[str]) -> list[Problem]:
    """Every error in ``error`` as (JSON pointer, problem, remedy); ``keys`` are the valid keys of a spec."""
    if isinstance(data, Mapping) and _is_device_map(data, keys):
        remedy = "write a spec from it: placer import, with this file in place of a model"
        return [("/", "is a device_map of accelerate's, and no placement spec", remedy)]
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
    problems = [_explain(detail, data, keys) for detail in details if not _is_echo(detail)]
    return [p for p in problems if p[1] != _REQUIRED or not _is_explained(p[0], problems)]


def _is_device_map(data: Mapping[Any, Any], keys: Sequence[str]) -> bool:
    """Has every key a number or a name, and is none the name of a field of a spec, or nearly one?"""
    values = [x for x in data.values() if type(x) in (int, str)]
    return len(values) == len(data) > 0 and not any(nearest(str(k), keys) for k in data)


def _is_explained(missing: str, problems: Sequence[Problem]) -> bool:
    """Is it said already why there is no key ``missing``: is it misspelt, or is the machine unknown?"""
    above, _, key = missing.rpartition("/")
    if missing == "/devices" and any(where == "/machine" for where, *_ in problems):
        return True
    hints = [
        p[2] for p in problems if isinstance(p, KeyProblem) and p[0].rpartition("/")[0] == above
    ]
    meant = (key, "machine") if key == "devices" else (key,)
    return bool(hints) if above else any(_DID_YOU_MEAN.format(name) in hints for name in meant)


def wrong_fields(problems: Sequence[Problem]) -> set[str]:
    """The fields of the spec with a problem, also those that a misspelt key was meant to be."""
    meant = {p[2].split("'")[1] for p in problems if "'" in p[2] and isinstance(p, KeyProblem)}
    return meant | {where.split("/")[1] for where, *_ in problems}


def misspelt_keys(problems: Sequence[Problem], data: Any) -> dict[str, str]:
    """The misspelt keys of a spec, each with the field that it was meant to be and that is not there."""
    meant: dict[str, str] = {}
    for where, problem, hint in problems:
        _, *name = hint.split("'")[:2]
        is_top = problem == _UNKNOWN and where[1:] in data
        if is_top and name and name[0] not in (*data, *meant.values()):
            meant[where[1:]] = name[0]
    return meant


def as_written(problems: Sequence[Problem], meant: Mapping[str, str]) -> Iterator[Problem]:
    """``problems`` of a spec in which keys are as they were ``meant``, with pointers to those written."""
    written = {name: escape_token(key) for key, name in meant.items()}
    for problem in problems:
        first, slash, rest = problem[0][1:].partition("/")
        where = f"/{written.get(first, first)}{slash}{rest}"
        is_key = isinstance(problem, KeyProblem)
        yield KeyProblem(where, *problem[1:]) if is_key else (where, *problem[1:])


def one_per_slip(problems: Sequence[Problem]) -> list[Problem]:
    """``problems``, the first of each key and value, without those of a whole whose parts have problems."""
    inner = {
        "/".join(steps[:count])
        for steps in (where.split("/") for where, *_ in problems)
        for count in range(2, len(steps))
    }
    keys = {p[0]: p for p in reversed(problems) if isinstance(p, KeyProblem)}
    values = {p[0]: p for p in reversed(problems) if not isinstance(p, KeyProblem)}
    return [
        p for p in problems if p is keys.get(p[0]) or (p is values.get(p[0]) and p[0] not in inner)
    ]


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
        hint = _hint(str(detail["loc"][-1]), known)
        return KeyProblem(where, _UNKNOWN, hint)
    if kind == "missing":
        key = str(detail["loc"][-1])
        return f"{where}/{key}".replace("//", "/"), _REQUIRED, f"add the key {key!r}"
    if kind == "literal_error":
        quoted = re.findall(r"'([^']*)'|(\d+)", str(detail["ctx"]["expected"]))
        words = [text or number for text, number in quoted]
        near = nearest(found, words) if isinstance(found, str) else None
        hint = f"did you mean {near!r}?" if near else ""
        if found == near:
            hint = f"write {near} without quotes"
        hint = hint or _hint_for_word(found, words) or _EXAMPLES.get(where.split("/")[1], "")
        if len(words) == 1:
            only = words[0] if words[0].isdecimal() else repr(words[0])
            return where, f"{spell(found)} was found where {only} was expected", hint
        return where, f"{spell(found)} is not one of {', '.join(words)}", hint
    if kind == "value_error":
        problem, _, remedy = str(detail["ctx"]["error"]).partition("; ")
        if where.startswith("/layers/"):
            return where, problem, _hint_for_layer(str(detail["loc"][1]), found, keys) or remedy
        return where, problem, remedy
    if kind == "too_short":
        return where, "is empty", "list at least one device, such as 'cuda:0' or 'cpu'"
    message = detail["msg"].removeprefix("Input should be ")
    expected = _JSON_WORDS.get(message, message)
    example = _EXAMPLES.get(where.split("/")[1], "")
    if expected == "true or false" and str(found).lower() in _YES_AND_NO:
        example = f"write {_YES_AND_NO[str(found).lower()]}"
    return where, f"{spell(found)} was found where {expected} was expected", example


def _hint_for_layer(pattern: str, found: Any, keys: Sequence[str]) -> str:
    """What to write for an entry of ``layers`` that is no entry; "" if it is only a wrong device."""
    if isinstance(found, Mapping) and found:
        return f'write the whole path as one text, "{pattern}.{next(iter(found))}", and its device'
    if pattern in keys:
        return f'{pattern!r} is a key of the spec: write it outside of "layers"'
    return ""


def _hint_for_word(found: Any, words: Sequence[str]) -> str:
    """What to write for a precision that is spelt as torch's dtype; "" for other words."""
    meant = _DTYPES.get(str(found).lower().removeprefix("torch."))
    return f"write {meant!r}" if meant in words else ""


def _hint(word: str, known: Sequence[str]) -> str:
    near = nearest(word, known)
    return _DID_YOU_MEAN.format(near) if near else f"the keys are {', '.join(known)}"
