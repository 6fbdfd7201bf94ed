"""A 3D U-Net, written to be read: what the demo, the specs and the benchmarks split.

Çiçek et al. 2016, "3D U-Net: Learning Dense Volumetric Segmentation from Sparse Annotation"
(arXiv:1606.06650), with transposed convolutions that halve the channels. Run it to see how far
one batch of random noise goes: ``python examples/unet3d.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

NORMS = {
    "batch": nn.BatchNorm3d,
    "instance": lambda channels: nn.InstanceNorm3d(channels, affine=True),
    "group": lambda channels: nn.GroupNorm(min(8, channels), channels),
}


class UNet3D(nn.Module):
    """(N, in_channels, D, H, W) -> (N, out_channels, D, H, W); D, H, W divide by 2 ** (depth - 1).

    Level ``i`` has ``width * 2**i`` channels at ``1 / 2**i`` of the resolution:

        encoder.0 ─────────────── skip ─────────────── decoder.0 ── head
            └ encoder.1 ───────── skip ───────── decoder.1 ┘
                  └ encoder.2 ─── skip ─── decoder.2 ┘
                          └ bottleneck ┘
    """

    def __init__(
        self,
        in_channels: int = 1,
        out_channels: int = 3,
        *,
        width: int = 32,
        depth: int = 4,
        norm: str = "batch",
    ) -> None:
        super().__init__()
        channels = [width * 2**level for level in range(depth)]
        *upper, lowest = channels
        self.encoder = nn.ModuleList(
            double_conv(before, after, norm)
            for before, after in zip([in_channels, *upper], upper, strict=False)
        )
        self.pool = nn.MaxPool3d(2)
        self.bottleneck = double_conv(upper[-1] if upper else in_channels, lowest, norm)
        self.upsample = nn.ModuleList(
            nn.ConvTranspose3d(2 * level, level, kernel_size=2, stride=2) for level in upper
        )
        self.decoder = nn.ModuleList(double_conv(2 * level, level, norm) for level in upper)
        self.head = nn.Conv3d(width, out_channels, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for encode in self.encoder:
            x = encode(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottleneck(x)
        for level in reversed(range(len(skips))):
            x = torch.cat([skips[level], self.upsample[level](x)], dim=1)
            x = self.decoder[level](x)
        return self.head(x)


def double_conv(in_channels: int, out_channels: int, norm: str) -> nn.Sequential:
    """Twice: a 3 x 3 x 3 convolution, a norm and a ReLU."""
    return nn.Sequential(
        nn.Conv3d(in_channels, out_channels, 3, padding=1, bias=False),
        NORMS[norm](out_channels),
        nn.ReLU(inplace=True),
        nn.Conv3d(out_channels, out_channels, 3, padding=1, bias=False),
        NORMS[norm](out_channels),
        nn.ReLU(inplace=True),
    )


def unet3d(
    in_channels: int = 1,
    out_channels: int = 3,
    width: int = 32,
    depth: int = 4,
    norm: str = "batch",
) -> UNet3D:
    """The network by name, for ``placer plan examples/unet3d.py:unet3d …``."""
    return UNet3D(in_channels, out_channels, width=width, depth=depth, norm=norm)


def main() -> None:
    model = unet3d(width=8, depth=3)
    output = model(torch.randn(1, 1, 32, 32, 32))
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters; output {tuple(output.shape)}"
    )


if __name__ == "__main__":
    main()
