"""Match the layer patterns of a spec against the module paths of a model."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from placer.errors import KeyProblem, nearest
from placer.jsonfile import escape_token
from placer.spec.check import Problem

if TYPE_CHECKING:
    from placer.spec.types import PlacementSpec


def resolve_layers(
    layers: Mapping[str, str], paths: Iterable[str]
) -> tuple[dict[str, str], list[Problem]]:
    """Path -> device for every path that a pattern covers, and a problem for each pattern without effect.

    A pattern covers the subtree of every path that it matches; later patterns win. A pattern has no effect
    if it matches nothing, or if later ones with other devices win everywhere. Takes O(paths x patterns).

    >>> resolve_layers({"enc": "a", "enc.*.conv": "b"}, ["enc", "enc.0", "enc.0.conv"])
    ({'enc': 'a', 'enc.0': 'a', 'enc.0.conv': 'b'}, [])
    """
    known = [path for path in paths if path]
    winner: dict[str, str] = {}  # path -> pattern
    covered = {pattern: match_paths(pattern, known) for pattern in layers}
    for pattern, found in covered.items():
        winner.update(dict.fromkeys(found, pattern))
    problems: list[Problem] = []
    for pattern, found in covered.items():
        if not found:
            where = f"/layers/{escape_token(pattern)}"
            problems.append(KeyProblem(where, *_unmatched(pattern, known)))
        elif all(layers[winner[path]] != layers[pattern] for path in found):
            later = winner[found[0]]
            problem = f"has no effect, because {later!r} comes later and covers it"
            remedy = f"write {pattern!r} after {later!r}, or leave it out"
            problems.append(KeyProblem(f"/layers/{escape_token(pattern)}", problem, remedy))
    return {path: layers[winner[path]] for path in known if path in winner}, problems


def resolve_patterns(
    field: str, patterns: Iterable[str], paths: Iterable[str]
) -> tuple[set[str], list[Problem]]:
    """All paths that any of ``patterns`` covers, and a problem for each pattern that matches nothing."""
    known = [path for path in paths if path]
    found: set[str] = set()
    problems = []
    for index, pattern in enumerate(patterns):
        covered = match_paths(pattern, known)
        found.update(covered)
        if not covered:
            problems.append((f"/{field}/{index}", *_unmatched(pattern, known)))
    return found, problems


def layer_problems(spec: PlacementSpec, paths: Iterable[str]) -> list[Problem]:
    """A problem for each pattern of ``spec`` without effect on a model whose modules are ``paths``."""
    fields = {"checkpoint": spec.checkpoint, "offload": spec.offload}
    return _problems(spec.layers, {**fields, "space/layers": spec.space.layers}, paths)


def written_problems(data: Mapping[str, Any], paths: Iterable[str]) -> list[Problem]:
    """`layer_problems` of a spec as it is written, of what has the right type."""
    layers, space = data.get("layers"), data.get("space")
    fields = {field: data.get(field) for field in ("checkpoint", "offload")}
    fields["space/layers"] = space.get("layers") if isinstance(space, Mapping) else None
    lists = {
        field: patterns
        for field, patterns in fields.items()
        if isinstance(patterns, list | tuple) and all(isinstance(each, str) for each in patterns)
    }
    given = layers.items() if isinstance(layers, Mapping) else ()
    texts = {p: name for p, name in given if isinstance(p, str) and isinstance(name, str)}
    return _problems(texts, lists, paths)


def _problems(
    layers: Mapping[str, str], fields: Mapping[str, Sequence[str]], paths: Iterable[str]
) -> list[Problem]:
    paths = list(paths)
    problems = resolve_layers(layers, paths)[1]
    for field, patterns in fields.items():
        if patterns != "auto":
            problems += resolve_patterns(field, patterns, paths)[1]
    return problems


def match_paths(pattern: str, paths: Iterable[str]) -> list[str]:
    """The ``paths`` that ``pattern`` covers: it matches the path or one of its ancestors.

    >>> match_paths("**.conv*", ["stem", "block.0.conv1", "block.0.conv1.weight", "conv"])
    ['block.0.conv1', 'block.0.conv1.weight', 'conv']
    """
    covers = _covers(pattern)
    return [path for path in paths if covers.fullmatch(path)]


@functools.lru_cache(maxsize=1024)
def _covers(pattern: str) -> re.Pattern[str]:
    parts = []
    for part in pattern.split("."):
        if part == "**":
            parts.append(r"(?:[^.]+\.)*")  # any number of whole parts
        else:
            pieces = [re.escape(piece).replace(r"\*", "[^.]*") for piece in part.split("**")]
            parts.append(".*".join(pieces) + r"\.")
    return re.compile(_without_last_dot("".join(parts)) + r"(?:\..+)?")


def _without_last_dot(regex: str) -> str:
    if regex.endswith(r"(?:[^.]+\.)*"):
        return regex.removesuffix(r"(?:[^.]+\.)*") + r"[^.]+"
    return regex.removesuffix(r"\.")


def _unmatched(pattern: str, paths: Sequence[str]) -> tuple[str, str]:
    problem = f"no layer matches {pattern!r}"
    if re.search(r"[?\[\]{}]|\d[-:,]\d", pattern):
        return problem, "only * and ** stand for other names; write an entry for each layer"
    parent, _, name = pattern.rpartition(".")
    inside = match_paths(parent, paths) if parent else []
    if (
        inside
        and not name.isdigit()
        and nearest(name, {path.rpartition(".")[2] for path in inside}) is None
    ):
        return f"{problem} (a layer is a module, not a parameter)", f"did you mean {parent!r}?"
    near = _nearest_pattern(pattern, paths)
    tops = dict.fromkeys(path.partition(".")[0] for path in paths)
    if near:
        return problem, f"did you mean {near!r}?"
    where = "; a parameter or buffer of the model itself is placed where it is read"
    return problem, f"top-level layers: {', '.join(tops)}{where if not parent else ''}"


def _nearest_pattern(pattern: str, paths: Sequence[str]) -> str | None:
    """``pattern`` with every misspelt part replaced by the nearest name at that depth, or None."""
    good: list[str] = []
    for part in pattern.split("."):
        if match_paths(".".join([*good, part]), paths):
            good.append(part)
            continue
        depth = len(good)
        parents = set(match_paths(".".join(good), paths)) if good else set()
        names = {
            path.split(".")[depth]
            for path in paths
            if path.count(".") == depth and (not good or path.rpartition(".")[0] in parents)
        }
        name = nearest(part, names)
        if name is None:
            return nearest(pattern, paths)
        good.append(name)
    fixed = ".".join(good)
    return fixed if match_paths(fixed, paths) else nearest(pattern, paths)
