"""The errors that placer raises. Each says where the problem is, what it is, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

_SHOWN_COLUMNS = 76  # of the line that an error is about
_NAMED = 3  # devices; of more, the first and the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A place in a file that a user wrote: a part of one line, which is ``text``.

    ``line`` and ``column`` count from 1, and ``width`` is the number of characters of the part.

    >>> print(Location(file="a.json", line=7, column=2, width=3, text="{'a': 1}").excerpt)
      7 | {'a': 1}
        |  ^^^
    """

    file: str
    line: int
    column: int
    width: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"

    @property
    def excerpt(self) -> str:
        """The line, or what of a long one is around the part, and carets under the part."""
        begin = 0
        if len(self.text) > _SHOWN_COLUMNS:
            begin = max(0, min(self.column - _SHOWN_COLUMNS // 2, len(self.text) - _SHOWN_COLUMNS))
        shown = self.text[begin : begin + _SHOWN_COLUMNS].replace("\t", " ")
        shown = "…" * (begin > 0) + shown[begin > 0 :]
        shown += "…" * (begin + _SHOWN_COLUMNS < len(self.text))
        before = self.column - 1 - begin
        carets = "^" * max(1, min(self.width, _SHOWN_COLUMNS - before))
        number = f"{self.line:>3}"
        return f"{number} | {shown}\n{' ' * len(number)} | {' ' * before}{carets}"


class KeyProblem(NamedTuple):
    """A problem of a spec that is about the key at the JSON pointer ``where``, not about its value."""

    where: str
    problem: str
    remedy: str


class PlacerError(Exception):
    """The base class of all errors of placer.

    ``where`` names the place (a JSON pointer, a layer, a device), ``problem`` what was found there
    and what was expected, ``remedy`` what to do. If it is about a part of a file that the user wrote,
    ``location`` is that. Errors survive pickling across processes.
    """

    location: Location | None = None

    def __init__(self, where: str, problem: str, remedy: str = "") -> None:
        super().__init__(where, problem, remedy)
        self.where = where
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        text = f"{self.where}: {self.problem}" if self.where else self.problem
        if self.location is not None:
            text = f"{self.location}: {text}\n{self.location.excerpt}"
        return f"{text}\n  -> {self.remedy}" if self.remedy else text


class SpecError(PlacerError):
    """A placement spec is wrong; ``problems`` holds every ``(where, problem, remedy)`` found in it.

    ``locations`` are where they are in the file ``source``, None for those of which that is not known. The
    message has the first 20 of them. A single problem that has a location, or is about ``source`` as a whole
    (for example, a missing file) or about a command line option, has no headline.
    """

    UNNAMED = "placement spec"  # the source of a spec that was not read from a file
    OPTIONS = "options"  # the source of a spec that the options of a command describe
    _SHOWN = 20  # how many problems the message has

    def __init__(
        self,
        source: str,
        problems: Iterable[tuple[str, str, str]],
        locations: Iterable[Location | None] = (),
    ) -> None:
        self.source = source
        self.problems = tuple(problems)
        self.locations = tuple(locations) or (None,) * len(self.problems)
        errors = []
        told: set[tuple[str, str]] = set()
        for (where, problem, remedy), location in zip(self.problems, self.locations, strict=True):
            is_told = remedy and (problem, remedy) in told
            errors.append(PlacerError(where, problem, "as above" if is_told else remedy))
            told.add((problem, remedy))
            errors[-1].location = location
        if len(errors) == 1 and (
            self.locations[0] or source == self.OPTIONS or self.problems[0][0] == source
        ):
            super().__init__(*self.problems[0])
            self.location = self.locations[0]
            return
        lines = first_few([str(error) for error in errors], self._SHOWN)
        count = "1 problem" if len(errors) == 1 else f"{len(errors)} problems"
        super().__init__(source, f"{count}\n" + "\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.source, self.problems, self.locations)


class CaptureError(PlacerError):
    """A model cannot be captured as a graph, or was called differently than it was captured."""


class DeviceError(PlacerError):
    """A device is unknown, missing on this machine, or of unknown memory."""


class PlanError(PlacerError):
    """A plan does not belong to the model, or cannot be read."""

    UNNAMED = "plan"  # the place of a plan that does not belong to the model


class CheckpointError(PlacerError):
    """A checkpoint is missing or damaged, or does not fit the module or its optimizer."""


class VersionError(PlacerError):
    """The installed release of a package lacks something that is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A change of a spec that was planned: whether it fits, and the largest peak of a device, in bytes.

    ``headroom`` are the bytes left on the fullest device, negative if they are missing there or on the host
    (None: not known). If it fits, ``step_seconds`` are those of a step (None: the kind of a device is not
    known).
    """

    change: str
    fits: bool
    peak: int
    step_seconds: float | None = None
    headroom: int | None = None


class BudgetError(PlacerError):
    """No placement fits the budgets; in the closest one, ``device`` lacks ``missing_bytes``.

    ``largest_node`` needs ``largest_node_bytes`` on a device of its own, however the model is split.
    ``tried`` are the changes that were planned, whether they fit or not; ``needed`` says which memory would
    do without any of them, "" if that was not looked for.
    """

    def __init__(
        self,
        where: str,
        problem: str,
        remedy: str = "",
        *,
        device: str = "",
        missing_bytes: int = 0,
        largest_node: str = "",
        largest_node_bytes: int = 0,
        tried: Iterable[Tried] = (),
        needed: str = "",
    ) -> None:
        super().__init__(where, problem, remedy)
        self.device = device
        self.missing_bytes = missing_bytes
        self.largest_node = largest_node
        self.largest_node_bytes = largest_node_bytes
        self.tried = tuple(tried)
        self.needed = needed


class StageError(PlacerError):
    """A stage raised an exception on this rank; ``layer`` is "" if it was not raised by a layer."""

    def __init__(
        self,
        where: str,
        problem: str,
        remedy: str = "",
        *,
        stage: int = -1,
        layer: str = "",
        rank: int = -1,
    ) -> None:
        super().__init__(where, problem, remedy)
        self.stage = stage
        self.layer = layer
        self.rank = rank


class PeerError(PlacerError):
    """Another rank of the job failed or ended; ``where`` and ``problem`` are from its report."""


def first_line(error: BaseException | None) -> str:
    """The first line of the error's message."""
    return str(error).strip().split("\n")[0]


def first_few(texts: Sequence[str], most: int) -> list[str]:
    """The first ``most`` of ``texts``, and how many more there are.

    >>> first_few(["a", "b", "c"], 1), first_few(["a"], 1)
    (['a', '… and 2 more'], ['a'])
    """
    more = len(texts) - most
    return [*texts[:most], f"… and {more} more"] if more > 0 else list(texts)


def some_names(names: Sequence[str]) -> str:
    """A few names, or the first and the last of many.

    >>> some_names(["cuda:0", "cuda:8"]), some_names([f"cuda:{i}" for i in range(4)])
    ('cuda:0, cuda:8', 'cuda:0 … cuda:3 (4 devices)')
    """
    if len(names) <= _NAMED:
        return ", ".join(names)
    return f"{names[0]} … {names[-1]} ({len(names)} devices)"


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that is most similar to ``word``; None if none is close.

    >>> nearest("encodr.0", ["decoder.0", "encoder.0", "head"])
    'encoder.0'
    """
    by_lower = {choice.lower(): choice for choice in sorted(set(choices), reverse=True)}
    matches = difflib.get_close_matches(word.lower(), sorted(by_lower), n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None


def path_remedy(path: Path, wanted: Callable[[Path], bool]) -> str:
    """What to do about a ``path`` that is not there: it may be a ``wanted`` one beside it, misspelt."""
    beside = sorted(path.parent.iterdir()) if path.parent.is_dir() else []
    by_stem = {each.stem: each for each in beside if wanted(each)}
    near = nearest(path.stem, by_stem)
    return f"did you mean {str(by_stem[near])!r}?" if near else "check the path"


def causes(error: BaseException | None, *, implicit: bool = False) -> Iterator[BaseException]:
    """Yields ``error`` and the chain of its causes; an error may be its own cause.

    With ``implicit``, includes the exception that was being handled when an error without a cause was raised.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (error.__context__ if implicit else None)
