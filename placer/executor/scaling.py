"""The scale of a gradient scaler, as a number."""

from __future__ import annotations

import torch


def scale_of(scaler: torch.amp.GradScaler, device: torch.device) -> float:
    """By what ``scaler`` scales a loss on ``device`` now."""
    return float(scaler.scale(torch.ones((), device=device)).item())
