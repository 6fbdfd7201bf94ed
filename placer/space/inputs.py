"""How the inputs of a program are cut, from the settings of a spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from pydantic import JsonValue

from placer.errors import SpecError
from placer.program import Program
from placer.space.layout import Cuts, Layout, even_grid

_NAMES = ("depth", "height", "width")  # of the last dimensions
_SPATIAL = 2  # the first spatial dimension of an input that the spec does not describe


def input_layouts(program: Program, settings: Mapping[str, JsonValue]) -> dict[str, Layout]:
    """How each input is cut, by its placeholder; those without enough dimensions are not.

    Raises ``SpecError`` if none can be cut as ``settings`` say.
    """
    shards = cast(int, settings["shards"])
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    asked = cast("list[int | str]", settings.get("dims", []))
    grid = settings.get("grid")
    named = {}
    for node, each in zip(placeholders, program.call.inputs, strict=False):
        rank = len(each.shape)
        batch = each.batch_dim
        free = [d for d in range(_SPATIAL, rank) if d != batch]
        names: dict[int | str, int] = dict(zip(_NAMES[-len(free) :], free, strict=False))
        dims: list[int | str] = [names.get(d, d) for d in asked] if asked else [*free]
        numbers = [d for d in dims if isinstance(d, int) and -rank <= d < rank]
        if dims and len(numbers) == len(dims) and each.dtype.is_floating_point:
            own = [d % rank for d in numbers]
            if batch in own:
                raise _error(
                    f"dim {batch} of {each.name} has the rows of the batch",
                    'write other "dims", or "replicas" to split the batch',
                )
            if len(set(own)) < len(own):
                raise _error(f"names a dim of {each.name} twice", 'write other "dims"')
            named[node.name] = each, own
    if not named:
        raise _error(
            "no input has dimensions to cut: floating-point inputs of rows x channels x space are"
        )
    first, own = next(iter(named.values()))
    lengths = [first.shape[d] for d in own]
    if grid is None:
        grid = list(even_grid(shards, lengths))
    shape = tuple(cast("list[int]", grid))
    if len(shape) > len(own):
        raise _error(f"the grid has {len(shape)} axes, and {first.name} {len(own)} dims")
    shape += (1,) * (len(own) - len(shape))
    kept = [k for k, parts in enumerate(shape) if parts > 1] or [0]
    cuts = Cuts(tuple(shape[k] for k in kept), tuple(lengths[k] for k in kept))
    found = {}
    for name, (each, others) in named.items():
        if len(others) == len(own):
            found[name] = Layout(cuts, tuple(each.shape), tuple(others[k] for k in kept))
    layout = next(iter(found.values()))
    if not layout.can_be_cut:
        sizes = "x".join(map(str, lengths))
        raise _error(
            f"{first.name} has {sizes} positions in space, too few for a grid of "
            f"{'x'.join(map(str, shape))}"
        )
    # An input of one plane, such as a scale per channel, is broadcast.
    return {name: layout for name, layout in found.items() if layout.can_be_cut}


def _error(problem: str, remedy: str = "") -> SpecError:
    remedy = remedy or (
        'write fewer "shards", another "grid", or the "dims" of the inputs that are space'
    )
    return SpecError(SpecError.UNNAMED, [("/space", problem, remedy)])
