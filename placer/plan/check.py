"""Does a plan belong to a model?"""

from __future__ import annotations

from placer.capture import Capture
from placer.errors import PlanError
from placer.plan.types import Plan

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
