"""The hooks of a copy of a module, which follow handles that remove those of the module."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from placer._torch import ALL_HOOK_TABLES


class HookTable(OrderedDict[int, Any]):
    """A table of hooks in a copy of a module: those of the original's table, and any that are added here.

    A handle that ``register_forward_hook`` returned before the copy was made knows only the original's table.
    So a copied hook counts only as long as the original has it; that is looked up whenever the table is read.
    """

    def __init__(self, original: OrderedDict[int, Any]) -> None:
        super().__init__()
        self._original = original
        self._copied = dict(original.items())

    def _is_here(self, key: int) -> bool:
        return key not in self._copied or key in self._original

    def __iter__(self) -> Iterator[int]:
        return filter(self._is_here, super().__iter__())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) and self._is_here(key)  # type: ignore[arg-type]

    keys = Mapping.keys  # type: ignore[assignment]
    items = Mapping.items  # type: ignore[assignment]
    values = Mapping.values  # type: ignore[assignment]

    def put_back(self) -> None:
        """Undo what handles have removed from the original's table since it was copied."""
        if isinstance(self._original, HookTable):
            self._original.put_back()
        if any(key not in self._original for key in self._copied):
            present = self._copied | dict(self._original)
            self._original.clear()
            self._original.update(present)

    def __deepcopy__(self, memo: dict[int, Any]) -> OrderedDict[int, Any]:
        # Handles in a copy of the copy are its own.
        made: OrderedDict[int, Any] = OrderedDict()
        memo[id(self)] = memo[id(self._original)] = made
        made.update((key, copy.deepcopy(hook, memo)) for key, hook in self.items())
        return made

    def __reduce__(self) -> Any:
        return OrderedDict, (list(self.items()),)


def hook_tables(model: nn.Module) -> Iterator[OrderedDict[int, Any]]:
    """The tables of those modules of ``model`` that have hooks, also empty ones, which handles refer to."""
    for module in model.modules():
        tables = [vars(module)[name] for name in ALL_HOOK_TABLES]
        if any(tables):
            yield from tables
