"""Explain in words why the stages of a plan end where they do."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from placer.quantities import format_bytes, format_seconds

if TYPE_CHECKING:
    from placer.plan.types import Boundary, Optimality, Plan


_NEAR = 0.25  # a lower bound that is further off says little


def explain_plan(plan: Plan) -> str:
    """The criterion that was minimised, how far it may be from the least, and the reasons for each boundary.

    Of stages that are split in space, what their shards exchange, and what cannot be split.
    Per boundary: the loads on both sides, the bytes that cross it per micro-batch in forward, and the
    value of the criterion if the boundary were at the next best place and all others free to move.
    """
    optimality = plan.optimality
    lines = [describe_optimality(optimality)]
    if "peak" in optimality.criterion:
        lines.append(
            "(The search compares estimates; whether the plan fits is a dry run's verdict.)"
        )
    if plan.extra_seconds:
        extra = format_seconds(plan.extra_seconds)
        lines.append(f"extra seconds of a micro-batch, recomputing and offloading: {extra}")
    if not plan.boundaries:
        lines.append("There is one stage, and no boundary.")
    if plan.shards > 1:
        sent = format_bytes(sum(stage.exchanged_nbytes for stage in plan.stages))
        lines.append(
            f"Each of the {plan.shards} shards of a stage has a part of every value, and sends {sent} to the "
            "others per micro-batch, forward and backward."
        )
        lines += [note for note in plan.notes if note.startswith("Gathered")]
    for boundary in plan.boundaries:
        lines += _boundary(plan, boundary, optimality.criterion, optimality.value)
    return "\n".join(lines)


def describe_optimality(optimality: Optimality) -> str:
    """What was minimised, its value, and how far that may be from the least."""
    value = in_unit(optimality.value, optimality.criterion)
    near = ""
    if optimality.above <= _NEAR:
        above = math.ceil(100 * optimality.above - 1e-6)
        near = (
            f" (at most {above} % above a lower bound)" if above else "; no other stages take less"
        )
    return f"{optimality.criterion}: {value}{near}"


def _boundary(plan: Plan, boundary: Boundary, criterion: str, value: float) -> list[str]:
    left, right = boundary.index, boundary.index + 1
    devices = [stage.devices[0] for stage in plan.stages]
    whole = ""
    if has_several_stages(plan) and ("peak" in criterion or "slowest" in criterion):
        whole = f" (all stages of {devices[left]} | {devices[right]})"
    lines = [
        "",
        f"stage {left} | stage {right}: between {place_of(plan, boundary.last)} and "
        f"{place_of(plan, boundary.first)}",
        f"  load {in_unit(boundary.load_before, criterion)} | {in_unit(boundary.load_after, criterion)}"
        f"{whole}, {format_bytes(boundary.nbytes)} cross per micro-batch forward",
    ]
    if boundary.next_best is None or boundary.next_value is None:
        return [*lines, f"  {why_no_other(plan)}"]
    change = describe_change(boundary.next_value, value)
    next_value = in_unit(boundary.next_value, criterion)
    place = place_of(plan, boundary.next_best)
    return [*lines, f"  next best: after {place}, {next_value} ({change})"]


def has_several_stages(plan: Plan) -> bool:
    """Whether a device has several stages."""
    return plan.grid.devices < len(plan.stages)


def why_no_other(plan: Plan) -> str:
    """Why no other place is known for a boundary."""
    if has_several_stages(plan):
        return "no other place was looked for, because a device has several stages"
    return (
        "the layers of the spec, the memory of the devices or the number of stages leave no other "
        "place for it"
    )


def describe_change(next_value: float, value: float) -> str:
    """How much worse the next best value is.

    >>> describe_change(1.012, 1.0), describe_change(1.0001, 1.0)
    ('+1.2%', 'as good')
    """
    more = next_value / value - 1 if value else 0.0
    return "as good" if abs(more) < 5e-4 else f"{more:+.1%}"


def place_of(plan: Plan, node: str) -> str:
    """A node, with its layer."""
    layer = plan.node_layers.get(node, "")
    return f"{node} ({layer})" if layer else node


def in_unit(value: float, criterion: str) -> str:
    """A load, or a value of the criterion, with its unit."""
    if "seconds" in criterion:
        return format_seconds(value)
    return f"{value:.1%}" if "share" in criterion else format_bytes(value)
