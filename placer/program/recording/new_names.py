"""Refuse a forward that sets global variables and attributes of classes in ways that are not followed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

from placer.errors import CaptureError
from placer.program.objects.reachable import ReachableState, Reference
from placer.program.objects.restore import MISSING

# When they are read, an object is copied, or code warns
_MADE_BY_PYTHON = ("__annotations__", "__slotnames__", "__warningregistry__")


@contextmanager
def refusing_unknown_names(code: ReachableState) -> Iterator[None]:
    """Raise ``CaptureError`` if the block sets a name of a module or class that is no variable of ``code``.

    Such is a name that does not exist before, unless a ``global`` statement has it, and one to which code
    comes only by ``globals()`` or ``setattr``. They get their former values again.
    """
    before = [(space, dict(_table(space))) for space in code.spaces]
    known = {(id(each.holder), each.key) for each in code.variables}
    try:
        yield
    finally:
        found = [
            (Reference(space, name, value), names.get(name, MISSING))
            for space, names in before
            for name, value in list(_table(space).items())
            if value is not names.get(name, MISSING)
            and (id(space), name) not in known
            and name not in _MADE_BY_PYTHON
            and not isinstance(value, (ModuleType, FunctionType, type))
        ]
        for each, former in found:
            if former is not MISSING:
                each.write(former)
            elif isinstance(each.holder, type):
                delattr(each.holder, each.key)
            else:
                del each.holder[each.key]
    for each, former in found:
        new = "does not exist before" if former is MISSING else "is not named in the code"
        raise CaptureError(
            each.name,
            f"is set by forward, but {new}, so it is not known who reads it",
            f"define it beforehand ({each.key} = None), and assign to it by its name",
        )


def _table(space: Any) -> Any:
    return vars(space) if isinstance(space, type) else space
