"""Leave the caller's modules exactly as they were, whatever tracing did to their attributes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_CONTAINERS = (dict, list, set)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore every module's ``__dict__`` on the way out, also after an exception.

    Covers attributes set, deleted or replaced, and the contents of the dicts, lists and sets that
    are attributes (``_parameters``, ``_buffers``, ``_modules`` and the hooks are such dicts).
    Tensors are compared and put back by identity; their data is not copied.
    """
    saved = [(module, dict(module.__dict__)) for module in model.modules()]
    contents: list[tuple[Any, Any]] = []
    for _, attributes in saved:
        for value in attributes.values():
            if isinstance(value, _CONTAINERS):
                contents.append((value, value.copy()))
    try:
        yield
    finally:
        for container, content in contents:
            if isinstance(container, list):
                container[:] = content
            else:
                container.clear()
                container.update(content)
        for module, attributes in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
