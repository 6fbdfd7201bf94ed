"""Random small networks of operators that look at neighbours, for tests of splitting in space."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Resize(nn.Module):
    """Interpolation by its function."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, **self.options)


class Call(nn.Module):
    """A function of the input, by a description that is seen in a failure."""

    def __init__(self, function: Callable[[Tensor], Tensor], said: object) -> None:
        super().__init__()
        self._function, self._said = [function], said

    def extra_repr(self) -> str:
        return str(self._said)

    def forward(self, x: Tensor) -> Tensor:
        return self._function[0](x)


class ValidUNet(nn.Module):
    """Convolutions without padding, and a skip that is cropped (Ronneberger et al., 2015) and gated."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3)
        self.up, self.head = nn.ConvTranspose2d(6, 4, 2, 2), nn.Conv2d(8, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(F.group_norm(self.down(x), 2))
        y = self.up(F.relu(F.instance_norm(self.deep(F.max_pool2d(skip, 2)))))
        top, left = ((a - b) // 2 for a, b in zip(skip.shape[2:], y.shape[2:], strict=True))
        skip = skip[:, :, top : top + y.shape[2], left : left + y.shape[3]]
        skip = skip * (skip.amax((2, 3), True) - skip.std((2, 3), keepdim=True))
        result: Tensor = self.head(F.pad(torch.cat([skip, y], 1), (1, 1, 1, 1), "reflect"))
        return result


def _take(draw: random.Random, dims: int, channels: int) -> tuple[nn.Module, int]:
    """Slices, ``narrow`` and padding."""
    if draw.random() < 0.5:
        mode = draw.choice(("constant", "constant", "reflect", "replicate", "circular"))
        low = -2 if mode == "constant" else 0
        pad = [draw.randint(low, 3) for _ in range(2 * dims)]
        value = draw.choice((None, 1.5)) if mode == "constant" else None
        return Call(lambda x: F.pad(x, pad, mode, value), (mode, pad, value)), channels
    if draw.random() < 0.3:
        dim, start = draw.randint(2, dims + 1), draw.randint(0, 2)
        length = draw.randint(1, 6)
        return Call(lambda x: x.narrow(dim, start, length), (dim, start, length)), channels
    bounds = [draw.choice((None, *range(-5, 6))) for _ in range(2 * dims)]
    steps = [draw.choice((None, 1, 2, 3)) for _ in range(dims)]
    slices = [slice(*bounds[2 * i : 2 * i + 2], steps[i]) for i in range(dims)]
    index = draw.choice(((slice(None), slice(None), *slices), (..., *slices)))
    return Call(lambda x: x[index], index), channels


def _reduce(draw: random.Random, dims: int, channels: int) -> tuple[nn.Module, int]:
    """Reductions, with which the input is scaled."""
    name = draw.choice(("amax", "amin", "var", "std"))
    over = draw.choice((list(range(2, dims + 2)), list(range(dims + 2)), [1], [2]))
    return Call(
        lambda x: x * getattr(x, name)(over, keepdim=True) + getattr(x, name)(1, keepdim=True),
        (name, over),
    ), channels


def _function(draw: random.Random, dims: int, channels: int) -> tuple[nn.Module, int]:
    """Norms as functions, and gates."""
    if channels % 2 == 0 and channels > 2 and draw.random() < 0.3:
        return nn.GLU(1), channels // 2
    weight = torch.rand(channels, dtype=torch.float64)
    groups = draw.choice((1, channels))
    return Call(
        draw.choice(
            (
                lambda x: F.instance_norm(x, weight=weight),
                lambda x: F.group_norm(x, groups, weight, None, 1e-3),
                lambda x: F.batch_norm(x, None, None, weight, training=True),
                lambda x: x + x.max(),
                lambda x: F.rms_norm(x.transpose(1, -1), (channels,)).transpose(1, -1),
                lambda x: torch.stack([x, x * 2], 2)[:, :, 1] + x.unsqueeze(1).squeeze(1),
            )
        ),
        groups,
    ), channels


def _convolution(draw: random.Random, dims: int, channels: int) -> tuple[nn.Module, int]:
    transposed = draw.random() < 0.4
    kinds: Any = {
        False: (nn.Conv1d, nn.Conv2d, nn.Conv3d),
        True: (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    }
    stride = [draw.randint(1, 4) for _ in range(dims)]
    dilation = [draw.randint(1, 3) for _ in range(dims)]
    options: dict[str, Any] = {
        "stride": stride,
        "dilation": dilation,
        "padding": [draw.randint(0, 3) for _ in range(dims)],
        "groups": draw.choice((1, 2)),
        "bias": draw.random() < 0.5,
    }
    if transposed:
        options["output_padding"] = [
            draw.randint(0, max(pair) - 1) for pair in zip(stride, dilation, strict=True)
        ]
    elif draw.random() < 0.3:
        options["padding_mode"] = draw.choice(("circular", "reflect", "replicate"))
    made = draw.choice((2, 4))
    kernel = [draw.randint(1, 5) for _ in range(dims)]
    return kinds[transposed][dims - 1](channels, made, kernel, **options), made


def _pool(draw: random.Random, dims: int, channels: int) -> tuple[nn.Module, int]:
    kernel = [draw.randint(1, 5) for _ in range(dims)]
    stride = [draw.randint(1, 4) for _ in range(dims)]
    padding = [draw.randint(0, k // 2) for k in kernel]
    ceil_mode = draw.random() < 0.5
    if draw.random() < 0.5:
        pools: Any = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
        dilation = [draw.randint(1, 3) for _ in range(dims)]
        return pools[dims - 1](kernel, stride, padding, dilation, ceil_mode=ceil_mode), channels
    averages: Any = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
    more = {} if dims == 1 else {"divisor_override": draw.choice((None, 5))}
    count = draw.random() < 0.5
    return averages[dims - 1](
        kernel, stride, padding, ceil_mode=ceil_mode, count_include_pad=count, **more
    ), channels


def _adaptive(draw: random.Random, dims: int, channels: int) -> tuple[nn.Module, int]:
    averages: Any = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
    largest: Any = (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
    pools = draw.choice((averages, largest))
    size: Any = [draw.randint(1, 4) for _ in range(dims)] if draw.random() < 0.6 else 1
    return pools[dims - 1](size), channels


def _resize(draw: random.Random, dims: int, channels: int) -> tuple[nn.Module, int]:
    linear = draw.random() < 0.6
    options: dict[str, Any] = {"mode": "nearest"}
    if linear:
        options = {
            "mode": ("linear", "bilinear", "trilinear")[dims - 1],
            "align_corners": draw.random() < 0.5,
        }
    if draw.random() < 0.6:
        options["scale_factor"] = draw.choice((2, 3, 1.5, 2.3, 0.5))
    else:
        options["size"] = draw.choice((3, 7, 12, 16, 20))
    return Resize(**options), channels


def _other(draw: random.Random, dims: int, channels: int) -> tuple[nn.Module, int]:
    batch: Any = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    instance: Any = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
    channel: Any = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
    return draw.choice(
        (
            batch[dims - 1](channels),
            instance[dims - 1](channels, affine=True),
            nn.GroupNorm(2, channels),
            nn.ReLU(inplace=draw.random() < 0.5),
            nn.Dropout(0.3),
            channel[dims - 1](0.3),
        )
    ), channels


_KINDS: tuple[Callable[..., tuple[nn.Module, int]], ...] = (
    *(_convolution, _convolution, _pool, _pool, _adaptive, _resize, _other),
    *(_take, _take, _reduce, _function),
)


def random_case(seed: int) -> tuple[nn.Module, Tensor, dict[str, Any]] | None:
    """A network, an input, and the ``space`` and ``chunks`` of a spec; None if torch refuses the network."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    dims, channels = draw.choice((1, 2, 2, 3)), 2
    layers = []
    for _ in range(draw.randint(1, 3)):
        layer, channels = draw.choice(_KINDS)(draw, dims, channels)
        layers.append(layer)
    model = nn.Sequential(*layers).double()
    shape = [draw.randint(6, 14) for _ in range(dims)]
    x = torch.randn(draw.randint(1, 2), 2, *shape, dtype=torch.float64)
    try:
        made = copy.deepcopy(model)(x)
        made.sum().backward()
    except (RuntimeError, ValueError, IndexError):
        return None
    if not made.numel():
        return None
    space: Any = draw.choice((2, 3, 4))
    if dims > 1 and draw.random() < 0.4:
        space = {"shards": 4, "grid": [2, 2]}
    return model, x, {"space": space, "chunks": draw.choice((1, 3))}


class Inputs(nn.Module):
    """A volume with its channels last, a mask without channels, and a coarse volume of two parts as long."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.coarse = nn.Conv3d(2, 4, 3, padding=1), nn.Conv3d(1, 4, 3, padding=1)
        self.norm, self.head = nn.BatchNorm3d(4), nn.Conv3d(4, 2, 3, padding=1)

    def forward(self, x: Tensor, mask: Tensor, coarse: Tensor) -> tuple[Tensor, Tensor]:
        y = self.stem(x.permute(0, 4, 1, 2, 3)) * (mask > 0).unsqueeze(1)
        y = y + F.interpolate(self.coarse(coarse), scale_factor=2)
        y = self.head(F.relu(self.norm(y)))
        return y.permute(0, 2, 3, 4, 1), y[:, 0] * mask


INPUTS: dict[str, Any] = {
    "x": {"space_dims": [1, 2, 3]},
    "mask": {"space_dims": [1, 2, -1]},
    "coarse": {"space_dims": [2, 3, 4]},
}


def some_inputs(rows: int) -> tuple[Tensor, ...]:
    """The arguments of `Inputs`."""
    x = torch.randn(rows, 8, 6, 6, 2, dtype=torch.float64)
    return x, torch.randn(rows, 8, 6, 6).double(), torch.randn(rows, 1, 4, 3, 3).double()
