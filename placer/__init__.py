"""placer: a declarative model-placement compiler for PyTorch.

A spec says which layers go where, a plan what that comes to, and a compiled model computes what the
plain one does. Each floor is a folder that takes the value of the one before, in this order:

    spec ─► program ─► cost ─► planner ─► plan ─► emit ─► executor

`placer.api` has them on one screen. Beside them: `partition` (the planner's search), `schedule` and
`regions` (what the planner and `emit` share), `simulation` (a dry run, the judge of every byte), which
writes a `timeline`, `report`, `cli`. ARCHITECTURE.md says more.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers, what `_NAMES` says
    from placer.api import auto_plan as auto_plan
    from placer.api import auto_spec as auto_spec
    from placer.api import compile as compile
    from placer.api import largest as largest
    from placer.api import make_plan as make_plan
    from placer.api import simulate as simulate
    from placer.checkpoint import load as load
    from placer.checkpoint import save as save
    from placer.errors import BudgetError as BudgetError
    from placer.errors import CaptureError as CaptureError
    from placer.errors import CheckpointError as CheckpointError
    from placer.errors import DeviceError as DeviceError
    from placer.errors import PeerError as PeerError
    from placer.errors import PlacerError as PlacerError
    from placer.errors import PlanError as PlanError
    from placer.errors import SpecError as SpecError
    from placer.errors import StageError as StageError
    from placer.errors import VersionError as VersionError
    from placer.executor.module import PlacedModule as PlacedModule
    from placer.plan.device_map import to_device_map as to_device_map
    from placer.plan.store import load_plan as load_plan
    from placer.plan.types import Plan as Plan
    from placer.profiling import calibrate as calibrate
    from placer.profiling import profile as profile
    from placer.program.rows.marks import Batched as Batched
    from placer.program.rows.marks import Box as Box
    from placer.program.rows.marks import Whole as Whole
    from placer.spec import PlacementSpec as PlacementSpec
    from placer.spec import load_spec as load_spec
    from placer.spec.device_map import from_device_map as from_device_map
    from placer.verification import verify as verify

__version__ = "0.2.0"

_NAMES = {
    "api": ("auto_plan", "auto_spec", "compile", "largest", "make_plan", "simulate"),
    "errors": (
        *("BudgetError", "CaptureError", "CheckpointError", "DeviceError", "PeerError"),
        *("PlacerError", "PlanError", "SpecError", "StageError", "VersionError"),
    ),
    "plan.store": ("load_plan",),
    "plan.types": ("Plan",),
    "profiling": ("calibrate", "profile"),
    "checkpoint": ("load", "save"),
    "executor.module": ("PlacedModule",),
    "program.rows.marks": ("Batched", "Box", "Whole"),
    "spec": ("PlacementSpec", "load_spec"),
    "spec.device_map": ("from_device_map",),
    "plan.device_map": ("to_device_map",),
    "verification": ("verify",),
}
_HOME_OF = {name: home for home, names in _NAMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __dir__() -> list[str]:
    """The public names, also those that have not been imported yet."""
    return __all__


def __getattr__(name: str) -> Any:
    """Import public names when first used, so that reading a spec does not import torch.

    Raises ``VersionError`` where the installed torch is too old to import them.
    """
    if name not in _HOME_OF:
        raise AttributeError(f"module 'placer' has no attribute {name!r}")
    from placer.versions import explain_failed_import

    with explain_failed_import():
        found = getattr(importlib.import_module(f"placer.{_HOME_OF[name]}"), name)
    for home, shown in (("plan.types", "Plan"), ("spec", "PlacementSpec")):
        if module := sys.modules.get(f"placer.{home}"):
            getattr(module, shown)._repr_html_ = _repr_html_
    return found


def _repr_html_(shown: Any) -> str:
    """How notebooks show a plan or a spec. They know nothing of reports, which are floors above them."""
    from placer.report import plan_frame, spec_table

    return plan_frame(shown) if hasattr(shown, "fits") else spec_table(shown)
