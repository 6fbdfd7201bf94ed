"""Where the examples run: on the GPUs that a spec names, or all on the CPU where there are none."""

from __future__ import annotations

from pathlib import Path

import torch

SPECS = Path(__file__).parent.parent / "specs"


def run_on(num_devices: int) -> str | None:
    """What to pass as ``run_on``: None with enough GPUs, else ``"cpu"`` to simulate the devices."""
    return None if torch.cuda.device_count() >= num_devices else "cpu"
