"""Find out that a value is read by a check of `torch.distributions`, which has no effect but an exception."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import Tensor

from placer.program.recording.watch import runs_library
from placer.program.targets import RequireValid


def running_check() -> tuple[RequireValid, Tensor] | None:
    """The check that is reading a value in this thread, and the tensor that it checks; None if there is none.

    ``Normal(mean, deviation)`` and ``normal.log_prob(x)`` make such checks, unless ``validate_args=False``.
    """
    frame: FrameType | None = sys._getframe(1)
    # Other code in between, such as a constraint of the user's own, may do something else with the value.
    while frame is not None and runs_library(frame):
        if frame.f_globals["__name__"] == "torch.distributions.distribution":
            found = _check_in(frame.f_code.co_name, frame.f_locals)
            if found is not None:
                return found
        frame = frame.f_back
    return None


def _check_in(function: str, values: dict[str, Any]) -> tuple[RequireValid, Tensor] | None:
    if function == "__init__" and {"param", "constraint", "value", "valid"} <= values.keys():
        place = f"parameter {values['param']}"
        rule = f"of {_kind(values['self'])} to satisfy the constraint {_kind(values['constraint'])}"
    elif function == "_validate_sample" and {"support", "valid"} <= values.keys():
        place = "value argument"
        rule = f"to be within the support {_kind(values['support'])} of {_kind(values['self'])}"
    else:
        return None
    return RequireValid(place, rule), values["value"]


def _kind(value: object) -> str:
    return type(value).__name__.removeprefix("_")
