"""Does a plan belong to a model, and does it fit?"""

from __future__ import annotations

from placer.capture import Capture
from placer.errors import BudgetError, PlanError
from placer.plan.types import DevicePeak, Plan
from placer.units import format_bytes

_SHOWN = 5


def check_fingerprint(plan: Plan, capture: Capture) -> None:
    """Raise ``PlanError`` with a diff of the nodes when ``plan`` was made for another model."""
    if plan.fingerprint == capture.fingerprint:
        return
    gone = [name for name in plan.node_layers if name not in capture.layer_of]
    new = [name for name in capture.order if name not in plan.node_layers]
    lines = [
        *(f"- {name} ({plan.node_layers[name] or 'the model'})" for name in gone[:_SHOWN]),
        *(f"+ {name} ({capture.layer_of[name] or 'the model'})" for name in new[:_SHOWN]),
    ]
    hidden = max(0, len(gone) - _SHOWN) + max(0, len(new) - _SHOWN)
    lines += [f"… and {hidden} more"] if hidden else []
    diff = "\n    ".join(lines) or "the same nodes, with other shapes, dtypes or arguments"
    raise PlanError(
        "plan",
        f"it was made for another model (or other inputs):\n    {diff}",
        "plan again with this model: placer.make_plan(model, spec, args)",
    )


def require_fit(plan: Plan) -> None:
    """Raise ``BudgetError`` naming the device that overflows the most, if any does."""
    if plan.overflow_bytes == 0:
        return
    raise BudgetError(
        f"device {plan.tightest.device}",
        f"the plan needs {describe_overflow(plan.tightest)}",
        "plan again with its spec: what would fit is tried then",
        device=plan.tightest.device,
        missing_bytes=plan.overflow_bytes,
    )


def describe_overflow(device: DevicePeak) -> str:
    """What ``device`` would have to hold, and how much more than its budget that is."""
    missing = -(device.headroom or 0)
    return (
        f"{format_bytes(device.peak)} and a reserve of {format_bytes(device.reserve)}, "
        f"{format_bytes(missing)} more than its {format_bytes(device.budget or 0)}"
    )
