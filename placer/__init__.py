"""placer: a declarative model-placement compiler for PyTorch.

A spec says which layers go where, a plan what that comes to, and a compiled model computes what the
plain one does. Each floor is a folder that takes the value of the one before, in this order:

    spec ─► capture ─► cost ─► partition ─► plan ─► emit ─► runtime

`placer.api` has them on one screen. Beside them: `schedule` and `regions` (what partition and emit
share), `simulation` (a dry run, the judge of every byte), `report`, `cli`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from placer.api import auto_spec, compile, make_plan, simulate
    from placer.errors import (
        BudgetError,
        CaptureError,
        DeviceError,
        PeerError,
        PlacerError,
        PlanError,
        SpecError,
        StageError,
    )
    from placer.plan.store import load_plan
    from placer.plan.types import Plan
    from placer.runtime.checkpoint import load, save
    from placer.runtime.module import PlacedModule
    from placer.spec import PlacementSpec, load_spec
    from placer.verification import verify

_HOMES = {
    "BudgetError": "errors",
    "CaptureError": "errors",
    "DeviceError": "errors",
    "PeerError": "errors",
    "PlacedModule": "runtime.module",
    "PlacementSpec": "spec",
    "PlacerError": "errors",
    "Plan": "plan.types",
    "PlanError": "errors",
    "SpecError": "errors",
    "StageError": "errors",
    "auto_spec": "api",
    "compile": "api",
    "load": "runtime.checkpoint",
    "load_plan": "plan.store",
    "load_spec": "spec",
    "make_plan": "api",
    "save": "runtime.checkpoint",
    "simulate": "api",
    "verify": "verification",
}

__all__ = [
    "BudgetError",
    "CaptureError",
    "DeviceError",
    "PeerError",
    "PlacedModule",
    "PlacementSpec",
    "PlacerError",
    "Plan",
    "PlanError",
    "SpecError",
    "StageError",
    "auto_spec",
    "compile",
    "load",
    "load_plan",
    "load_spec",
    "make_plan",
    "save",
    "simulate",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import public names when first used, so that reading a spec does not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'placer' has no attribute {name!r}")
    return getattr(importlib.import_module(f"placer.{_HOMES[name]}"), name)
