"""Rates of an NVIDIA H100 80GB HBM3, fitted to measurements of one (driver 580, torch 2.11, cuDNN 9.19).

The numbers were fitted to the times of every operation of 8 models and of 141 single convolutions;
benchmarks/results/gpu_times.md shows how well they fit these, and steps of models kept out of the fit.
Convolutions in fp32 run on TF32 tensor cores (torch's default).
"""

from __future__ import annotations

from placer.machine.rates import Peaks, Rate, complete_rates, with_launch

H100_PEAKS = Peaks(fp32=67e12, tensor=494.5e12, half=989e12, fp64=34e12, bandwidth=3350e9)
"""The data sheet (SXM), dense."""

_FITTED = {
    # class, data type: overhead in us, TFLOP/s, GB/s, GB/s per row, columns of a tile
    ("convolution", "float32"): (13.8, 403, 1310, 0, 128),
    ("convolution", "half"): (2.11, 989, 363, 0, 64),
    ("convolution_input", "float32"): (1, 318, 1890, 0, 128),
    ("convolution_input", "half"): (1, 989, 458, 0, 64),
    ("convolution_weight", "float32"): (17.6, 215, 500, 0, 128),
    ("convolution_weight", "half"): (6.02, 989, 317, 0, 64),
    ("transposed_convolution", "float32"): (1, 494, 440, 0, 64),
    ("transposed_convolution", "half"): (1, 101, 3350, 0, 128),
    ("transposed_convolution_input", "float32"): (1, 66.2, 3350, 0, 64),
    ("transposed_convolution_input", "half"): (6.79, 510, 787, 0, 128),
    ("transposed_convolution_weight", "float32"): (17.9, 129, 1420, 0, 128),
    ("transposed_convolution_weight", "half"): (6.79, 510, 787, 0, 64),
    ("product", "float32"): (2.15, 67, 612, 0, 1),
    ("product", "half"): (1, 989, 3350, 0, 1),
    ("unaligned_product", "half"): (4.65, 167, 882, 0, 1),
    ("attention", "float32"): (4.48, 30.2, 1080, 0, 1),
    ("attention", "half"): (3.89, 353, 1150, 0, 1),
    ("attention_backward", "float32"): (3.98, 33.8, 1100, 0, 1),
    ("attention_backward", "half"): (5.97, 424, 1330, 0, 1),
    ("batch_norm", "float32"): (2.2, 0, 1740, 16.1, 1),
    ("batch_norm", "half"): (2.67, 0, 1000, 2.5, 1),
    ("batch_norm_backward", "float32"): (2.68, 0, 1610, 8.04, 1),
    ("batch_norm_backward", "half"): (1, 0, 1030, 3.41, 1),
    ("group_norm", "float32"): (1, 0, 1000, 10, 1),
    ("group_norm_backward", "float32"): (4.86, 0, 972, 11.6, 1),
    ("layer_norm", "float32"): (3.62, 0, 2630, 0, 1),
    ("layer_norm_backward", "float32"): (2.75, 0, 1260, 0, 1),
    ("pooling", "float32"): (7.1, 0, 1950, 0, 1),
    ("pooling", "half"): (10.6, 0, 1630, 0, 1),
    ("pooling_backward", "float32"): (1, 0, 2900, 0, 1),
    ("pooling_backward", "half"): (1, 0, 2470, 0, 1),
    ("upsampling", "float32"): (8.22, 0, 659, 0, 1),
    ("upsampling_backward", "float32"): (20, 0, 279, 0, 1),
    ("reduction", "float32"): (2.94, 0, 1890, 0, 1),
    ("reduction", "half"): (11, 0, 3020, 0, 1),
    ("copy", "float32"): (1.97, 0, 3350, 0, 1),
    ("copy", "half"): (1.48, 0, 1000, 0, 1),
    ("gather", "float32"): (11.7, 0, 1540, 0, 1),
    ("pointwise", "float32"): (1, 0, 3190, 0, 1),
    ("pointwise", "half"): (1.17, 0, 3150, 0, 1),
    ("optimizer", "float32"): (20, 0, 2750, 0, 1),
}
# Seconds of the host per operation, and per operation that chooses an algorithm: the profiler's medians times
# 2.9, the factor that fits whole steps best (Python and autograd around the operations). Xeon, 16 cores.
_LAUNCH, _HEAVY_LAUNCH = 23e-6, 123e-6

H100_RATES = with_launch(
    complete_rates(
        {
            key: Rate(
                overhead=overhead * 1e-6,
                flops=flops * 1e12,
                bandwidth=bandwidth * 1e9,
                row_bandwidth=row * 1e9,
                tile=tile,
            )
            for key, (overhead, flops, bandwidth, row, tile) in _FITTED.items()
        },
        H100_PEAKS,
    ),
    light=_LAUNCH,
    product=_HEAVY_LAUNCH,
    convolution=_HEAVY_LAUNCH,
)
