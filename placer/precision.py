"""The autocast context for a spec's precision, used both when costs are estimated and when a model runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_state(device_type: str) -> tuple[str, ...]:
    """The data types of the current autocast, on the CPU and on devices of this type."""
    kinds = dict.fromkeys(("cpu", device_type))
    return tuple(
        f"{kind} {torch.get_autocast_dtype(kind)}"
        for kind in kinds
        if torch.is_autocast_enabled(kind)
    )


def precision_context(precision: str, device_type: str) -> AbstractContextManager[Any]:
    """Autocast on devices of this type for ``"bf16"`` and ``"fp16"``, no context for ``"fp32"``."""
    if precision == "fp32":
        return nullcontext()
    # Cached casts of weights would pile up over the stage; only a backward has a use for them.
    # (A cached cast also requires grad, and then torch multiplies by other kernels.)
    kept = torch.is_grad_enabled()
    return torch.autocast(device_type, _AUTOCAST[precision], cache_enabled=kept)
