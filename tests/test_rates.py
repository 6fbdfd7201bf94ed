"""Seconds of operations: the formula, defaults for rates that were not measured, and the catalogue."""

from __future__ import annotations

import pytest

from placer.machine.catalogue import CATALOGUE, fastest_kind
from placer.machine.h100 import H100_PEAKS, H100_RATES
from placer.machine.rates import CLASSES, DTYPES, Peaks, Rate, complete_rates, scaled_rates


def test_columns_are_padded_to_a_tile() -> None:
    rate = Rate(flops=1e12, tile=128)
    assert rate.seconds(32e9, 0, width=32) == rate.seconds(128e9, 0, width=128) == 0.128
    assert rate.seconds(129e9, 0, width=129) == pytest.approx(0.256)


def test_every_class_has_a_rate_where_few_were_measured() -> None:
    peaks = Peaks(fp32=1e12, tensor=4e12, half=8e12, fp64=5e11, bandwidth=1e11)
    measured = {
        ("convolution", "float32"): Rate(flops=1e12, bandwidth=1e10),
        ("product", "float32"): Rate(flops=5e11, bandwidth=1e10),
        ("pointwise", "float32"): Rate(bandwidth=5e10),
    }
    rates = complete_rates(measured, peaks)
    assert set(rates.table) == {(name, dtype) for name in CLASSES for dtype in DTYPES}
    assert rates["convolution_weight", "half"].flops == pytest.approx(2e12)  # a quarter of the peak
    assert rates["unaligned_product", "float64"].flops == pytest.approx(2.5e11)
    assert rates["group_norm_backward", "half"] == measured["pointwise", "float32"]


def test_what_was_not_measured_in_half_precision_has_the_kernels_that_run_there() -> None:
    """A bfloat16 batch norm runs torch's kernel; a block reads as many elements a second, half the bytes."""
    peaks = Peaks(fp32=1e12, tensor=4e12, half=8e12, fp64=5e11, bandwidth=1e12)
    measured = {
        ("batch_norm", "float32"): Rate(bandwidth=9e11, row_bandwidth=16e9),
        ("group_norm", "float32"): Rate(bandwidth=5e11, row_bandwidth=10e9),
        ("pointwise", "float32"): Rate(bandwidth=5e11),
        ("product", "float32"): Rate(flops=5e11, bandwidth=1e11),
        ("convolution", "float32"): Rate(flops=1e12, bandwidth=1e11),
    }
    rates = complete_rates(measured, peaks)
    for name in ("batch_norm", "group_norm"):
        assert rates[name, "half"] == Rate(bandwidth=5e11, row_bandwidth=5e9)
    own = measured | {("batch_norm", "half"): Rate(bandwidth=7e11, row_bandwidth=2e9)}
    assert complete_rates(own, peaks)["batch_norm", "half"] == own["batch_norm", "half"]
    del measured["group_norm", "float32"]
    assert complete_rates(measured, peaks)["batch_norm", "half"].row_bandwidth == 8e9


def test_other_kinds_reach_the_shares_that_the_h100_does() -> None:
    double = Peaks(
        **{name: 2 * getattr(H100_PEAKS, name) for name in ("fp32", "tensor", "half", "fp64")},
        bandwidth=3 * H100_PEAKS.bandwidth,
    )
    scaled = scaled_rates(H100_RATES, H100_PEAKS, double)
    for key, rate in H100_RATES.table.items():
        assert scaled[key].flops == pytest.approx(2 * rate.flops)
        assert scaled[key].bandwidth == pytest.approx(3 * rate.bandwidth)
        assert scaled[key].overhead == rate.overhead
    assert CATALOGUE["h100"].rates["product", "half"].flops == pytest.approx(
        H100_RATES["product", "half"].flops
    )
    # Convolutions in fp32 run on tensor cores where there are some for them.
    a100, v100 = CATALOGUE["a100"].rates, CATALOGUE["v100"].rates
    assert a100["convolution", "float32"].flops > 4 * a100["product", "float32"].flops
    assert v100["convolution", "float32"].flops <= 15.7e12


@pytest.mark.parametrize("name", CATALOGUE)
def test_no_operation_is_faster_than_on_the_fastest_kind(name: str) -> None:
    kinds = [CATALOGUE[name], CATALOGUE["t4"], CATALOGUE["cpu"]]
    fastest = fastest_kind(kinds)
    for kind in kinds:
        for key, rate in kind.rates.table.items():
            for flops, nbytes, width in ((1e9, 1e6, 64), (0, 1e9, 3), (1e12, 1e9, 0)):
                least = fastest.rates[key].seconds(flops, nbytes, width)
                assert least <= rate.seconds(flops, nbytes, width) * (1 + 1e-12)


def test_a_card_has_the_memory_that_torch_finds_which_is_less_than_its_name_says() -> None:
    sizes = {
        "rtx2080ti": 11, "rtx3060-12gb": 12, "rtx3080-10gb": 10, "rtx3090": 24, "rtx4060": 8,
        "rtx4060ti-16gb": 16, "rtx4070": 12, "rtx4080": 16, "rtx4090": 24, "rtx5060ti-16gb": 16,
        "rtx5070": 12, "rtx5070ti": 16, "rtx5080": 16, "rtx5090": 32, "a4000": 16, "a5000": 24,
        "a10": 24, "a10g": 24, "l4": 24, "t4": 16,
    }  # fmt: skip
    for name, size in sizes.items():
        assert 0.9 * size < (CATALOGUE[name].memory or 0) / 2**30 < size, name
