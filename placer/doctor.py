"""Finds out which packages and devices this machine has, and what placer can do with them."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from placer.versions import (
    ALLOCATOR_VARIABLES,
    PYTHON,
    RANGES,
    Range,
    found_release,
    repair_command,
)

_ALLOCATOR_VARIABLES = (*ALLOCATOR_VARIABLES, "PYTORCH_NO_CUDA_MEMORY_CACHING")
_EXTRAS = {
    "examples": ("nilearn", "matplotlib", "scikit-learn"),
    "benchmarks": ("accelerate", "einops", "matplotlib", "monai", "timm", "transformers"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """An installed package and the releases that were tested; ``release`` is None if it is not installed."""

    range: Range
    release: str | None

    @property
    def status(self) -> str:
        """``"in range"``, ``"outside"`` or ``"missing"``."""
        if self.release is None:
            return "missing"
        return "in range" if self.release in self.range else "outside"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDevice:
    """A device of this machine; ``memory`` and ``free`` are in bytes, None if torch does not report them."""

    name: str
    description: str
    memory: int | None
    free: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureState:
    """A feature of placer, and the names that it needs but torch lacks (none: it works)."""

    feature: str
    missing: tuple[str, ...]
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The result of `examine`. ``torch_error`` says why torch cannot be imported; "" if it can."""

    platform: str
    packages: tuple[Package, ...]
    torch_error: str
    torch_build: str  # such as "CUDA 13.0"; "" where torch cannot be imported
    devices: tuple[FoundDevice, ...]
    allocator: dict[str, str]  # environment variables that are set, by name
    backends: dict[str, bool]  # of torch.distributed, by name
    features: tuple[FeatureState, ...]
    missing_extras: dict[str, tuple[str, ...]]  # optional packages that are not installed, by extra

    @property
    def ok(self) -> bool:
        """Whether models can be planned, and run in one process, on this machine."""
        needed = ("planning", "running")
        return (
            not self.torch_error
            and all(package.release is not None for package in self.packages)
            and not any(f.missing for f in self.features if f.feature in needed)
        )

    def to_json(self) -> dict[str, Any]:
        """The values that ``placer doctor --json`` prints."""
        return {
            "ok": self.ok,
            "platform": self.platform,
            "packages": [
                {
                    "package": package.range.package,
                    "release": package.release,
                    "status": package.status,
                    "lowest": package.range.lowest,
                    "highest": package.range.highest,
                }
                for package in self.packages
            ],
            "torch_error": self.torch_error or None,
            "torch_build": self.torch_build or None,
            "devices": [
                {"name": d.name, "description": d.description, "memory": d.memory, "free": d.free}
                for d in self.devices
            ],
            "allocator": self.allocator,
            "backends": self.backends,
            "features": [
                {"feature": f.feature, "available": not f.missing, "missing": list(f.missing)}
                for f in self.features
            ],
            "missing_extras": {extra: list(names) for extra, names in self.missing_extras.items()},
        }


def examine() -> Diagnosis:
    """Examine this machine. Raises nothing: problems are a part of the result.

    Asking a CUDA device for its free memory creates a context on it that lasts as long as the process.
    """
    packages = tuple(
        Package(range=each, release=found_release(each.package)) for each in (PYTHON, *RANGES)
    )
    torch_error = _import_torch()
    return Diagnosis(
        platform=f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        packages=packages,
        torch_error=torch_error,
        torch_build="" if torch_error else _torch_build(),
        devices=(_host(), *(() if torch_error else _accelerators())),
        allocator={name: os.environ[name] for name in _ALLOCATOR_VARIABLES if name in os.environ},
        backends={} if torch_error else _backends(),
        features=() if torch_error else _features(),
        missing_extras={
            extra: missing
            for extra, names in _EXTRAS.items()
            if (missing := tuple(name for name in names if found_release(name) is None))
        },
    )


def _import_torch() -> str:
    """Why torch cannot be imported; "" if it can."""
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _torch_build() -> str:
    import torch

    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip else "CPU only"


def _host() -> FoundDevice:
    return FoundDevice(
        name="cpu",
        description=platform.processor() or platform.machine(),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        free=_available_host_memory(),
    )


def _available_host_memory() -> int | None:
    """Bytes of host memory that programs can still allocate, including caches (Linux only)."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


def _accelerators() -> tuple[FoundDevice, ...]:
    import torch

    if torch.cuda.is_available():
        return tuple(_cuda_device(index) for index in range(torch.cuda.device_count()))
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return ()
    return tuple(
        FoundDevice(name=f"{accelerator.type}:{i}", description="", memory=None, free=None)
        for i in range(torch.accelerator.device_count())
    )


def _cuda_device(index: int) -> FoundDevice:
    import torch

    free: int | None
    properties = torch.cuda.get_device_properties(index)
    try:
        free, _ = torch.cuda.mem_get_info(index)
    except RuntimeError:  # its memory is full, or it is reserved for another process
        free = None
    return FoundDevice(
        name=f"cuda:{index}",
        description=properties.name,
        memory=properties.total_memory,
        free=free,
    )


def _backends() -> dict[str, bool]:
    import torch.distributed as dist

    if not dist.is_available():
        return {"gloo": False, "nccl": False}
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}


def _features() -> tuple[FeatureState, ...]:
    from placer._torch import Feature, missing_names

    return tuple(
        FeatureState(
            feature=feature,
            missing=missing_names(feature),
            remedy=repair_command(),
        )
        for feature in get_args(Feature)
    )
