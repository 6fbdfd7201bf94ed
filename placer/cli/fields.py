"""Options that set fields of a placement spec, made from the fields themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple

import typer
from pydantic import BaseModel

from placer.errors import SpecError
from placer.spec import PlacementSpec, spec_schema

_HELP = {
    "checkpoint": "Recompute activations in the backward pass, as needed to fit.",
    "offload": "Keep activations in host memory, as needed to fit.",
    "optimizer": "The optimizer whose state is counted; bytes=8 is one with 8 bytes per parameter.",
}
_AUTO = ("checkpoint", "offload")  # flags: given, the field is "auto"


class OptionGroup(NamedTuple):
    """Several options, and what makes one argument of a command from their values."""

    parameters: Sequence[inspect.Parameter]
    make: Callable[..., Any]


def spec_fields(*names: str, chosen: Sequence[str] = (), has_spec: bool = False) -> OptionGroup:
    """An option for each of the fields ``names``; the argument has field -> value of those that are given.

    Where they are not given, the command chooses the fields ``chosen``; with ``has_spec`` a spec has all.
    """

    def values(**given: Any) -> dict[str, Any]:
        return {name: _value(name, value) for name, value in given.items() if value is not None}

    def parameter(name: str) -> inspect.Parameter:
        default = "" if has_spec else "chosen" if name in chosen else None
        annotation = _option(name, default)
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
        )

    return OptionGroup([parameter(name) for name in names], values)


def _option(name: str, default: str | None) -> Any:
    field = PlacementSpec.model_fields[name]
    option = f"--{name.replace('_', '-')}"
    flags = f"{option}/--no-{option[2:]}"
    help_text = _HELP.get(name, field.description)
    if name in _AUTO:
        return Annotated[bool | None, typer.Option(flags, help=help_text, show_default=False)]
    written = "" if field.default is None else str(_as_written(name))
    shown = written if default is None else default
    if isinstance(field.default, bool):
        return Annotated[
            bool | None, typer.Option(flags, help=help_text, show_default=shown or False)
        ]
    metavar = "|".join(_choices(spec_schema()["properties"][name])) or "VALUE"
    return Annotated[
        str | None,
        typer.Option(option, metavar=metavar, help=help_text, show_default=shown or False),
    ]


def _as_written(name: str) -> Any:
    """The default of a field as a spec has it."""
    default = PlacementSpec.model_fields[name].default
    return default.model_dump() if isinstance(default, BaseModel) else default


def _choices(schema: Mapping[str, Any]) -> list[str]:
    """The words that a field may be, as far as its schema lists them; N is any number."""
    choices = []
    for part in [schema, *schema.get("anyOf", ())]:
        choices += ["N"] if part.get("type") == "integer" else []
        choices += part.get("enum", [part["const"]] if "const" in part else [])
    return choices


def _value(name: str, value: Any) -> Any:
    """The value of a field from that of its option; the spec checks it."""
    if name in _AUTO:
        return "auto" if value else []
    if not isinstance(value, str):
        return value
    nbytes = value.removeprefix("bytes=")
    if name == "optimizer" and nbytes != value and nbytes.isdecimal():
        return {"bytes_per_parameter": int(nbytes)}
    return int(value) if value.isdecimal() else value


def spec_of_options(texts: Sequence[str] = (), **fields: Any) -> PlacementSpec:
    """The spec with ``fields``, those that are not None.

    Raises ``SpecError`` that names options; ``texts`` are the values of --device.
    """
    with errors_name_options(texts):
        given = {name: value for name, value in fields.items() if value is not None}
        return PlacementSpec.model_validate(given)


@contextmanager
def errors_name_options(devices: Sequence[str] = ()) -> Iterator[None]:
    """In this block, a ``SpecError`` names options of the command, since there is no spec file."""
    try:
        yield
    except SpecError as error:
        problems = [_as_option(devices, *problem) for problem in error.problems]
        raise SpecError(SpecError.OPTIONS, dict.fromkeys(problems)) from None


def _as_option(
    devices: Sequence[str], pointer: str, problem: str, remedy: str
) -> tuple[str, str, str]:
    """A problem with a field of a spec, rewritten for the option that set the field."""
    _, field, *path = pointer.split("/")
    option = f"--{'split' if field == 'inputs' else field.replace('_', '-')}"
    if field == "devices" and path[-1:] == ["kind"]:
        option = "--kind"
        remedy = remedy.replace('"objective": "devices"', "--objective devices")
    elif field == "devices" and path:
        text = devices[int(path[0])]
        option = f"--device {text}"
        if '"memory"' in remedy:
            kinds = remedy.partition("one of ")[2]
            remedy = f"write --device {text}=16GiB, or give --kind: one of {kinds}"
    return option, problem, remedy
