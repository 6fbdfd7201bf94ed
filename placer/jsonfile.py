"""Reads text and JSON files, with errors that say what is wrong and where."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from placer.errors import PlacerError, path_remedy


class JSONError(PlacerError):
    """A text is not JSON, or a file cannot be read."""


def read_text(path: Path, endings: Collection[str] = (".json",)) -> str:
    """The file's text: UTF-8, with or without a byte order mark. Raises ``JSONError``.

    Where there is no such file, one beside it with one of ``endings`` may have been meant.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        hint = path_remedy(path, lambda beside: beside.suffix in endings)
        if ".py:" in path.name:
            hint = "is this the model? On the command line, it comes before the file"
        raise JSONError(str(path), "no such file", hint) from None
    except IsADirectoryError:
        raise JSONError(str(path), "cannot be read: it is a folder", "name a file in it") from None
    except UnicodeDecodeError as error:
        problem = f"cannot be read: byte {error.start} is not UTF-8 text"
        raise JSONError(str(path), problem, "save it as UTF-8") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise JSONError(str(path), f"cannot be read: {reason}", "check the path") from None


def read_json(path: Path) -> Any:
    """The JSON value in a file that a program wrote. Raises ``JSONError``."""
    text = read_text(path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        problem = f"is not JSON: {error.msg} (line {error.lineno}, column {error.colno})"
    except (RecursionError, ValueError):  # Python's own limits; that of numbers is 4,300 digits
        problem = "is nested too deep, or has a number with too many digits"
    raise JSONError(str(path), problem)


def json_pointer(path: Iterable[int | str], data: Any) -> str:
    """The JSON pointer (RFC 6901) to ``path`` in ``data``, without steps that are not in it.

    The paths of pydantic's errors also contain its own tags, which are left out.

    >>> json_pointer(["devices", 0, "DeviceSpec", "memory"], {"devices": [{"memory": 1}]})
    '/devices/0/memory'
    """
    pointer = ""
    for part in path:
        inside = isinstance(data, Mapping) and part in data
        inside |= isinstance(data, list | tuple) and isinstance(part, int) and part < len(data)
        if not inside:
            continue
        data = data[part]
        pointer += f"/{escape_token(str(part))}"
    return pointer or "/"


def escape_token(part: str) -> str:
    """``part`` as a reference token of a JSON pointer."""
    return part.replace("~", "~0").replace("/", "~1")


def spell(value: Any) -> str:
    """``value`` as JSON has it, shortened to 60 characters; text is in single quotes.

    >>> spell(True), spell(["cuda:0"])
    ('true', '["cuda:0"]')
    """
    is_text = isinstance(value, str)
    text = repr(value) if is_text else json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."
