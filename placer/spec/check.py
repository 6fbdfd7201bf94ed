"""Checks that fields of a spec agree with each other: names of devices, and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from placer.errors import PlacerError, first_few, nearest
from placer.jsonfile import escape_token
from placer.machine.machine import Machine, find_machine
from placer.quantities import format_count
from placer.spec.fields import MOST, device_name, nearest_device
from placer.spec.rows import shifted_rows

Problem = tuple[str, str, str]
_SHOWN = 8  # devices that a problem lists


def cross_problems(data: Any, wrong: Collection[str]) -> list[Problem]:
    """Contradictions between fields of an unvalidated spec; the fields ``wrong`` have other problems.

    Values of a wrong type are skipped here.
    """
    if not isinstance(data, Mapping):
        return []
    problems: list[Problem] = []
    if data.get("machine") is not None and data.get("devices"):
        remedy = "leave out one of them"
        problems.append(("/machine", "stands for the devices, which are given too", remedy))
    data = with_machine_devices(data)
    names = _names(data.get("devices"))
    # What is listed twice was meant to be another one, which layers may name.
    problems += _twice(data.get("devices"), names) or _unknown_targets(data, names)
    if not {"replicas", "replica_devices"}.intersection(wrong):
        problems += _rows(data, names)
    if not {"shard_state", "shard_over"}.intersection(wrong):
        problems += _undivided(data)
    if data.get("offload_overlap") is True and not data.get("offload"):
        remedy = 'write "offload": "auto" too, or leave it out'
        problems.append(("/offload_overlap", 'has no effect without "offload"', remedy))
    if not {"devices", "space"}.intersection(wrong):
        problems += _shards(data, names) + _stages(data, names)
    if not {"replicas", "stages", "space"}.intersection(wrong):
        problems += _too_many(data)
    if not {"compile", "microbatches", *_UNCOMPILED}.intersection(wrong):
        problems += execution_problems(data)
    return problems


def with_machine_devices(data: Any) -> Any:
    """``data`` with the devices of its ``machine``, if it names one and no devices.

    They are those of a replica's stages if their number is given, otherwise all.
    """
    if not isinstance(data, Mapping) or data.get("devices") or not (machine := _machine(data)):
        return data
    stages, shards = data.get("stages"), _number_of_shards(data)
    count = stages * shards if type(stages) is int and stages > 0 else machine.devices
    device: dict[str, Any] = {"kind": machine.kind}
    if machine.memory is not None:
        device["memory"] = machine.memory
    return {**data, "devices": [{"name": name, **device} for name in machine.names()[:count]]}


def _machine(data: Mapping[str, Any]) -> Machine | None:
    """The machine that ``data`` names; None if it names none, or one that its validator reports."""
    try:
        return find_machine(data["machine"]) if isinstance(data.get("machine"), str) else None
    except PlacerError:
        return None


def _too_many(data: Mapping[str, Any]) -> list[Problem]:
    """A problem if the replicas need more devices than the machine has."""
    machine, replicas, stages = _machine(data), data.get("replicas"), data.get("stages")
    each = (stages if isinstance(stages, int) else 1) * _number_of_shards(data)
    if (
        machine is None
        or not isinstance(replicas, int)
        or not each <= machine.devices < replicas * each
    ):
        return []
    problem = (
        f"{format_count(replicas, 'replica')} of {format_count(each, 'device')} each, and the machine has "
        f"{format_count(machine.devices, 'device')}"
    )
    most = f"write at most {machine.devices // each}, or name a machine of more nodes"
    return [("/replicas", problem, most)]


def _stages(data: Mapping[str, Any], names: Sequence[str | None]) -> list[Problem]:
    """A problem if there are fewer devices than the stages need."""
    stages, shards = data.get("stages"), _number_of_shards(data)
    enough = isinstance(stages, int) and stages * shards <= len(names)
    if enough or not isinstance(stages, int) or not names or len(names) % shards:
        return []
    problem = (
        f"{format_count(stages, 'stage')} of {format_count(shards, 'device')} each, and there "
        f"{'is' if len(names) == 1 else 'are'} {format_count(len(names), 'device')}"
    )
    most = format_count(len(names) // shards, "stage")
    return [("/stages", problem, f"give {stages * shards} devices, or at most {most}")]


def _undivided(data: Mapping[str, Any]) -> list[Problem]:
    """A problem of ``shard_over`` where nothing is divided; with a machine, that may be chosen."""
    undivided = data.get("shard_state", "none") == "none" and "machine" not in data
    if not undivided or data.get("shard_over", "auto") == "auto":
        return []
    problem = 'has no effect, because "shard_state" is "none"'
    return [
        ("/shard_over", problem, 'write "shard_state": "optimizer" or "auto" too, or leave it out')
    ]


def _number_of_shards(data: Mapping[str, Any]) -> int:
    space = data.get("space", 1)
    shards = space.get("shards") if isinstance(space, Mapping) else getattr(space, "shards", space)
    return shards if isinstance(shards, int) and shards > 0 else 1


def _shards(data: Mapping[str, Any], names: Sequence[str | None]) -> list[Problem]:
    """Problems of ``space`` with the number of devices."""
    shards = _number_of_shards(data)
    if len(names) % shards == 0:
        return []
    few, many = len(names) // shards * shards, -(-len(names) // shards) * shards
    wanted = f"{few} or {many}" if few else f"{many}"
    return [
        (
            "/devices",
            f"{format_count(len(names), 'device')} for stages of {shards} devices each",
            f'list {wanted} devices, stage by stage, or change "space"',
        )
    ]


# Fields that "compile" cannot be combined with -> the only value they may have then, and why.
_UNCOMPILED: Mapping[str, tuple[Any, str]] = {
    "space": (1, "shards exchange values in the middle of a stage"),
    "chunks": (1, "compiled code may make the concatenation that chunks avoid"),
    "batch_norm": (
        "per_microbatch",
        "other statistics are taken between the operations of a stage",
    ),
}


def execution_problems(data: Mapping[str, Any]) -> list[Problem]:
    """Problems of ``batch_norm`` and ``compile`` with other fields of a spec."""
    problems = []
    if data.get("batch_norm") == "sync" and data.get("microbatches", 1) != 1:
        problem = "'sync' takes statistics over the whole batch, but micro-batches run one after the other"
        problems = [("/batch_norm", problem, "use \"microbatches\": 1, or 'per_microbatch'")]
    if data.get("compile") is not True:
        return problems
    problems += [
        ("/compile", f'cannot be combined with "{name}": {why}', f'leave out "{name}" or "compile"')
        for name, (only, why) in _UNCOMPILED.items()
        if name in data and data[name] != only and (name != "space" or _is_cut(data))
    ]
    schedule = data.get("schedule")
    if isinstance(schedule, str) and schedule.lower() == "interleavedzerobubble":
        problems.append(
            (
                "/compile",
                'cannot be combined with "schedule": a compiled backward cannot be run in two halves',
                "use 'Interleaved1F1B' or '1F1B', or leave out \"compile\"",
            )
        )
    return problems


def _is_cut(data: Mapping[str, Any]) -> bool:
    space = data["space"]
    shards = space.get("shards") if isinstance(space, Mapping) else getattr(space, "shards", space)
    return bool(shards != 1)


def _names(devices: Any) -> list[str | None]:
    """The device names in order; None for an entry that is not valid."""
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


def _twice(devices: Any, names: list[str | None]) -> list[Problem]:
    known = [None if name is None else _torch_name(name) for name in names]
    first = {name: i for i, name in reversed(list(enumerate(known)))}
    return [
        (
            f"/devices/{i}" + "/name" * isinstance(devices[i], Mapping),
            f"{name!r} is listed twice",
            "remove it, or name another device",
        )
        for i, name in enumerate(names)
        if name is not None and first[known[i]] < i
    ]


def _unknown_targets(data: Mapping[str, Any], names: list[str | None]) -> list[Problem]:
    layers = data.get("layers")
    if not isinstance(layers, Mapping) or not any(names):
        return []
    entries = map(_entry_name, data["devices"])
    meant = [  # also by names that are misspelt
        name or (nearest_device(entry) if isinstance(entry, str) else None)
        for name, entry in zip(names, entries, strict=True)
    ]
    known = list(dict.fromkeys(name for name in names if name))
    problems: list[Problem] = []
    for pattern, target in layers.items():
        name = _name(target)
        if name is not None and name not in meant and all(meant):
            near = nearest(name, known) or known[0]
            problems.append(
                (
                    f"/layers/{escape_token(str(pattern))}",
                    f"{target!r} is not one of the devices ({', '.join(first_few(known, _SHOWN))})",
                    f"did you mean {near!r}?"
                    + f" Or add {target!r} to /devices" * ("machine" not in data),
                )
            )
    return problems


def _rows(data: Mapping[str, Any], names: list[str | None]) -> list[Problem]:
    """Problems with ``replica_devices`` or, if it is not given, with the devices derived instead."""
    rows = data.get("replica_devices") or ()
    replicas = data.get("replicas", 1)
    first = [name for name in names if name]
    if not isinstance(rows, list | tuple) or not first or len(first) < len(names):
        return []
    if not all(isinstance(row, list | tuple) for row in rows):
        return []  # reported by the field's own validator
    counted = isinstance(replicas, int) and not isinstance(replicas, bool)
    if rows:
        wrong = _wrong_count(len(rows), replicas) if counted and replicas > 0 else []
        return wrong + _wrong_rows([_names(row) for row in rows], first)
    return shift_clashes(first, replicas) if counted else []


def _wrong_count(rows: int, replicas: int) -> list[Problem]:
    if replicas == rows + 1:
        return []
    given = (
        f"{format_count(rows, 'row')} for {format_count(replicas, 'replica')}: one row for each "
        "after the first was expected"
    )
    remedy = f"give {format_count(replicas - 1, 'row')}, or set replicas to {rows + 1}"
    return [("/replica_devices", given, remedy)]


def _wrong_rows(rows: list[list[str | None]], first: list[str]) -> list[Problem]:
    """Problems: rows whose length differs from the first replica's, and devices listed twice."""
    problems = [
        (
            f"/replica_devices/{i}",
            f"{format_count(len(row), 'device')} where replica 0 has {len(first)}",
            "give every replica as many devices as /devices lists",
        )
        for i, row in enumerate(rows)
        if len(row) != len(first)
    ]
    seen = set(map(_torch_name, first))
    for i, row in enumerate(rows):
        for j, name in enumerate(row):
            if name is not None and _torch_name(name) in seen:
                problem = f"{name!r} is already a device of this or an earlier replica"
                remedy = "name a different device for every stage of every replica"
                problems.append((f"/replica_devices/{i}/{j}", problem, remedy))
            seen |= {_torch_name(name)} if name else set()
    return problems


def shift_clashes(first: Sequence[str], replicas: int) -> list[Problem]:
    """A problem if two replicas would share a device when ``first`` is shifted for each replica."""
    if replicas > MOST or len(set(first)) < len(first):
        return []  # reported elsewhere
    owners = Counter(name for row in shifted_rows(first, replicas) for name in row)
    clash = min((name for name, count in owners.items() if count > 1), default=None)
    if clash is None:
        return []
    problem = f"{clash!r} would be in two replicas when {list(first)} is shifted"
    remedy = "give /replica_devices: one row of devices for each further replica"
    return [("/replicas", problem, remedy)]


def _torch_name(name: str) -> str:
    """One name per device: ``cpu`` is ``cpu:0``."""
    return name if ":" in name else f"{name}:0"
