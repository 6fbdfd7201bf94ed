"""What single fields cannot say: names that must agree across a spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from placer.errors import nearest
from placer.spec.fields import device_name
from placer.spec.rows import shifted_rows

Problem = tuple[str, str, str]


def cross_problems(data: Any) -> list[Problem]:
    """Problems between fields of a raw spec; ill-typed fields are left to their own validators."""
    if not isinstance(data, Mapping):
        return []
    names = _names(data.get("devices"))
    problems = _twice(names, "/devices", "a device holds one list entry")
    problems += _unknown_targets(data.get("layers"), names)
    return problems + _rows(data, names)


def _names(devices: Any) -> list[str | None]:
    """The device names in order; None for an entry that its own validator will refuse."""
    if not isinstance(devices, list | tuple):
        return []
    return [_name(_entry_name(entry)) for entry in devices]


def _entry_name(entry: Any) -> Any:
    return entry.get("name") if isinstance(entry, Mapping) else getattr(entry, "name", entry)


def _name(value: Any) -> str | None:
    try:
        return device_name(value)
    except ValueError:
        return None


def _twice(names: list[str | None], where: str, rule: str) -> list[Problem]:
    return [
        (f"{where}/{i}", f"{name!r} is listed twice ({rule})", "remove it, or name another device")
        for i, name in enumerate(names)
        if name is not None and name in names[:i]
    ]


def _unknown_targets(layers: Any, names: list[str | None]) -> list[Problem]:
    if not isinstance(layers, Mapping) or not any(names):
        return []
    known = list(dict.fromkeys(name for name in names if name))
    problems = []
    for pattern, target in layers.items():
        name = _name(target)
        if name is not None and name not in known:
            near = nearest(name, known) or known[0]
            problems.append(
                (
                    f"/layers/{escape(str(pattern))}",
                    f"{target!r} is not one of the devices ({', '.join(known)})",
                    f"did you mean {near!r}? Or add {target!r} to /devices",
                )
            )
    return problems


def _rows(data: Mapping[str, Any], names: list[str | None]) -> list[Problem]:
    rows = data.get("replica_devices") or ()
    replicas = data.get("replicas", 1)
    counted = isinstance(replicas, int) and not isinstance(replicas, bool)
    if not isinstance(rows, list | tuple) or not names or not all(names):
        return []
    given = [_names(row) for row in rows]
    problems: list[Problem] = []
    if rows and counted and replicas != len(rows) + 1:
        problems.append(
            (
                "/replica_devices",
                f"{len(rows)} row(s) for {replicas} replica(s): one row for each after the first "
                "was expected",
                f"give {max(replicas - 1, 0)} row(s), or set replicas to {len(rows) + 1}",
            )
        )
    for i, row in enumerate(given):
        if len(row) != len(names):
            problems.append(
                (
                    f"/replica_devices/{i}",
                    f"{len(row)} device(s) where replica 0 has {len(names)}",
                    "give every replica as many devices as /devices lists",
                )
            )
    first = [name for name in names if name]
    if not rows and counted and replicas > 1:
        flat = [name for row in shifted_rows(first, replicas) for name in row]
        clash = sorted({name for name in flat if flat.count(name) > 1})
        if clash and len(set(first)) == len(first):
            problems.append(
                (
                    "/replicas",
                    f"{clash[0]!r} would serve two replicas when {first} is shifted",
                    "give /replica_devices: one row of devices for each further replica",
                )
            )
    seen = list(first)
    for i, row in enumerate(given):
        for j, name in enumerate(row):
            if name is not None and name in seen:
                problems.append(
                    (
                        f"/replica_devices/{i}/{j}",
                        f"{name!r} already serves another place",
                        "name a device of its own for every place of every replica",
                    )
                )
            seen += [name] if name else []
    return problems


def escape(part: str) -> str:
    """``part`` as a reference token of a JSON pointer (RFC 6901)."""
    return part.replace("~", "~0").replace("/", "~1")
