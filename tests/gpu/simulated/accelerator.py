"""A simulated accelerator as torch's device type ``simulated``, which placer takes for CUDA devices.

`accelerator.cpp` is the device: memory, streams, events and operations. Here it is built, torch learns of
it, and what placer asks of ``torch.cuda`` is answered by it.
"""

from __future__ import annotations

import shutil
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils import cpp_extension

from placer.executor.places import device_map, side_stream
from placer.executor.stages import offload

HERE = Path(__file__).parent
TYPE = "simulated"


def missing() -> str | None:
    """What the build needs and this machine lacks, or None."""
    if shutil.which(cpp_extension.get_cxx_compiler()) is None:
        return "needs a C++ compiler"
    return None if cpp_extension.is_ninja_available() else "needs ninja (pip install ninja)"


@cache
def load() -> Any:
    """The built extension, which torch knows as ``torch.device("simulated", 0)`` to 3 from then on.

    Built once for each release of torch, in about a minute.
    """
    folder = HERE / "build" / torch.__version__
    folder.mkdir(parents=True, exist_ok=True)
    extension = cpp_extension.load(
        "simulated_accelerator",
        [str(HERE / "accelerator.cpp")],
        extra_cflags=["-O0", "-w"],
        build_directory=str(folder),
        with_cuda=False,
    )
    torch.utils.rename_privateuse1_backend(TYPE)
    torch._register_device_module(TYPE, _torch_module(extension))
    torch.utils.generate_methods_for_privateuse1_backend()
    return extension


def device(index: int) -> torch.device:
    return torch.device(TYPE, index)


def new_stream(of: torch.device) -> torch.Stream:
    return torch.Stream(of)


def current_stream(of: torch.device | None = None) -> torch.Stream:
    return torch.accelerator.current_stream(device(load().current_device()) if of is None else of)


@contextmanager
def on_device(index: int) -> Iterator[None]:
    """In this block, the device is torch's current one."""
    before = load().current_device()
    load().set_device(index)
    try:
        yield
    finally:
        load().set_device(before)


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """As ``torch.cuda.stream``: in this block, the stream and its device are torch's current ones."""
    index = stream.device.index
    with on_device(index):
        before = current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            load().set_device(index)


@contextmanager
def taken_for_cuda() -> Iterator[None]:
    """In this block, placer runs ``cuda:N`` of a plan on ``simulated:N``."""
    load()
    with ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "Stream", new_stream),
            (torch.cuda, "current_stream", current_stream),
            (torch.cuda, "stream", on_stream),
            (torch.Tensor, "is_cuda", property(lambda tensor: tensor.device.type == TYPE)),
            (device_map, "_resolve", _resolve),
            (offload, "side_stream", _side_stream),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _resolve(name: str) -> torch.device:
    kind, _, index = name.partition(":")
    return torch.device("cpu") if kind == "cpu" else device(int(index or 0))


@cache
def _side_stream(of: torch.device) -> side_stream.SideStream:
    return side_stream._CudaStream(of) if of.type == TYPE else side_stream._SynchronousCopies()


def _torch_module(extension: Any) -> types.ModuleType:
    """What torch asks of ``torch.simulated``."""
    module: Any = types.ModuleType(f"torch.{TYPE}")
    module.device_count = lambda: extension.device_count
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.current_device = extension.current_device
    module.set_device = lambda of: extension.set_device(torch.device(TYPE, of).index)
    module.device = lambda of: on_device(torch.device(of).index)
    module.current_stream = current_stream
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16, torch.float32]
    # Random numbers come from the CPU's generator: the devices have no state of their own.
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda of=None: torch.empty(0, dtype=torch.uint8)
    module.set_rng_state = lambda state, of=None: None
    return module
