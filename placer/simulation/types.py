"""The report of a dry run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from placer.plan.types import HostPeak
from placer.quantities import format_bytes
from placer.simulation.over_time import MemoryPoint
from placer.timeline import Block


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSimulation:
    """The memory that one device needs in a dry run, in bytes, and the moment of its peak.

    ``peak``, ``workspaces``, ``reserved``, ``context`` and ``starved`` are as in
    `placer.plan.DevicePeak`; ``predicted`` is the plan's ``peak``. At the moment of the peak, ``phase`` is
    forward, backward, recompute or optimizer; ``node``, ``layer`` and ``operation`` were running ("" outside
    the model's nodes); ``largest`` has the ten largest tensors that were alive.

    ``memory_over_time`` is the curve of the device's tensors in one step, whose maximum is ``peak``.
    """

    device: str
    peak: int
    workspaces: int
    reserved: int | None
    context: int
    starved: int
    predicted: int
    phase: str
    node: str
    layer: str
    operation: str
    largest: tuple[Block, ...]
    memory_over_time: tuple[MemoryPoint, ...] = field(default=(), repr=False)

    def __repr__(self) -> str:
        ran = ", ".join(part for part in (self.phase, self.node) if part)
        peaks = f"peak {format_bytes(self.peak)}, predicted {format_bytes(self.predicted)}"
        return f"<{self.device}: {peaks}, in {ran}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """The peak of every device in a training step; ``step_ok`` says that the step ran to its end.

    ``host`` is the host memory that offloaded activations take; None if there are none.
    """

    devices: tuple[DeviceSimulation, ...]
    host: HostPeak | None = None
    step_ok: bool

    def __repr__(self) -> str:
        lines = [f"SimulationReport({'the step ran' if self.step_ok else 'the step failed'})"]
        return "\n".join([*lines, *(f"  {device!r}" for device in self.devices)])

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values; bytes are integers."""
        shown = [field.name for field in fields(DeviceSimulation)][1:-2]
        return {
            "devices": {
                device.device: {
                    **{name: getattr(device, name) for name in shown},
                    "largest": [
                        {
                            "bytes": block.nbytes,
                            **{name: getattr(block, name) for name in ("kind", "name", "layer")},
                            "shape": list(block.shape),
                        }
                        for block in device.largest
                    ],
                }
                for device in self.devices
            },
            **({} if self.host is None else {"host": asdict(self.host)}),
            "step_ok": self.step_ok,
        }
