"""Keep names of layers and keywords that are not Python identifiers out of generated code.

A layer may be called ``class``, or have quotes and newlines in its name. The generated code calls objects
that store such names; the names are never part of its text.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterable
from typing import Any


def is_plain(name: str) -> bool:
    """Can ``name`` be written into source code as it is?"""
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name)


def is_plain_path(path: str) -> bool:
    """Can fx write ``path``, names separated by dots? Numbers are allowed, because fx quotes them."""
    return all(is_plain(p) or (p.isascii() and p.isdecimal()) for p in path.split("."))


class ReadPath:
    """A function that returns the submodule, parameter or buffer of a module at ``path``."""

    def __init__(self, path: str) -> None:
        self._parts = path.split(".")
        self.__name__ = self.__qualname__ = "read_path"
        self.__module__ = __name__

    def __call__(self, module: Any) -> Any:
        for part in self._parts:
            module = getattr(module, part)
        return module


class WithKeywords:
    """Calls ``function`` with its last arguments passed by these keywords."""

    def __init__(self, function: Callable[..., Any], keywords: Iterable[str]) -> None:
        self._function = function
        self._keywords = tuple(keywords)
        self.__name__ = self.__qualname__ = "with_keywords"
        self.__module__ = __name__

    def __call__(self, *values: Any) -> Any:
        count = len(values) - len(self._keywords)
        named = zip(self._keywords, values[count:], strict=True)
        return self._function(*values[:count], **dict(named))
