"""A GPU that works asynchronously, without a GPU: operations run on the CPU, and its time is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from placer.profiling.clocks import CudaClock

LAUNCH, KERNEL, MARK, PRODUCT = 20e-6, 2e-6, 1e-6, 50e-6
_QUEUE = 1024  # launches that a CUDA device's queue holds


class FakeGpu(TorchDispatchMode):
    """The host launches an operation in ``launch`` seconds; ``kernels`` has those of its kernel, by name."""

    def __init__(self, kernels: Mapping[str, float], launch: float) -> None:
        super().__init__()
        self.kernels, self.launch = kernels, launch
        self.host = self.device = (
            0.0  # the host's time, and that at which the device will have finished
        )
        self._queue: deque[float] = deque()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name == "mm" and "out" in (kwargs or {}):  # the clock's own
            self.submit(PRODUCT, 5e-6)
            return kwargs["out"]
        if name in self.kernels:
            self.submit(self.kernels[name], self.launch)
        return func(*args, **(kwargs or {}))

    def submit(self, seconds: float, launch: float) -> None:
        while self._queue and self._queue[0] <= self.host:
            self._queue.popleft()
        if len(self._queue) >= _QUEUE:
            self.host = self._queue.popleft()
        self.host += launch
        self.device = max(self.device, self.host) + seconds
        self._queue.append(self.device)

    def synchronize(self, device: Any = None) -> None:
        self.host = max(self.host, self.device)
        self._queue.clear()

    def clock(self, monkeypatch: pytest.MonkeyPatch) -> CudaClock:
        """The clock for CUDA devices, on this one."""
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: Any) -> None:
                gpu.submit(0.0, MARK)
                self.time = gpu.device

            def elapsed_time(self, end: Event) -> float:
                return (end.time - self.time) * 1e3

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
        time = SimpleNamespace(perf_counter=lambda: gpu.host)
        monkeypatch.setattr("placer.profiling.clocks.time", time)
        monkeypatch.setattr("placer.profiling.calibration.time", time)
        return CudaClock(torch.device("cpu"))
