"""Draws overview.png, the picture of the README: ``python docs/overview.py``."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK = "#1f2933"
FIRST, SECOND, PLAIN, ACCENT = "#cfe3f7", "#fbe0c3", "#f4f5f7", "#e3f1e0"


def box(
    axes: Axes,
    corner: tuple[float, float],
    size: tuple[float, float],
    text: str,
    *,
    color: str,
    mono: bool = False,
    edge: str = INK,
    font: float = 10.5,
) -> None:
    axes.add_patch(
        FancyBboxPatch(
            corner,
            *size,
            boxstyle="round,pad=0,rounding_size=0.12",
            facecolor=color,
            edgecolor=edge,
        )
    )
    axes.text(
        corner[0] + size[0] / 2,
        corner[1] + size[1] / 2,
        text,
        ha="center",
        va="center",
        color=INK,
        fontsize=font,
        family="monospace" if mono else "sans-serif",
        linespacing=1.5,
    )


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=14, color=INK, linewidth=1.3)
    )


def label(axes: Axes, x: float, y: float, text: str, *, size: float = 10, **style: str) -> None:
    axes.text(x, y, text, ha="center", va="center", fontsize=size, color=INK, **style)


def main() -> None:
    figure, axes = plt.subplots(figsize=(11.4, 4.3))
    axes.set_xlim(0, 17.1)
    axes.set_ylim(0.1, 6.55)
    axes.axis("off")

    label(axes, 1.85, 6.2, "what you write", weight="bold")
    box(axes, (0.2, 3.75), (3.3, 2.05), "model.py\n\nan nn.Module,\nunchanged", color=PLAIN)
    spec = 'spec.json\n\n"encoder": "cuda:0"\n"decoder": "cuda:1"\n"replicas": 2'
    box(axes, (0.2, 0.75), (3.3, 2.45), spec, color=PLAIN, mono=True, font=9.2)

    label(axes, 6.75, 6.2, "what placer works out", weight="bold")
    box(axes, (5.1, 1.35), (3.3, 3.85), "", color=ACCENT)
    label(axes, 6.75, 4.8, "plan", size=11.5, weight="bold")
    plan = "stages and devices\nvalues that cross\npeak memory\ndoes it fit?"
    axes.text(
        6.75, 3.35, plan, ha="center", va="center", fontsize=10.5, color=INK, linespacing=1.75
    )
    label(axes, 6.75, 1.8, "nothing is allocated", style="italic")
    arrow(axes, (3.55, 4.7), (5.05, 3.7))
    arrow(axes, (3.55, 1.95), (5.05, 2.8))

    label(axes, 13.5, 6.2, "what you train: an nn.Module again", weight="bold")
    axes.add_patch(
        FancyBboxPatch(
            (10.1, 0.75),
            (6.8),
            5.05,
            boxstyle="round,pad=0,rounding_size=0.12",
            facecolor="white",
            edgecolor=INK,
        )
    )
    rows = ((3.55, 0, "first half of the batch"), (1.1, 2, "second half of the batch"))
    for y, first, rows_of in rows:
        label(axes, 13.5, y + 1.7, f"replica {first // 2}: {rows_of}", size=9.5)
        box(axes, (10.5, y), (2.4, 1.35), f"encoder\ncuda:{first}", color=FIRST)
        box(axes, (14.1, y), (2.4, 1.35), f"decoder\ncuda:{first + 1}", color=SECOND)
        arrow(axes, (12.95, y + 0.9), (14.05, y + 0.9))
        arrow(axes, (14.05, y + 0.45), (12.95, y + 0.45))
    label(axes, 13.5, 0.35, "same state_dict keys, same results", style="italic")
    arrow(axes, (8.45, 3.28), (10.05, 3.28))
    label(axes, 9.25, 3.6, "compile", size=9.5)

    figure.savefig(
        Path(__file__).with_name("overview.png"), dpi=130, bbox_inches="tight", facecolor="white"
    )


if __name__ == "__main__":
    main()
