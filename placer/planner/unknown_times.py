"""Takes the times out of a plan for devices of unknown kind, which was made by reference rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from placer.errors import some_names
from placer.machine.catalogue import kinds_with_memory
from placer.machine.devices import is_kind_known
from placer.partition import DeviceSlot
from placer.plan.types import Optimality, Plan
from placer.quantities import format_bytes
from placer.spec import PlacementSpec

_NEAREST = 3  # kinds that are named


def unknown_kinds(spec: PlacementSpec) -> list[str]:
    """The devices of ``spec`` whose kind, and so how fast they are, is not known."""
    return [d.name for d in spec.devices if not is_kind_known(d.name, d.kind)]


def ask_for_kind(spec: PlacementSpec, slots: Sequence[DeviceSlot]) -> str:
    """A remedy: give the kind of the devices in `unknown_kinds`; names those with about their memory."""
    budgets = [slot.budget for slot in slots if slot.name in unknown_kinds(spec) and slot.budget]
    known = kinds_with_memory()
    near = ""
    if budgets:
        found = sorted(known, key=lambda kind: abs((kind.memory or 0) - budgets[0]))[:_NEAREST]
        names = ", ".join(f"{kind.name} ({format_bytes(kind.memory or 0)})" for kind in found)
        near = f"; nearest by memory: {names}"
    return f'give --kind, or "kind" in the spec{near}'


def without_times(plan: Plan, spec: PlacementSpec, slots: Sequence[DeviceSlot]) -> Plan:
    """``plan`` with None for all seconds, and a note that asks for the kind.

    What its stages were chosen by is a share of this plan's value instead. ``slots`` are the devices.
    """
    names = some_names(unknown_kinds(spec))
    note = (
        f"Times are not known, because the kind of {names} is not; what depends on time was chosen by "
        f"reference rates. To know them, {ask_for_kind(spec, slots)}."
    )
    plan = replace(
        plan,
        step_seconds=None,
        optimizer_seconds=None,
        stages=tuple(
            replace(
                stage,
                forward_seconds=None,
                backward_seconds=None,
                forward_launch_seconds=None,
                backward_launch_seconds=None,
                host_copy_seconds=None,
                sum_seconds=None,
            )
            for stage in plan.stages
        ),
        transfers=tuple(replace(transfer, seconds=None) for transfer in plan.transfers),
        extra_seconds=None,
        notes=(*plan.notes, note),
    )
    how = plan.optimality
    if how is None or "seconds" not in how.criterion:
        return plan
    whole = how.value or 1.0
    words = how.criterion.replace("seconds", "time")
    return replace(
        plan,
        optimality=Optimality(
            criterion=f"{words} by reference rates, share of this plan's",
            value=how.value / whole,
            lower_bound=how.lower_bound / whole,
        ),
        boundaries=tuple(
            replace(
                b,
                load_before=b.load_before / whole,
                load_after=b.load_after / whole,
                next_value=None if b.next_value is None else b.next_value / whole,
            )
            for b in plan.boundaries
        ),
    )
