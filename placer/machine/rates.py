"""Computes how long an operation takes on a device, from a few numbers per class of operation and dtype.

    seconds = overhead + FLOPs / (rate of FLOPs) + bytes / bandwidth

A convolution or a matrix product works on tiles, ``tile`` columns at a time, so 32 channels take as long as
128 if a tile is 128 wide. A normalisation runs one block per row that it normalises (a channel, a group): few
rows leave most of a GPU idle, and each row reads and writes at most ``row_bandwidth`` bytes per second.

The host's time to launch the operation is counted separately. The device works at the same time, so a pass
takes the longer of the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Annotated

from pydantic import ConfigDict, Field

CLASSES = (
    "convolution",  # forward
    "convolution_input",  # gradient of its input
    "convolution_weight",  # gradient of its weight
    "transposed_convolution",
    "transposed_convolution_input",
    "transposed_convolution_weight",
    "depthwise_convolution",  # all three
    "product",
    "unaligned_product",  # in half precision, with a size that is not a multiple of 8
    "attention",
    "attention_backward",
    "batch_norm",  # instance norm too
    "batch_norm_backward",
    "group_norm",
    "group_norm_backward",
    "layer_norm",  # RMS norm, softmax
    "layer_norm_backward",
    "pooling",
    "pooling_backward",
    "upsampling",
    "upsampling_backward",
    "recurrent",
    "reduction",
    "copy",
    "gather",  # lookups, and sums into rows
    "pointwise",  # and all others
    "optimizer",
)
DTYPES = ("float32", "half", "float64")  # half: bfloat16 and float16; all other types: float32
_Number = Annotated[float, Field(ge=0)]
HEAVY = frozenset(CLASSES[: CLASSES.index("attention_backward") + 1])  # slow to launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The numbers of one class, in seconds, FLOP/s and bytes/s; ``launch`` is in seconds of the host.

    ``tile`` 1 means no padding, ``row_bandwidth`` 0 that rows do not matter, ``flops`` 0 that FLOPs take no
    time.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    overhead: _Number = 0.0
    flops: _Number = 0.0
    bandwidth: _Number = 0.0
    row_bandwidth: _Number = 0.0
    tile: Annotated[int, Field(ge=1)] = 1
    launch: _Number = 0.0

    def scaled(self, factor: float) -> Rate:
        """The rate of a device that takes ``1 / factor`` of the time; the host launches as before."""
        return replace(
            self,
            overhead=self.overhead / factor,
            flops=self.flops * factor,
            bandwidth=self.bandwidth * factor,
            row_bandwidth=self.row_bandwidth * factor,
        )

    def seconds(self, flops: float, nbytes: float, width: float = 0) -> float:
        """The seconds of one operation on the device. ``width``: its columns, or the rows that it normalises.

        >>> Rate(overhead=1e-6, flops=1e12, bandwidth=1e9, tile=128).seconds(1e9, 1e6, width=64)
        0.003001
        """
        seconds = self.overhead
        if self.flops and flops:
            padded = -(-width // self.tile) * self.tile / width if width and self.tile > 1 else 1.0
            seconds += flops * padded / self.flops
        if self.bandwidth and nbytes:
            reached = self.bandwidth
            if self.row_bandwidth and width:
                reached = min(reached, self.row_bandwidth * width)
            seconds += nbytes / reached
        return seconds


RATE_FIELDS = tuple(field.name for field in fields(Rate))
Key = tuple[str, str]  # class and data type


@dataclass(frozen=True, slots=True, eq=False)
class Rates:
    """The `Rate` of a device for every class and data type. Values are compared by identity."""

    table: Mapping[Key, Rate]

    def __post_init__(self) -> None:
        unknown = [key for key in self.table if key[0] not in CLASSES or key[1] not in DTYPES]
        assert not unknown, unknown
        object.__setattr__(self, "table", MappingProxyType(dict(self.table)))

    def __getitem__(self, key: Key) -> Rate:
        return self.table[key]


def uniform_rates(*, flops: float, bandwidth: float) -> Rates:
    """The same rate for every class, for a device with only one known speed."""
    rate = Rate(flops=flops, bandwidth=bandwidth)
    return Rates({(name, dtype): rate for name in CLASSES for dtype in DTYPES})


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """The peaks in a data sheet: dense FLOP/s, and bytes/s. ``tensor``: TF32 on tensor cores."""

    fp32: float
    tensor: float
    half: float
    fp64: float
    bandwidth: float

    def of(self, key: Key) -> float:
        """The peak FLOP/s that operations of this class and data type could reach.

        By default, torch runs fp32 convolutions on TF32 tensor cores if there are any, but not fp32 products.
        """
        name, dtype = key
        if dtype == "half":
            return self.half
        if dtype == "float64":
            return self.fp64
        return self.tensor if "convolution" in name or name == "recurrent" else self.fp32


def scaled_rates(known: Rates, of: Peaks, to: Peaks) -> Rates:
    """The rates of a device with the peaks ``to``, if it reaches the same fractions of them as ``known``.

    The bandwidth of a block, tiles, and everything that does not depend on size stay the same.
    """
    return Rates(
        {
            key: replace(
                _of_share(rate, of.of(key), to.of(key)),
                bandwidth=rate.bandwidth / of.bandwidth * to.bandwidth,
            )
            for key, rate in known.table.items()
        }
    )


def fastest_rates(choices: list[Rates]) -> Rates:
    """The best number of every class among ``choices``, so that no operation is faster on any of them."""
    table = {}
    for key in choices[0].table:
        rates = [choice[key] for choice in choices]

        def best(name: str, rates: list[Rate] = rates) -> float:
            values = [getattr(rate, name) for rate in rates]
            return 0.0 if 0 in values else max(values)  # 0: no limit

        table[key] = Rate(
            overhead=min(rate.overhead for rate in rates),
            flops=best("flops"),
            bandwidth=best("bandwidth"),
            row_bandwidth=best("row_bandwidth"),
            tile=min(rate.tile for rate in rates),
            launch=min(rate.launch for rate in rates),
        )
    return Rates(table)


# Where a class was not measured: the class whose rate it takes.
_LIKE = {
    "convolution_input": "convolution",
    "convolution_weight": "convolution",
    "transposed_convolution": "convolution",
    "transposed_convolution_input": "convolution_input",
    "transposed_convolution_weight": "convolution_weight",
    "unaligned_product": "product",
    "attention": "product",
    "attention_backward": "product",
    "recurrent": "product",
    "batch_norm": "layer_norm",
    "batch_norm_backward": "layer_norm_backward",
    "group_norm": "batch_norm",
    "group_norm_backward": "batch_norm_backward",
    "pooling_backward": "pooling",
    "upsampling_backward": "upsampling",
}
_MEASURED_FIRST = ("float32", "half")
# Normalisations that torch runs with other kernels in half precision: the class whose float32 kernels
# are like those. cuDNN's are not for bfloat16 (aten/src/ATen/native/Normalization.cpp,
# _select_batch_norm_backend); torch's own have one block per channel, as its group norm per group.
_LIKE_IN_HALF = {"batch_norm": "group_norm", "batch_norm_backward": "group_norm_backward"}


def complete_rates(measured: Mapping[Key, Rate], peaks: Peaks) -> Rates:
    """``measured``, completed for every class by the rate of the other data type or of a similar class.

    FLOP/s are then the same share of the peak. A block that normalises a row reads as many elements a
    second in half precision, and so half the bytes.
    """

    def found(key: Key, seen: tuple[Key, ...] = ()) -> Rate:
        name, dtype = key
        if key in measured:
            return measured[key]
        if name == "unaligned_product" and dtype != "half":
            return found(("product", dtype))
        if dtype == "half" and (_LIKE_IN_HALF.get(name), "float32") in measured:
            name = _LIKE_IN_HALF[name]
        for other in _MEASURED_FIRST:
            if (name, other) in measured:
                rate = _of_share(measured[name, other], peaks.of((name, other)), peaks.of(key))
                if (other, dtype) == ("float32", "half"):
                    rate = replace(rate, row_bandwidth=rate.row_bandwidth / 2)
                return rate
        like = (_LIKE.get(name, "pointwise"), dtype)
        assert like not in seen, f"{like} was not measured, and nothing like it"
        return _of_share(found(like, (*seen, key)), peaks.of(like), peaks.of(key))

    return Rates({(name, dtype): found((name, dtype)) for name in CLASSES for dtype in DTYPES})


def _of_share(rate: Rate, of: float, to: float) -> Rate:
    """``rate`` with FLOP/s that are the same fraction of the peak ``to`` as before of the peak ``of``."""
    return replace(rate, flops=rate.flops / of * to)


def with_launch(rates: Rates, *, light: float, product: float, convolution: float) -> Rates:
    """``rates`` with the seconds that the host takes to launch an operation; `HEAVY` ones take longer."""

    def launch(name: str) -> float:
        if name not in HEAVY:
            return light
        return convolution if "convolution" in name else product

    return Rates({key: replace(rate, launch=launch(key[0])) for key, rate in rates.table.items()})
