"""How the inputs of a program are cut, from the settings of a spec."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from pydantic import JsonValue

from placer.errors import SpecError, nearest
from placer.jsonfile import escape_token
from placer.program import Program
from placer.program.types import Input
from placer.space.layout import Cuts, Layout, even_grid
from placer.spec.layers import match_paths

_NAMES = ("depth", "height", "width")  # of the last dimensions
_SPATIAL = 2  # the first spatial dimension of an input that the spec does not describe


def input_layouts(program: Program, settings: Mapping[str, JsonValue]) -> dict[str, Layout]:
    """How each input is cut, by its placeholder; those without enough dimensions are not.

    Raises ``SpecError`` if none of ``forward`` can be cut as ``settings`` say, or one cannot of which they
    say how.
    """
    inputs = program.call.inputs
    placeholders = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    asked = cast("list[int | str]", settings.get("dims", []))
    said: dict[str, Sequence[int]] = {}
    for pattern, dims in cast("dict[str, list[int]]", settings.get("inputs", {})).items():
        said |= dict.fromkeys(match_paths(pattern, [each.name for each in inputs]), dims)
    named = {
        name: (each, own)
        for name, each in zip(placeholders, inputs, strict=False)
        if (own := _said(each, said[each.name]) if each.name in said else _likely(each, asked))
    }
    if not named and program.call.method != "forward":
        return {}  # it draws an image from noise of its own, say, and runs whole
    if not named:
        raise _error(
            "no input has dimensions to cut: floating-point inputs of rows x channels x space are"
        )
    # The cuts of all lengths follow from this one.
    first, own = next((x for x in named.values() if x[0].name in said), next(iter(named.values())))
    for each, dims in named.values():
        if each.name in said and len(dims) != (count := len(asked or own)):
            why = '"space" names' if asked else f"{first.name} has"
            raise _error(f"has {len(dims)} dims, and {why} {count}", "name as many", _place(each))
    lengths = [first.shape[d] for d in own]
    grid = settings.get("grid") or even_grid(cast(int, settings["shards"]), lengths)
    shape = tuple(cast("list[int]", grid))
    if len(shape) > len(own):
        raise _error(f"the grid has {len(shape)} axes, and {first.name} {len(own)} dims")
    shape += (1,) * (len(own) - len(shape))
    kept = [k for k, parts in enumerate(shape) if parts > 1] or [0]
    cuts = Cuts(tuple(shape[k] for k in kept), tuple(lengths[k] for k in kept))
    found = {
        name: Layout(cuts, tuple(each.shape), tuple(dims[k] for k in kept))
        for name, (each, dims) in named.items()
        if len(dims) == len(own)
    }
    # An input of one plane, such as a scale per channel, is broadcast.
    large = {name: layout for name, layout in found.items() if layout.can_be_cut}
    for name in found:
        each = named[name][0]
        if name not in large and (each is first or each.name in said):
            sizes = "x".join(str(each.shape[d]) for d in named[name][1])
            raise _error(
                f"{each.name} has {sizes} positions in space, too few for a grid of "
                f"{'x'.join(map(str, shape))}"
            )
    return large


def refuse_unknown(patterns: Iterable[str], names: Sequence[str]) -> None:
    """Raise ``SpecError`` if one of the ``patterns`` is of none of the inputs ``names``."""
    for pattern in patterns:
        if not match_paths(pattern, names):
            near = nearest(pattern, names)
            remedy = (
                f"did you mean {near!r}?"
                if near
                else f"the inputs are {', '.join(names) or 'none'}"
            )
            problem = "no tensor that forward is called with has this name"
            where = f"/inputs/{escape_token(pattern)}"
            raise SpecError(SpecError.UNNAMED, [(where, problem, remedy)])


def _said(each: Input, dims: Sequence[int]) -> list[int]:
    """The dimensions that the spec says of an input; none if it is not cut."""
    rank, where = len(each.shape), _place(each)
    if wrong := [d for d in dims if not -rank <= d < rank]:
        remedy = f"it has {rank} dimensions: its shape is {list(each.shape)}"
        raise _error(f"names dim {wrong[0]}, which {each.name} lacks", remedy, where)
    return _checked(each, dims, where)


def _likely(each: Input, asked: Sequence[int | str]) -> list[int]:
    """The dimensions of a floating-point input of rows x channels x space; none if it is none."""
    rank = len(each.shape)
    free = [d for d in range(_SPATIAL, rank) if d != each.batch_dim]
    names: dict[int | str, int] = dict(zip(_NAMES[-len(free) :], free[-3:], strict=False))
    dims: list[int | str] = [names.get(d, d) for d in asked] if asked else [*free]
    numbers = [d for d in dims if isinstance(d, int) and -rank <= d < rank]
    if len(numbers) < len(dims) or not each.dtype.is_floating_point:
        return []
    return _checked(each, numbers, "/space")


def _checked(each: Input, dims: Sequence[int], where: str) -> list[int]:
    """``dims``, counted from 0, if they are different and none has the rows."""
    own = [d % len(each.shape) for d in dims]
    if each.batch_dim in own:
        raise _error(
            f"dim {each.batch_dim} of {each.name} has the rows of the batch",
            'write other dims, or "replicas" to split the batch',
            where,
        )
    if len(set(own)) < len(own):
        raise _error(f"names a dim of {each.name} twice", "write other dims", where)
    return own


def _place(each: Input) -> str:
    return f"/inputs/{escape_token(each.name)}/space_dims"


def _error(problem: str, remedy: str = "", where: str = "/space") -> SpecError:
    remedy = remedy or (
        'write fewer "shards", another "grid", or the "dims" of the inputs that are space'
    )
    return SpecError(SpecError.UNNAMED, [(where, problem, remedy)])
