"""Writes where layers are as accelerate's ``device_map``."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from placer.errors import PlacerError, first_few
from placer.plan.types import Plan
from placer.spec import PlacementSpec, resolve_layers
from placer.spec.device_map import shortest


def to_device_map(model: nn.Module, placement: PlacementSpec | Plan) -> dict[str, int | str]:
    """accelerate's ``device_map`` for ``model``, with the devices of the first replica.

    Every parameter and buffer is below one of its keys. CUDA devices are numbers. Raises ``PlacerError`` for
    a spec that leaves layers to placer, and where stages are split in space.
    """
    names = list(model.state_dict())
    owners = dict.fromkeys(name.rpartition(".")[0] for name in names)
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    shards = placement.shards if isinstance(placement, Plan) else placement.space.number
    if shards > 1:
        raise PlacerError(
            "/space", "splits layers, and a device_map has one device for each of them"
        )
    if isinstance(placement, Plan):
        known = layers_of(placement)
        first = placement.stages[0].devices[0]
        device_of = {owner: _inherited(owner, known) or first for owner in owners}
    else:
        placed, _ = resolve_layers(placement.layers, paths)
        free = [owner or "the model's own parameters" for owner in owners if owner not in placed]
        if free:
            raise PlacerError(
                "/layers",
                f"does not say where these are: {', '.join(first_few(free, 6))}",
                "make a plan, which does: placer plan MODEL SPEC --input … -o plan.json",
            )
        device_of = {owner: placed[owner] for owner in owners}
    found = shortest({name: device_of[name.rpartition(".")[0]] for name in names})
    return {path: _number(device) for path, device in found.items()}


def layers_of(plan: Plan) -> dict[str, str]:
    """Layer -> the device of its first node."""
    found: dict[str, str] = {}
    for stage in plan.stages:
        for node in stage.nodes:
            found.setdefault(plan.node_layers.get(node, ""), stage.devices[0])
    return found


def _inherited(path: str, known: Mapping[str, str]) -> str | None:
    """The device of the module at ``path``, or else of the nearest one around it."""
    while path and path not in known:
        path = path.rpartition(".")[0]
    return known.get(path)


def _number(device: str) -> int | str:
    kind, _, index = device.partition(":")
    return int(index) if kind == "cuda" and index else device
