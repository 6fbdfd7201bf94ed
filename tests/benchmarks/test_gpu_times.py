"""The fit recovers the rates that hand-written rows were made with; needs no GPU and no recorded data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("scipy")

from benchmarks import gpu_times
from benchmarks.gpu_times import Row
from placer.cost.operations import Operation
from placer.machine.rates import Rate

CONVOLUTION = Rate(overhead=5e-6, flops=3e14, bandwidth=1e12, tile=64)
WEIGHT = Rate(overhead=5e-6, flops=1e14, bandwidth=5e11, tile=32)
NORM = Rate(overhead=3e-6, bandwidth=2e12, row_bandwidth=1e10)


def _row(rates: list[Rate], operations: list[Operation]) -> Row:
    seconds = sum(
        rate.seconds(o.flops, o.nbytes, o.width) for rate, o in zip(rates, operations, strict=True)
    )
    return Row(family="made up", operations=tuple(operations), seconds=seconds, count=1)


def test_rates_are_found_again() -> None:
    rows = []
    for size in (1, 10, 100):
        for width in (32, 48, 64, 96, 256):
            flops, nbytes = size * width * 10**8, size * width * 2 * 10**5
            forward = Operation("convolution", "float32", flops, nbytes, width)
            weight = Operation("convolution_weight", "float32", flops, nbytes, width)
            norm = Operation("batch_norm", "float32", 0, nbytes, width)
            rows += [_row([CONVOLUTION], [forward]), _row([WEIGHT], [weight])]
            rows += [_row([NORM], [norm]), _row([NORM], [norm._replace(name="pointwise", width=0)])]
    found = gpu_times.fit(rows)
    for row in rows:
        said = sum(
            found[o.name, o.dtype].seconds(o.flops, o.nbytes, o.width) for o in row.operations
        )
        assert said == pytest.approx(row.seconds, rel=0.05)
    assert found["convolution", "float32"].tile == 64
    assert found["batch_norm", "float32"].row_bandwidth == pytest.approx(1e10, rel=0.1)
    # Not measured: bf16 as the same share of its peak, another normalisation as this one.
    assert found["convolution", "half"].flops == pytest.approx(2 * 3e14, rel=0.1)
    assert found["group_norm", "float32"] == found["batch_norm", "float32"]


def test_one_odd_row_does_not_stand_for_a_class() -> None:
    """A half-precision convolution of a 3-channel image made all convolutions seem ten times slower."""
    rows = []
    for size in (1, 10, 100):
        operation = Operation("convolution", "float32", size * 10**10, size * 10**7, 64)
        rows.append(_row([CONVOLUTION], [operation]))
    odd = Operation("convolution", "half", 10**11, 10**8, 64)
    slow = Row(family="made up", operations=(odd,), seconds=0.01, count=1)
    only = _row([NORM], [Operation("layer_norm", "half", 0, 10**9, 0)])
    pointwise = _row([NORM], [Operation("pointwise", "float32", 0, 10**9, 0)])
    found = gpu_times.fit([*rows, slow, only, pointwise])
    plain = found["convolution", "float32"]
    assert found["convolution", "half"].flops == pytest.approx(2 * plain.flops)
    assert found["convolution", "half"].bandwidth == plain.bandwidth
    said = found["layer_norm", "half"].seconds(0, 1e9)  # nothing else says more of it
    assert said == pytest.approx(only.seconds, rel=0.05)


def test_convolutions_by_themselves(tmp_path: Path) -> None:
    row = {
        "dtype": "bfloat16", "input": [2, 8, 10, 10], "weight": [16, 8, 3, 3], "stride": [1, 1],
        "padding": [1, 1], "dilation": [1, 1], "transposed": False, "output_padding": [0, 0],
        "groups": 1, "forward": [0, 5000], "grad_input": [0, 200], "grad_weight": [0, 7000],
    }  # fmt: skip
    (tmp_path / "convolutions.json").write_text(json.dumps({"rows": [row]}))
    forward, weight = gpu_times.convolution_rows(tmp_path)  # the other one was too short
    flops = 2 * 2 * 16 * 100 * 8 * 9
    nbytes = 2 * (2 * 8 * 100 + 16 * 8 * 9 + 2 * 16 * 100)
    assert forward.operations == (Operation("convolution", "half", flops, nbytes, 16),)
    assert weight.operations == (Operation("convolution_weight", "half", flops, nbytes, 16),)
    assert (forward.seconds, weight.seconds) == pytest.approx((5e-3, 7e-3))
