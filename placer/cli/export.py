"""``placer export``: write where layers are as accelerate's ``device_map``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from placer.cli.options import ModelOptions, SpecOrPlan, to_file
from placer.cli.output import human_console, write_or_print

Output = Annotated[Path | None, to_file("FILE", "Write the map here (JSON), not to stdout.")]

EXAMPLE = "placer export net.py:Net plan.json -o device_map.json"


def export(model_options: ModelOptions, spec: SpecOrPlan = None, output: Output = None) -> None:
    """Write accelerate's device_map of a plan, or of a spec that places every layer.

    It has the devices of the first replica; CUDA devices are numbers.
    """
    from placer.cli.sources import given_placement
    from placer.files import check_writable

    model_options, placement = given_placement(model_options, spec)
    model_options.check(inputs_required=False)
    check_writable(output)
    console = human_console(as_json=True)
    from placer.plan.device_map import to_device_map
    from placer.program import IgnoreDeviceMoves

    loaded = model_options.load(console, inputs_required=False, moves=IgnoreDeviceMoves())

    text = json.dumps(to_device_map(loaded.model, placement), indent=2) + "\n"
    write_or_print(text, output, "device_map", console)
