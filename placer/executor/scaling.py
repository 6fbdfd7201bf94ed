"""Reads the scale of a ``GradScaler`` as a number."""

from __future__ import annotations

import torch


def scale_of(scaler: torch.amp.GradScaler, device: torch.device) -> float:
    """The factor by which ``scaler`` multiplies a loss on ``device`` at present."""
    return float(scaler.scale(torch.ones((), device=device)).item())
