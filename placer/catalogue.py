"""The device catalogue: speed, memory and context per kind of device.

Speeds are the vendors' datasheet peaks (dense, without sparsity) times the share that kernels
reach; they rank placements, they do not promise times. Nothing here was measured by us but the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from placer.units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """One kind of device: memory in bytes, speeds in FLOP/s and bytes/s."""

    name: str
    memory: int | None
    fp32_flops: float
    half_flops: float
    memory_bandwidth: float
    link_bandwidth: float  # to another device of the machine
    host_bandwidth: float  # to pinned memory of the host
    context: int  # bytes that a process takes of the device before it makes a tensor

    def reserve(self, memory: int) -> int:
        """Bytes of ``memory`` that plans leave free by default, for what no prediction knows."""
        return 0 if self.memory is None else int(_SURPRISES * memory)


_GIB = parse_bytes("1GiB")
_SURPRISES = 0.02  # of a GPU's memory; on an H100 no prediction of what fits was off by more
_CONTEXT = parse_bytes("520MiB")  # of an H100, driver 580 and CUDA 13; assumed of all others
_EFFICIENCY = 0.5  # assumed, not measured: share of the peaks that convolutions and copies reach

_NVIDIA = {
    # name: memory GiB, fp32 TFLOP/s, half TFLOP/s, memory GB/s, link GB/s (vendor datasheets),
    # host GB/s: PCIe 3.0 x16 is 16, 4.0 is 32, 5.0 is 64
    "p100": (16, 9.3, 18.7, 732, 16, 16),
    "t4": (16, 8.1, 65, 320, 16, 16),
    "v100": (32, 15.7, 125, 900, 150, 16),
    "a10": (24, 31.2, 125, 600, 32, 32),
    "a100": (80, 19.5, 312, 2039, 300, 32),
    "l4": (24, 30.3, 121, 300, 32, 32),
    "l40s": (48, 91.6, 362, 864, 32, 32),
    "rtx3090": (24, 35.6, 71, 936, 32, 32),
    "rtx4090": (24, 82.6, 165, 1008, 32, 32),
    "h100": (80, 67, 989, 3350, 450, 64),
    "h200": (141, 67, 989, 4800, 450, 64),
}

CATALOGUE = {
    **{
        name: DeviceKind(
            name=name,
            memory=memory * _GIB,
            fp32_flops=fp32 * 1e12 * _EFFICIENCY,
            half_flops=half * 1e12 * _EFFICIENCY,
            memory_bandwidth=bandwidth * 1e9 * _EFFICIENCY,
            link_bandwidth=link * 1e9 * _EFFICIENCY,
            host_bandwidth=host * 1e9 * _EFFICIENCY,
            context=_CONTEXT,
        )
        for name, (memory, fp32, half, bandwidth, link, host) in _NVIDIA.items()
    },
    "cpu": DeviceKind(
        name="cpu",
        memory=None,
        fp32_flops=5e10,  # of the order measured with 2 cores on a 3D convolution
        half_flops=5e10,
        memory_bandwidth=1e10,
        link_bandwidth=1e10,
        host_bandwidth=1e10,
        context=0,
    ),
}


def kinds_with_memory() -> tuple[DeviceKind, ...]:
    """The catalogue's kinds whose memory it knows, the smallest first."""
    known = [kind for kind in CATALOGUE.values() if kind.memory is not None]
    return tuple(sorted(known, key=lambda kind: (kind.memory or 0, kind.name)))
