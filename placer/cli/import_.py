"""``placer import``: write the spec of a model that is split already, or of accelerate's ``device_map``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from placer.cli.options import ModelOptions, to_file
from placer.cli.output import human_console, write_or_print
from placer.errors import PlacerError, first_few

if TYPE_CHECKING:
    from torch import nn

    from placer.spec import PlacementSpec

Output = Annotated[Path | None, to_file("SPEC", "Write the spec here (JSON), not to stdout.")]
Of = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="The model of a device_map: keys of its parameters, which a spec cannot have, are left out.",
    ),
]
_SHOWN = 6  # how many of the layers without a device are listed

EXAMPLE = "placer import device_map.json -o spec.json"


def import_(model_options: ModelOptions, of: Of = None, output: Output = None) -> None:
    """Write a spec that puts layers where a model that is split by hand, or a device_map, has them.

    MODEL may be a JSON, YAML or TOML file with accelerate's device_map: module path -> number or name of a
    device. Otherwise it is a model whose constructor moves layers to devices, as in layer.to("cuda:1"); with
    --input, also one whose forward moves tensors. The devices need not be there.
    """
    from placer.files import check_spec_path
    from placer.spec.text import FORMATS

    check_spec_path(output)
    console = human_console(as_json=True)
    path = Path(model_options.model)
    if path.suffix.lower() in FORMATS:
        model = None
        if of is not None:
            model = replace(model_options, model=of).load(console, inputs_required=False).model
        spec = _of_file(path, model, console)
    else:
        model_options.check(inputs_required=False)
        spec = _of_model(model_options, console)
    write_or_print(spec.to_json(), output, "spec", console)


def _of_file(path: Path, model: nn.Module | None, console: Console) -> PlacementSpec:
    from placer.spec.device_map import from_device_map
    from placer.spec.load import errors_located
    from placer.spec.text import SpecText

    text = SpecText.read(path)
    values = text.values()
    if not isinstance(values, dict) or "devices" in values:
        remedy = 'write an object such as {"encoder": 0, "head": 1}'
        raise PlacerError(str(path), "is not a device_map", remedy)
    with errors_located(text):
        spec = from_device_map(values, model)
    if left := [path for path in values if path and path not in spec.layers]:
        said = ", ".join(first_few(left, _SHOWN))
        console.print(f"left out, because parameters are where they are read: {said}", markup=False)
    return spec


def _of_model(options: ModelOptions, console: Console) -> PlacementSpec:
    from torch import no_grad

    from placer.importing import user_failure
    from placer.program.split_by_hand import DeviceNotes
    from placer.spec import PlacementSpec
    from placer.spec.device_map import from_device_map, in_order, shortest

    notes = DeviceNotes()
    loaded = options.load(console, inputs_required=False, moves=notes)
    device_map = getattr(loaded.model, "hf_device_map", None)
    if device_map:
        return from_device_map(device_map, loaded.model)
    layers = notes.layers_of(loaded.model)
    if None in layers.values() and loaded.has_inputs:
        try:
            with notes, no_grad():
                loaded.model(*loaded.args, **loaded.kwargs)
        except Exception as error:
            raise user_failure(options.model, "forward, called without data,", error) from error
        layers = notes.layers_of(loaded.model)
    # A spec says nothing of the model's own parameters: they are where they are read.
    asked = {path: device or "" for path, device in layers.items() if path}
    if not any(asked.values()):
        remedy = "'placer auto' chooses devices"
        if not loaded.has_inputs:
            remedy = f"give --input, so that its forward is followed; or {remedy}"
        raise PlacerError(options.model, "moves no layer to a device", remedy)
    found = shortest(asked)
    free = [path for path, device in found.items() if not device]
    if free:
        console.print(
            f"not on a device, so placer chooses: {', '.join(first_few(free, _SHOWN))}",
            markup=False,
        )
    patterns = {path or "**": device for path, device in found.items() if device}
    devices = in_order(filter(None, asked.values()))
    return PlacementSpec.model_validate({"devices": devices, "layers": patterns})
