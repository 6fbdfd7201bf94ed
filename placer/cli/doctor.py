"""``placer doctor``: show this machine's packages and devices, and what is missing."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import typer
from rich.console import Group
from rich.text import Text

from placer.cli.options import AsJson
from placer.cli.output import human_console, print_json
from placer.quantities import format_bytes
from placer.tables import Table
from placer.versions import (
    ALLOCATOR_VARIABLES,
    PYTHON,
    RANGES,
    Range,
    found_release,
    repair_command,
)

EXAMPLE = "placer doctor --json"
_ALLOCATOR_VARIABLES = (*ALLOCATOR_VARIABLES, "PYTORCH_NO_CUDA_MEMORY_CACHING")
_EXTRAS = {
    "examples": ("nilearn", "matplotlib", "scikit-learn"),
    "benchmarks": ("accelerate", "einops", "matplotlib", "monai", "timm", "transformers"),
}
_FEATURES = {
    "planning": "plan, simulate, report",
    "running": "run a placed model in one process",
    "a process per device": "torchrun: a process per device",
}


def doctor(as_json: AsJson = False) -> None:
    """Show packages, devices and what placer can do here. The exit code is 2 if something is missing."""
    from placer.cli.main import EXIT_USAGE

    found = examine()
    if as_json:
        print_json(found)
    else:
        human_console(as_json=False).print(_report(found))
    if not found["ok"]:
        raise typer.Exit(EXIT_USAGE)


def examine() -> dict[str, Any]:
    """What ``placer doctor --json`` prints: this machine's packages and devices, and what works there.

    Raises nothing: problems are a part of the result. Memory is in bytes, and None where torch does not
    report it. Asking a CUDA device for its free memory creates a context on it, as long as the process lives.
    """
    from placer import __version__

    problem = _import_torch()
    packages = [_package(each) for each in (PYTHON, *RANGES)]
    features = [] if problem else _features()
    needed = [f["available"] for f in features if f["feature"] in ("planning", "running")]
    return {
        "placer": __version__,
        "ok": not problem and all(p["release"] for p in packages) and all(needed),
        "platform": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "packages": packages,
        "torch_error": problem or None,
        "torch_build": None if problem else _torch_build(),
        "devices": [_host(), *([] if problem else _accelerators())],
        "allocator": {
            name: os.environ[name] for name in _ALLOCATOR_VARIABLES if name in os.environ
        },
        "backends": {} if problem else _backends(),
        "features": features,
        "missing_extras": {
            extra: missing
            for extra, names in _EXTRAS.items()
            if (missing := [name for name in names if found_release(name) is None])
        },
    }


def _package(tested: Range) -> dict[str, Any]:
    release = found_release(tested.package)
    status = "missing" if release is None else "in range" if release in tested else "outside"
    return {
        "package": tested.package,
        "release": release,
        "status": status,
        "lowest": tested.lowest,
        "highest": tested.highest,
    }


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


def _host() -> dict[str, Any]:
    """The CPU; its free memory includes caches, and is known on Linux only."""
    meminfo = Path("/proc/meminfo")
    text = meminfo.read_text() if meminfo.exists() else ""
    available = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return {
        "name": "cpu",
        "description": platform.processor() or platform.machine(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "free": None if available is None else int(available[1]) * 1024,
    }


def _accelerators() -> list[dict[str, Any]]:
    import torch

    if torch.cuda.is_available():
        return [_cuda_device(index) for index in range(torch.cuda.device_count())]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return []
    return [
        {"name": f"{accelerator.type}:{i}", "description": "", "memory": None, "free": None}
        for i in range(torch.accelerator.device_count())
    ]


def _cuda_device(index: int) -> dict[str, Any]:
    import torch

    free: int | None
    properties = torch.cuda.get_device_properties(index)
    try:
        free, _ = torch.cuda.mem_get_info(index)
    except RuntimeError:  # its memory is full, or it is reserved for another process
        free = None
    return {
        "name": f"cuda:{index}",
        "description": properties.name,
        "memory": properties.total_memory,
        "free": free,
    }


def _backends() -> dict[str, bool]:
    import torch.distributed as dist

    if not dist.is_available():
        return {"gloo": False, "nccl": False}
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}


def _features() -> list[dict[str, Any]]:
    """The features of placer, with the names that each needs and torch lacks."""
    from placer._torch import Feature, missing_names

    missing = {feature: list(missing_names(feature)) for feature in get_args(Feature)}
    return [
        {"feature": feature, "available": not names, "missing": names}
        for feature, names in missing.items()
    ]


def _report(found: Mapping[str, Any]) -> Group:
    packages = Table(
        headers=("package", "installed", "run with", "status"),
        names=("package", "installed", "run with"),
        words=("status",),
        rows=[
            (
                each["package"],
                each["release"] or "not installed",
                f"{each['lowest']} to {each['highest']}",
                each["status"],
            )
            for each in found["packages"]
        ],
    )
    devices = Table(
        headers=("device", "what it is", "memory", "free"),
        names=("device",),
        words=("what it is",),
        rows=[
            (
                each["name"],
                each["description"],
                *(
                    "unknown" if each[k] is None else format_bytes(each[k])
                    for k in ("memory", "free")
                ),
            )
            for each in found["devices"]
        ],
    )
    features = Table(
        headers=("what placer does", "here", "what is missing"),
        words=("what placer does", "here", "what is missing"),
        rows=[
            (
                _FEATURES[each["feature"]],
                "yes" if each["available"] else "no",
                "" if each["available"] else f"{each['missing'][0]}: {repair_command()}",
            )
            for each in found["features"]
        ],
    )
    return Group(packages, "", devices, "", features, "", *map(Text, _remarks(found)))


def _remarks(found: Mapping[str, Any]) -> list[str]:
    lines = [f"platform: {found['platform']}"]
    if found["torch_error"]:
        lines.append(f"torch cannot be imported: {found['torch_error']}")
    else:
        lines.append(f"torch is built for: {found['torch_build']}")
        have = [name for name, there in found["backends"].items() if there]
        lines.append(f"backends of torch.distributed: {', '.join(have) or 'none'}")
    if len(found["devices"]) == 1:
        lines.append(
            "no accelerator: planning needs none; to run a placed model here, pass run_on='cpu'"
        )
    settings = [f"{name}={value}" for name, value in found["allocator"].items()]
    lines.append(f"allocator settings: {', '.join(settings) or 'default'}")
    lines += [
        f"not installed for placer[{extra}]: {', '.join(names)}"
        for extra, names in found["missing_extras"].items()
    ]
    return lines
