"""What is installed on this machine and what is missing, for ``placer doctor``."""

from __future__ import annotations

import os
import platform
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from placer import __version__
from placer.quantities import format_bytes
from placer.versions import (
    ALLOCATOR_VARIABLES,
    PYTHON,
    RANGES,
    Range,
    found_release,
    repair_command,
)


def examine() -> dict[str, Any]:
    """What ``placer doctor --json`` prints: this machine's packages and devices, and what works there.

    Raises nothing: problems are a part of the result. Memory is in bytes, and None where torch does not
    report it. Asking a CUDA device for its free memory creates a context on it, as long as the process lives.
    """
    problem = _import_torch()
    packages = [_package(each) for each in (PYTHON, *RANGES)]
    lacking = [] if problem else _missing_names()
    variables = (*ALLOCATOR_VARIABLES, "PYTORCH_NO_CUDA_MEMORY_CACHING")
    return {
        "placer": __version__,
        "ok": not problem and all(p["release"] for p in packages) and not lacking,
        "platform": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "packages": packages,
        "torch_error": problem or None,
        "torch_build": None if problem else _torch_build(),
        "devices": [_host(), *([] if problem else _accelerators())],
        "allocator": {name: os.environ[name] for name in variables if name in os.environ},
        "backends": {} if problem else _backends(),
        "torch_lacks": lacking,
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


def _missing_names() -> list[str]:
    from placer._torch import missing_names

    return missing_names()


def report(found: Mapping[str, Any]) -> str:
    """What `examine` has found, as lines of text."""
    return "".join(f"{line}\n" for line in _lines(found))


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"placer {found['placer']} on {found['platform']}"
    for each in found["packages"]:
        run_with = f"(run with {each['lowest']} to {each['highest']})"
        yield f"{each['package']:12}  {each['release'] or '-':12}  {each['status']:9}  {run_with}"
    missing = [each for each in RANGES if found_release(each.package) is None]
    if missing:
        names = shlex.join(each.requirement for each in missing)
        yield f"placer cannot run without what is missing:\n  python -m pip install {names}"
    if found["torch_error"]:
        yield f"torch cannot be imported: {found['torch_error']}"
        return
    backends = ", ".join(name for name, there in found["backends"].items() if there) or "none"
    yield f"torch is built for {found['torch_build']}; backends of torch.distributed: {backends}"
    for device in found["devices"]:
        memory, free = (
            "unknown" if device[key] is None else format_bytes(device[key])
            for key in ("memory", "free")
        )
        yield f"{device['name']}  {device['description']}  memory {memory}, free {free}"
    if len(found["devices"]) == 1:
        yield "no accelerator: planning needs none; to run a placed model here, pass run_on='cpu'"
    settings = [f"{name}={value}" for name, value in found["allocator"].items()]
    yield f"allocator settings: {', '.join(settings) or 'default'}"
    if lacking := found["torch_lacks"]:
        yield f"placer cannot run: torch has no {', '.join(lacking)}\n  {repair_command()}"
