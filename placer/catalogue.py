"""The device catalogue: speed, memory and context per kind of device.

Peak rates are from the vendors' data sheets (dense, without sparsity). How much of its peak each class of
kernels reaches was measured on one H100 (`placer.h100`). All other kinds are assumed to reach the same
fractions of their peaks; this has not been measured. ``placer calibrate`` measures the device at hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from placer.h100 import H100_PEAKS, H100_RATES
from placer.quantities import parse_bytes
from placer.rates import Peaks, Rates, fastest_rates, scaled_rates, uniform_rates


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Bytes of a GPU over some steps, at their most: in tensors and workspaces, and in torch's allocator."""

    allocated: int
    reserved: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Profile:
    """Measured seconds of the nodes of one model, by `placer profile`.

    ``passes`` has a table for forward and one for backward: node name -> (measured, estimated) seconds of
    the device. ``launches`` has the same two for the host, which launches the nodes: node name -> measured
    seconds. They are empty if the device's seconds have those of the host in them: on a CPU, and in files of
    GPUs that were written before there were any. ``memory`` is for comparison; plans do not use it.
    """

    fingerprint: str
    precision: str
    passes: tuple[Mapping[str, tuple[float, float]], Mapping[str, tuple[float, float]]]
    launches: tuple[Mapping[str, float], Mapping[str, float]] = field(default=({}, {}))
    memory: PeakMemory | None = None  # of a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """A type of device: memory in bytes, rates of its operations, and bandwidths of its links in bytes/s.

    ``device_type`` is whose kernels it runs, "cuda" or "cpu".
    """

    name: str
    device_type: str
    memory: int | None
    rates: Rates
    link_bandwidth: float  # to another device of the machine
    host_bandwidth: float  # to pinned memory of the host
    context: int  # bytes that a process takes on the device before its first tensor
    profile: Profile | None = None

    def reserve(self, memory: int) -> int:
        """Bytes of ``memory`` that plans leave free by default, for what cannot be predicted."""
        return 0 if self.memory is None else int(_UNPREDICTED * memory)


_GIB = parse_bytes("1GiB")
_UNPREDICTED = 0.02  # share of memory left free: the largest error of a fit prediction on an H100
_CONTEXT = parse_bytes("520MiB")  # of an H100, driver 580 and CUDA 13; assumed of all others
_EFFICIENCY = 0.5  # assumed, not measured: share of their peaks that links reach
# The same for links to the host, from two steps of a U-Net with offloading on an H100
# (benchmarks/gpu_times.py)
_HOST_EFFICIENCY = 0.65

_SHEETS = {
    # name: memory GiB; TFLOP/s in fp32, in fp32 convolutions, in half precision, in fp64; memory GB/s, link
    # GB/s to another device (one way), host GB/s: PCIe 3.0 x16 is 16, 4.0 is 32, 5.0 is 64.
    # Memory is what torch finds, which is less than the sheet says (14.56 GiB of 16 on a T4): the least
    # "total capacity" seen in public out-of-memory errors; p100, rtx3090 and mi300x have no such source.
    # Rates are dense: half the number where a sheet counts structured sparsity. The comment names the
    # vendor's data sheet. For a40, a6000, b200, rtx5090 and rtx6000ada, the numbers were taken from pages
    # that quote the sheet. The columns fp64, fp32 convolutions and links, and the rows a30 and mi300x, have
    # not been checked against a sheet.
    "p100": (15.89, 9.3, 9.3, 18.7, 4.7, 732, 16, 16),  # "NVIDIA Tesla P100", PCIe
    "t4": (14.56, 8.1, 8.1, 65, 0.25, 320, 16, 16),  # "NVIDIA T4 Tensor Core GPU"
    "v100": (31.73, 15.7, 15.7, 125, 7.8, 900, 150, 16),  # "NVIDIA V100", SXM2
    "a10": (22.03, 31.2, 62.5, 125, 0.98, 600, 32, 32),  # "NVIDIA A10"
    "a30": (23.5, 10.3, 82, 165, 5.2, 933, 100, 32),  # "NVIDIA A30"
    "a40": (44.34, 37.4, 74.8, 149.7, 0.58, 696, 56, 32),  # "NVIDIA A40"
    "a6000": (47.4, 38.7, 77.4, 154.8, 0.6, 768, 56, 32),  # "NVIDIA RTX A6000"
    "a100": (79.1, 19.5, 156, 312, 9.7, 2039, 300, 32),  # "NVIDIA A100", 80 GB SXM
    "l4": (22.03, 30.3, 60, 121, 0.49, 300, 32, 32),  # "NVIDIA L4"
    "l40s": (44.34, 91.6, 183, 362, 1.4, 864, 32, 32),  # "NVIDIA L40S"
    # GeForce and RTX Ada: from the white papers of the architectures; half precision with fp32 accumulation
    "rtx3090": (23.69, 35.6, 35.6, 71, 0.56, 936, 32, 32),  # "GA102 GPU Architecture"
    "rtx4090": (23.6, 82.6, 82.6, 165, 1.3, 1008, 32, 32),  # "Ada GPU Architecture"
    "rtx5090": (31.36, 104.8, 104.8, 209.5, 1.6, 1792, 64, 64),  # "RTX Blackwell GPU Architecture"
    "rtx6000ada": (44.4, 91.1, 182.1, 364.2, 1.4, 960, 32, 32),  # "NVIDIA RTX 6000 Ada Generation"
    "h100": (79.1, 67, 494.5, 989, 34, 3350, 450, 64),  # "NVIDIA H100", SXM
    "h200": (139.8, 67, 494.5, 989, 34, 4800, 450, 64),  # "NVIDIA H200", SXM
    "b200": (178.3, 75, 1100, 2250, 37, 7700, 900, 64),  # "NVIDIA HGX B200", per GPU
    # "AMD Instinct MI300X"; PyTorch for ROCm does not use TF32 by default.
    "mi300x": (191.5, 163.4, 163.4, 1307.4, 81.7, 5300, 64, 64),
}


def _from_sheet(
    name: str,
    memory: float,
    fp32: float,
    tensor: float,
    half: float,
    fp64: float,
    bandwidth: float,
    link: float,
    host: float,
) -> DeviceKind:
    """The kind with the peaks in its data sheet, in the units of the table above."""
    peaks = Peaks(
        fp32=fp32 * 1e12,
        tensor=tensor * 1e12,
        half=half * 1e12,
        fp64=fp64 * 1e12,
        bandwidth=bandwidth * 1e9,
    )
    return DeviceKind(
        name=name,
        device_type="cuda",
        memory=int(memory * _GIB),
        rates=scaled_rates(H100_RATES, H100_PEAKS, peaks),
        link_bandwidth=link * 1e9 * _EFFICIENCY,
        host_bandwidth=host * 1e9 * _HOST_EFFICIENCY,
        context=_CONTEXT,
    )


CATALOGUE = {
    **{name: _from_sheet(name, *row) for name, row in _SHEETS.items()},
    "cpu": DeviceKind(
        name="cpu",
        device_type="cpu",
        memory=None,
        rates=uniform_rates(
            flops=5e10, bandwidth=1e10
        ),  # the order of magnitude measured on 2 cores
        link_bandwidth=1e10,
        host_bandwidth=1e10,
        context=0,
    ),
}


def kinds_with_memory() -> tuple[DeviceKind, ...]:
    """The kinds in the catalogue that have a known memory, the smallest first."""
    known = [kind for kind in CATALOGUE.values() if kind.memory is not None]
    return tuple(sorted(known, key=lambda kind: (kind.memory or 0, kind.name)))


def fastest_kind(kinds: Iterable[DeviceKind]) -> DeviceKind:
    """A kind with the highest rate of ``kinds`` for every class of operations and every link."""
    found = list(dict.fromkeys(kinds))
    if len(found) == 1:
        return found[0]
    return replace(
        found[0],
        name="fastest",
        rates=fastest_rates([kind.rates for kind in found]),
        link_bandwidth=max(kind.link_bandwidth for kind in found),
        profile=None,
    )
