"""What is different between two plans, or between two specs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from placer.errors import first_few
from placer.jsonfile import escape_token
from placer.plan.device_map import layers_of
from placer.plan.summary import describe_step
from placer.plan.types import DevicePeak, Plan
from placer.quantities import format_bytes
from placer.spec import PlacementSpec
from placer.spec.device_map import shortest

# Fields of a plan that are shown as they are
_FACTS = (
    "fits", "objective", "processes", "batch", "replicas", "shards", "microbatches", "schedule", "precision",
    "batch_norm", "optimizer", "training", "compile", "strategy", "shard_state", "shard_over",
    "node_layout",
)  # fmt: skip
_SHOWN = 6  # layers that a change names
_NONE = "—"


class Change(NamedTuple):
    """Something that is not the same in two plans or specs, as texts; "—" is nothing."""

    what: str
    before: str
    after: str


def differences(before: PlacementSpec | Plan, after: PlacementSpec | Plan) -> list[Change]:
    """What is different between two specs, or two plans: strategy, seconds, bytes, and layers that moved.

    Of plans, names of nodes, notes and reasons are not compared, nor are replicas after the first. Raises
    ``TypeError`` for one of each.
    """
    if isinstance(before, Plan) and isinstance(after, Plan):
        found = _of_plans(before, after)
    elif isinstance(before, PlacementSpec) and isinstance(after, PlacementSpec):
        found = _of_specs(before, after)
    else:
        raise TypeError("a spec and a plan cannot be compared")
    return [change for change in found if change.before != change.after]


def _of_plans(before: Plan, after: Plan) -> Iterator[Change]:
    if before.rewrites == after.rewrites:  # which change the fingerprint of the same model
        yield Change("model", before.fingerprint[:12], after.fingerprint[:12])
    if before.origin and after.origin:  # which say the kinds
        kinds = (", ".join(origin.kinds) for origin in (before.origin, after.origin))
        yield Change("kinds of devices", *map(_text, kinds))
    for name in _FACTS:
        values = getattr(before, name), getattr(after, name)
        yield Change(name, *map(_text, values))
    one, other = _settings(before), _settings(after)
    for name in dict.fromkeys((*one, *other)):
        yield Change(name, one.get(name, _NONE), other.get(name, _NONE))
    losses = [_NONE if plan.loss is None else plan.loss.function for plan in (before, after)]
    yield Change("loss", *losses)
    step = describe_step(after) + _share(before.step_seconds, after.step_seconds)
    yield Change("step", describe_step(before), step)
    yield Change("stages", str(len(before.stages)), str(len(after.stages)))
    sent = [sum(transfer.nbytes for transfer in plan.sent) for plan in (before, after)]
    yield _bytes("sent per micro-batch", *sent)
    shown = _first_replica(before) | _first_replica(after)
    yield from _devices(_devices_named(before, shown), _devices_named(after, shown))
    yield from _moved(layers_of(before), layers_of(after))
    for field, verb in (("checkpoint", "recomputed"), ("offload", "offloaded")):
        names, others = getattr(before, field), getattr(after, field)
        yield Change(verb, _without(names, others), _without(others, names))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _NONE if value in (None, "") else str(value)


def _first_replica(plan: Plan) -> set[str]:
    """The names of the devices of the first replica; those of the others have the same bytes."""
    return {name for stage in plan.stages for name in plan.devices_of(stage, 0)}


def _devices_named(plan: Plan, names: set[str]) -> dict[str, DevicePeak]:
    """The devices of ``plan``, of any replica, that are among ``names``."""
    return {device.device: device for device in plan.devices if device.device in names}


def _devices(before: Mapping[str, DevicePeak], after: Mapping[str, DevicePeak]) -> Iterator[Change]:
    for name in dict.fromkeys((*before, *after)):
        one, other = before.get(name), after.get(name)
        yield _bytes(
            f"{name} needs",
            None if one is None else one.needed,
            None if other is None else other.needed,
        )
        if one is not None and other is not None:
            yield _bytes(f"tensors on {name}", one.peak, other.peak)
            yield _bytes(f"{name} has", one.budget, other.budget)


def _bytes(what: str, before: int | None, after: int | None) -> Change:
    texts = [_NONE if nbytes is None else format_bytes(nbytes) for nbytes in (before, after)]
    return Change(what, texts[0], texts[1] + _share(before, after))


def _share(before: float | None, after: float | None) -> str:
    """`` (+12 %)`` or `` (20 times)``; "" if it rounds to 0 %, and where there is nothing to compare with."""
    if not before or after is None:
        return ""
    if after >= 10 * before:
        return f" ({after / before:,.0f} times)"
    percent = round(100 * (after / before - 1))
    return f" ({percent:+d} %)" if percent else ""


def _moved(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Change]:
    """The layers that are on other devices, the outermost ones of which all parts moved alike."""
    paths = dict.fromkeys((*before, *after))
    both = {path: f"{before.get(path, _NONE)}\n{after.get(path, _NONE)}" for path in paths if path}
    for path, devices in shortest(both).items() if both else ():
        yield Change(path or "all layers", *devices.split("\n"))


def _settings(plan: Plan) -> dict[str, str]:
    """The settings of cuts in space and of convolutions in chunks, as JSON."""
    return {
        f"{rewrite.name}: {name}": json.dumps(value)
        for rewrite in plan.rewrites
        for name, value in rewrite.settings.items()
        if name != "shards"
    }


def _without(names: Sequence[str], others: Sequence[str]) -> str:
    only = [name for name in names if name not in set(others)]
    return ", ".join(first_few(only, _SHOWN)) or _NONE


def _of_specs(before: PlacementSpec, after: PlacementSpec) -> Iterator[Change]:
    dumps = [spec.model_dump(mode="json", by_alias=True) for spec in (before, after)]
    one, other = (_flat({k: v for k, v in dump.items() if v is not None}) for dump in dumps)
    for pointer in dict.fromkeys((*one, *other)):
        yield Change(pointer, one.get(pointer, _NONE), other.get(pointer, _NONE))
    both = set(before.layers) & set(after.layers)
    orders = [", ".join(p for p in spec.layers if p in both) for spec in (before, after)]
    yield Change("order of /layers, of which the last wins", *orders)


def _flat(value: Any, pointer: str = "") -> dict[str, str]:
    """JSON pointer -> value, of everything inside ``value`` that has no parts."""
    if not isinstance(value, dict | list):
        return {pointer: _text(value)}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found: dict[str, str] = {}
    for key, inner in items:
        found |= _flat(inner, f"{pointer}/{escape_token(str(key))}")
    return found
