"""Read specs. A spec is data: nothing in it is imported or run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from placer.errors import KeyProblem, PlacerError, SpecError
from placer.jsonfile import spell
from placer.spec.check import Problem
from placer.spec.layers import written_problems
from placer.spec.text import SpecText
from placer.spec.types import PlacementSpec

# Makes the module paths of the model that a spec is for; None if they are not known.
LayerPaths = Callable[[], Iterable[str] | None]


def load_spec(
    source: str | Path | Mapping[str, Any], *, layer_paths: LayerPaths | None = None
) -> PlacementSpec:
    """The spec in ``source``: a path, JSON text that starts with ``{``, or a mapping.

    The end of a file's name says what it is: ``.yaml`` and ``.yml`` YAML, ``.toml`` TOML, any other JSON,
    which may have comments and trailing commas. Raises ``SpecError`` with every problem, each with its JSON
    pointer and its place in the text; with ``layer_paths``, which is called only then, also misspelt layers.
    """
    text = _text_of(source)
    if text is None:
        assert isinstance(source, Mapping)
        return _validated(source, layer_paths)
    return spec_in(text, text.last_values(), layer_paths)


def _validated(
    data: Mapping[str, Any], layer_paths: LayerPaths | None, twice: Sequence[Problem] = ()
) -> PlacementSpec:
    problems, cause = list(twice), None
    try:
        spec = PlacementSpec.model_validate(dict(data))
    except SpecError as error:
        problems += error.problems
        cause = error.__cause__
    if not problems:
        return spec
    if layer_paths is not None and (paths := layer_paths()) is not None:
        # A field that is written among the layers is no layer either, which is one slip.
        fields = {f"/layers/{name}" for name in _FIELDS} & {where for where, *_ in problems}
        problems += (each for each in written_problems(data, paths) if each[0] not in fields)
    raise SpecError(SpecError.UNNAMED, problems) from cause


def spec_in(text: SpecText, data: Any, layer_paths: LayerPaths | None = None) -> PlacementSpec:
    """The spec in ``data``, the `last_values` of ``text``. Raises ``SpecError`` as `load_spec` does."""
    with errors_located(text):
        if not isinstance(data, Mapping):
            problem = f"{spell(data)} was found where an object was expected"
            remedy = 'write {"devices": ["cuda:0", "cuda:1"]}'
            raise SpecError(SpecError.UNNAMED, [("/", problem, remedy)])
        if "fingerprint" in data and "stages" in data:
            remedy = (
                "'plan' takes a spec; 'simulate', 'verify', 'explain', 'diff', 'report' and 'what-if PLAN' "
                "take a plan (in Python: placer.load_plan)"
            )
            raise SpecError(text.source, [(text.source, "is a plan, not a spec", remedy)])
        return _validated(data, layer_paths, text.twice())


@contextmanager
def errors_located(source: object) -> Iterator[None]:
    """In this block, errors about fields of the spec in ``source`` name its file, line and column.

    ``source`` is what `load_spec` takes, or a `SpecText`; for others nothing is changed.
    """
    try:
        yield
    except SpecError as error:
        if error.source != SpecError.UNNAMED or (text := _text_of(source)) is None:
            raise
        found = [(text.locate(problem), problem) for problem in error.problems]
        found.sort(key=lambda pair: (pair[0].line, pair[0].column) if pair[0] else (0, 0))
        problems = [problem for _, problem in found]
        raise SpecError(text.source, problems, [place for place, _ in found]) from error.__cause__
    except PlacerError as error:
        about_spec = error.where.startswith("/") and error.where.split("/")[1] in _FIELDS
        if about_spec and error.location is None and (text := _text_of(source)) is not None:
            problem: Problem = (error.where, error.problem, error.remedy)
            if error.where.startswith(("/inputs/", "/stored/")):  # about the name of a tensor
                problem = KeyProblem(*problem)
            error.location = text.locate(problem)
        raise


_FIELDS = frozenset(PlacementSpec.known_keys())


def _text_of(source: object) -> SpecText | None:
    """The text that a user wrote; None if it is not known. Raises ``SpecError`` if a file cannot be read."""
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return SpecText(SpecError.UNNAMED, source)
    if isinstance(source, str | Path):
        return SpecText.read(Path(source))
    return source if isinstance(source, SpecText) else None
