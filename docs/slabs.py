"""Draws slabs.png, the picture of space.md: ``python docs/slabs.py``."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

INK = "#1f2933"
SLABS = ("#cfe3f7", "#fbe0c3", "#e3f1e0", "#ead9f2")
WIDTH, HEIGHT, HALO = 3.4, 1.2, 0.3


def slab(
    axes: Axes, x: float, y: float, color: str, text: str = "", *, height: float = HEIGHT
) -> None:
    hatch = "////" if height == HALO else None
    axes.add_patch(
        Rectangle((x, y), WIDTH, height, facecolor=color, edgecolor=INK, hatch=hatch, linewidth=1.1)
    )
    label(axes, x + WIDTH / 2, y + height / 2, text)


def label(axes: Axes, x: float, y: float, text: str, *, size: float = 11, **style: str) -> None:
    style = {"ha": "center", "va": "center", "color": INK, **style}
    axes.text(x, y, text, fontsize=size, linespacing=1.5, **style)  # type: ignore[arg-type]


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=14, color=INK, linewidth=1.3)
    )


def main() -> None:
    figure, axes = plt.subplots(figsize=(11.4, 4.6))
    axes.set_xlim(0, 17.6)
    axes.set_ylim(-0.2, 6.6)
    axes.axis("off")

    left, middle, right = 0.2, 7.1, 14.0
    label(axes, left + WIDTH / 2, 6.2, "every value is in slabs", weight="bold")
    for index, color in enumerate(SLABS):
        slab(axes, left, 4.4 - index * HEIGHT, color, f"cuda:{index}")
    label(axes, left + WIDTH / 2, 0.3, "one volume, four devices", style="italic")

    label(axes, middle + WIDTH / 2, 6.2, "what a convolution on cuda:1 reads", weight="bold")
    own = 2.6
    slab(axes, middle, own + HEIGHT, SLABS[0], height=HALO)
    slab(axes, middle, own, SLABS[1], "its own slab")
    slab(axes, middle, own - HALO, SLABS[2], height=HALO)
    label(axes, middle + WIDTH / 2, own + HEIGHT + 0.75, "halo: planes of cuda:0")
    label(axes, middle + WIDTH / 2, own - HALO - 0.45, "halo: planes of cuda:2")
    arrow(axes, (left + WIDTH + 0.1, 4.6), (middle - 0.1, own + HEIGHT + HALO / 2))
    arrow(axes, (left + WIDTH + 0.1, 3.8), (middle - 0.1, own + HEIGHT / 2))
    arrow(axes, (left + WIDTH + 0.1, 2.9), (middle - 0.1, own - HALO / 2))

    label(axes, right + WIDTH / 2, 6.2, "what it makes", weight="bold")
    slab(axes, right, own, SLABS[1], "its slab\nof the result")
    arrow(axes, (middle + WIDTH + 0.1, own + HEIGHT / 2), (right - 0.1, own + HEIGHT / 2))

    figure.savefig(
        Path(__file__).with_name("slabs.png"), dpi=130, bbox_inches="tight", facecolor="white"
    )


if __name__ == "__main__":
    main()
