"""``placer profile``: bytes and FLOPs per layer, from the cost floor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from placer.cli.options import AsJson, SubjectOptions
from placer.cli.output import people, plain_table, print_json, progress

if TYPE_CHECKING:
    from rich.table import Table

    from placer.capture import Capture
    from placer.cost import CostTable

_COLUMNS = ("parameters", "output", "saved", "transient", "forward_flops", "backward_flops")

Depth = Annotated[
    int | None,
    typer.Option("--depth", min=1, metavar="N", help="Sum up layers below this depth of the path."),
]
Precision = Annotated[str, typer.Option("--precision", help="fp32, bf16 or fp16.")]
Training = Annotated[
    bool, typer.Option("--training/--no-training", help="Count the backward pass too.")
]


EXAMPLE = "placer profile net.py:Net --input 8x64 --depth 1"


def profile(
    subject: SubjectOptions,
    depth: Depth = None,
    precision: Precision = "fp32",
    training: Training = True,
    as_json: AsJson = False,
) -> None:
    """Show bytes and FLOPs of every layer for one batch, estimated; nothing is allocated."""
    from placer.errors import PlacerError, nearest

    if precision not in ("fp32", "bf16", "fp16"):
        near = nearest(precision, ("fp32", "bf16", "fp16"))
        raise PlacerError("--precision", f"no precision {precision!r}", f"did you mean {near!r}?")
    subject.check()
    console = people(as_json=as_json)
    with progress(console, "importing torch and the model"):
        from placer.cost import estimate_costs

        loaded = subject.load()
    with progress(console, "recording the operations of the model"):
        capture, leaves = loaded.capture()
    costs = estimate_costs(capture, leaves, training=training, precision=precision)
    rows = layer_costs(capture, costs, depth)
    total = {column: sum(row[column] for row in rows.values()) for column in _COLUMNS}
    total["transient"] = max((row["transient"] for row in rows.values()), default=0)
    console.print(_table(rows, total))
    if as_json:
        layers = [{"layer": layer, **row} for layer, row in rows.items()]
        print_json({"layers": layers, "total": total})


def layer_costs(capture: Capture, costs: CostTable, depth: int | None) -> dict[str, dict[str, int]]:
    """Layer -> bytes and FLOPs, in program order; ``""`` is the model's own code.

    ``parameters`` counts a tied parameter where it is used first; ``output`` what the layer's
    operations give; ``saved`` each value once, with its first saver; ``transient`` is a maximum.
    """
    homes = []
    for name in costs.names:
        parts = capture.layer_of[name].split(".")
        homes.append(".".join(parts[:depth]))
    rows: dict[str, dict[str, int]] = {}
    counted: set[str] = set()
    for i, home in enumerate(homes):
        row = rows.setdefault(home, dict.fromkeys(_COLUMNS, 0))
        node = costs.nodes[i]
        row["output"] += node.output_nbytes
        row["forward_flops"] += node.forward_flops
        row["backward_flops"] += node.backward_flops
        live = max(node.forward_transient, node.backward_transient)
        row["transient"] = max(row["transient"], live)
        for name in costs.parameters_of[i]:
            kept = costs.alias_of[name]
            if kept not in counted:
                counted.add(kept)
                row["parameters"] += costs.state_nbytes[kept]
    for value in costs.values:
        savers = [node for node in value.savers if node < len(homes)]
        if savers:
            rows[homes[savers[0]]]["saved"] += value.nbytes
    return rows


def _table(rows: Mapping[str, Mapping[str, int]], total: Mapping[str, int]) -> Table:
    table = plain_table(show_footer=True)
    table.add_column("layer", footer="all", overflow="fold")
    for column in _COLUMNS:
        table.add_column(
            column.replace("_", " ").replace("flops", "FLOPs"),
            justify="right",
            footer=_figure(column, total),
        )
    whole = total["forward_flops"] + total["backward_flops"]
    table.add_column("of FLOPs", justify="right")
    for layer, row in rows.items():
        work = row["forward_flops"] + row["backward_flops"]
        share = f"{work / whole:.1%}" if whole else ""
        figures = (_figure(column, row) for column in _COLUMNS)
        table.add_row(layer or "(the model itself)", *figures, share)
    return table


def _figure(column: str, row: Mapping[str, int]) -> str:
    from placer.units import format_bytes

    value = row[column]
    if not column.endswith("flops"):
        return format_bytes(value)
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.2f} {unit}"
    return str(value)
