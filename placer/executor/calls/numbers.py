"""Numbers that are others in every call: which become inputs of a program, and a warning about the rest."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any

from torch import nn

from placer.program import AttributeGuard, SettingsGuard, StateInput

ENOUGH = 3  # values with which a program was recorded before it serves calls with any value
_FIRST_WARNING = 8  # captures of one kind of call; then a warning whenever they have doubled


class RecaptureWarning(UserWarning):
    """A model is captured again and again, because its Python code looks at a value that changes."""


class ChangingNumbers:
    """The numbers that were seen to change: in attributes of ``model``, variables and arguments of a call.

    A number is a candidate until a recording shows that Python code looks at it.
    """

    def __init__(self, model: nn.Module, arguments: Mapping[str, int | float]) -> None:
        self._model = model
        found = [StateInput(name=n, argument=n, kind=type(v)) for n, v in arguments.items()]
        self._numbers = dict.fromkeys(found)
        self._refused: set[tuple[Hashable, StateInput]] = set()

    def candidates(self, modes: Hashable, leaves: Mapping[str, Any]) -> tuple[StateInput, ...]:
        """Those that may become inputs of a program for these modes of the model, and are numbers now."""
        found = (each for each in self._numbers if (modes, each) not in self._refused)
        return tuple(each for each in found if each.read(self._model, leaves) is not None)

    @property
    def attributes(self) -> list[tuple[str, str]]:
        """The module path and the name of each that is an attribute."""
        return [(each.path[0], each.path[1]) for each in self._numbers if each.path]

    def note_attributes(
        self, guards: Collection[AttributeGuard], modules: Mapping[str, nn.Module]
    ) -> None:
        """Note the numbers that are others now than when ``guards`` were made."""
        for guard in guards:
            if isinstance(guard, SettingsGuard):
                for each in guard.changed_numbers():
                    self._numbers.setdefault(each)
                continue
            table = vars(modules[guard.path]) if guard.path in modules else {}
            now, kind = table.get(guard.name), type(guard.value)
            if kind in (int, float) and type(now) is kind and now != guard.value:
                name = f"{guard.path}.{guard.name}".lstrip(".")
                each = StateInput(name=name, path=(guard.path, guard.name), kind=kind)
                self._numbers.setdefault(each)

    def refuse(self, modes: Hashable, numbers: Collection[StateInput]) -> None:
        """These are part of the program for these modes: Python code looks at them."""
        self._refused.update((modes, each) for each in numbers)

    def values(self, numbers: Collection[StateInput], leaves: Mapping[str, Any]) -> tuple[Any, ...]:
        """The present values of those of ``numbers`` that were seen to change, in a call with these leaves.

        Others are set by forward itself, and capture has compared two calls.
        """
        return tuple(each.read(self._model, leaves) for each in numbers if each in self._numbers)


class Recaptures:
    """Counts how often a model was captured for other values, and warns."""

    def __init__(self) -> None:
        self._count = 0
        self._seconds = 0.0
        self._limit = _FIRST_WARNING

    def add(self, model: nn.Module, what: Iterable[str], seconds: float) -> None:
        """One more capture, which took ``seconds``; ``what`` are the values for which it was made."""
        self._count += 1
        self._seconds += seconds
        if self._count < self._limit:
            return
        self._limit *= 2
        names = ", ".join(sorted(set(what))) or "a value"
        warnings.warn(
            f"{type(model).__name__} was captured {self._count} times for other values of {names}, at which "
            f"its Python code looks; each time took {self._seconds / self._count:.2f} s. Pass what changes "
            "in every call as a tensor, or use it in arithmetic with tensors only.",
            RecaptureWarning,
            stacklevel=2,
        )
