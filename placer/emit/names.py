"""Names that the user chose: generated source text holds none that is not a plain identifier.

Layers may be called ``class`` or have quotes and newlines in their names, and so may keywords. Such
names are data of functions that the generated code calls.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterable
from typing import Any


def is_plain(path: str) -> bool:
    """Can ``path`` (names with dots between them) be written as it is in source text?"""
    return all(
        part.isascii() and part.isidentifier() and not keyword.iskeyword(part)
        for part in path.split(".")
    )


class ReadPath:
    """The submodule, parameter or buffer at ``path`` of a module."""

    def __init__(self, path: str) -> None:
        self._parts = path.split(".")
        self.__name__ = self.__qualname__ = "read_path"
        self.__module__ = __name__

    def __call__(self, module: Any) -> Any:
        for part in self._parts:
            module = getattr(module, part)
        return module


class WithKeywords:
    """``function`` called with its last arguments by these keywords."""

    def __init__(self, function: Callable[..., Any], keywords: Iterable[str]) -> None:
        self._function = function
        self._keywords = tuple(keywords)
        self.__name__ = self.__qualname__ = "with_keywords"
        self.__module__ = __name__

    def __call__(self, *values: Any) -> Any:
        count = len(values) - len(self._keywords)
        named = zip(self._keywords, values[count:], strict=True)
        return self._function(*values[:count], **dict(named))
