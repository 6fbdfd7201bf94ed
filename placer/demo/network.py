"""Loads the 3D U-Net of ``examples/unet3d.py``, which is in a checkout but not in an installed package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from torch import nn

from placer.errors import PlacerError

_FILE = Path(__file__).parents[2] / "examples" / "unet3d.py"


def build_unet(**options: Any) -> nn.Module:
    """The network in `examples/unet3d.py`. Raises ``PlacerError`` outside a checkout of placer."""
    if not _FILE.is_file():
        raise PlacerError(
            "placer demo",
            f"needs {_FILE}, which an installed package does not have",
            "clone the repository and run: make demo",
        )
    spec = importlib.util.spec_from_file_location("unet3d", _FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    network: nn.Module = module.unet3d(**options)
    return network
