"""``placer profile``: show estimated bytes and FLOPs per layer, and measure seconds on a device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from placer.cli.options import AsJson, ModelOptions
from placer.cli.output import human_console, print_json, progress, round_progress
from placer.tables import FittedTable

if TYPE_CHECKING:
    from placer.cost import CostTable
    from placer.profiling import Measured
    from placer.program import Program

_COLUMNS = ("parameters", "output", "saved", "transient", "forward_flops", "backward_flops")

Depth = Annotated[
    int | None,
    typer.Option("--depth", min=1, metavar="N", help="Show layers to this depth, with all inside."),
]
Precision = Annotated[str, typer.Option("--precision", help="fp32, bf16 or fp16.")]
Training = Annotated[
    bool, typer.Option("--training/--no-training", help="Include the backward pass.")
]


Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="Run the model on this device (cuda:0, cpu) and measure the seconds of every node.",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Measure, and write a file for --profile, or for the kind of a device in a spec.",
    ),
]
Rounds = Annotated[
    int, typer.Option("--rounds", min=1, metavar="N", help="Number of steps to measure.")
]
Kind = Annotated[
    str | None,
    typer.Option(
        "--kind",
        metavar="KIND",
        help="Kind of the device, for everything that is not measured: a name such as a100, or a "
        "file that 'placer calibrate' wrote.",
    ),
]

EXAMPLE = "placer profile net.py:Net --input 8x64 --depth 1 --device cpu -o net-profile.json"


def profile(
    model_options: ModelOptions,
    depth: Depth = None,
    precision: Precision = "fp32",
    training: Training = True,
    device: Device = None,
    kind: Kind = None,
    rounds: Rounds = 5,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Show estimated bytes and FLOPs of every layer for one batch; nothing is allocated.

    With --device or -o, the model also runs, forward and backward, to measure the seconds of every layer
    (medians over the steps after a warm-up). On a GPU, its memory is measured as well, beside what a plan
    predicts.
    """
    from placer.errors import PlacerError, nearest

    if precision not in ("fp32", "bf16", "fp16"):
        near = nearest(precision, ("fp32", "bf16", "fp16"))
        raise PlacerError("--precision", f"no precision {precision!r}", f"did you mean {near!r}?")
    model_options.check()
    console = human_console(as_json=as_json)
    measures = device is not None or output is not None
    with progress(console, "importing torch and the model"):
        from placer.cost import estimate_costs
        from placer.kindfile import save_kind
        from placer.profiling import (
            check_output,
            device_here,
            file_values,
            known_kind,
            profile_model,
        )

        check_output(output)
        loaded = model_options.load(allocate=measures)
    with progress(console, "recording the operations of the model"):
        program, leaves = loaded.program()
    measured, values = None, None
    if measures:
        place = device_here(device or "")
        with round_progress(console, f"running steps on {place}") as report_round:
            measured = profile_model(
                program,
                loaded.model,
                leaves,
                base=known_kind(place, kind),
                device=place,
                precision=precision,
                training=training,
                rounds=rounds,
                each_round=lambda number: report_round(number, rounds, "steps"),
            )
        values = file_values(measured.kind, place, inputs=leaves)
        costs = measured.costs
    else:
        costs = estimate_costs(program, leaves, training=training, precision=precision)
    rows = layer_costs(program, costs, depth)
    total = {column: sum(row[column] for row in rows.values()) for column in _COLUMNS}
    total["transient"] = max((row["transient"] for row in rows.values()), default=0)
    seconds = None if measured is None else layer_seconds(program, measured, depth)
    console.print(_table(rows, total) if seconds is None else _seconds_table(rows, seconds))
    memory = None
    if measured is not None and measured.memory is not None:
        memory = memory_rows(measured)
        console.print()
        console.print(_memory_table(memory))
    if output is not None and values is not None:
        save_kind(values, output)
        console.print(f"profile written to {output}", soft_wrap=True)
        console.print(f"  placer plan MODEL SPEC --profile {output}", markup=False)
    if as_json:
        layers = [
            {"layer": layer, **row, **(seconds[layer] if seconds else {})}
            for layer, row in rows.items()
        ]
        found: dict[str, Any] = {"layers": layers, "total": total}
        if measured is not None and seconds is not None:
            found["loss"] = seconds[_LOSS]
            found["optimizer_seconds"] = measured.times.optimizer
            found["step_seconds"] = measured.times.step
            found["memory"] = memory
        print_json(found)


_LOSS = "(the loss)"


def memory_rows(measured: Measured) -> dict[str, dict[str, int]]:
    """Bytes of a GPU in steps of the model on it, predicted by a plan and measured."""
    assert measured.memory is not None
    predicted, found = measured.memory.predicted, measured.memory.measured
    return {
        "tensors": {"predicted": predicted.peak},
        "workspaces": {"predicted": predicted.workspaces},
        "allocated": {
            "predicted": predicted.peak + predicted.workspaces, "measured": found.allocated
        },
        "reserved": {"predicted": predicted.reserved or 0, "measured": found.reserved},
        "context": {"predicted": predicted.context, "measured": measured.kind.context},
        "process": {
            "predicted": predicted.needed, "measured": found.reserved + measured.kind.context
        },
    }  # fmt: skip


_MEMORY = {
    "tensors": "tensors",
    "workspaces": "workspaces of kernels",
    "allocated": "tensors and workspaces",
    "reserved": "reserved by torch's allocator",
    "context": "context",
    "process": "the whole process",
}


def _memory_table(rows: Mapping[str, Mapping[str, int]]) -> FittedTable:
    from placer.quantities import format_bytes

    table = FittedTable()
    table.add_column("memory of a step, at its most", wraps=True)
    for header in ("predicted", "measured", "off by"):
        table.add_column(header, justify="right")
    for name, row in rows.items():
        predicted, found = row["predicted"], row.get("measured")
        cells = ["", ""]
        if found is not None:
            off = f"{predicted / found - 1:+.1%}" if found else ""
            cells = [format_bytes(found), off]
        table.add_row(_MEMORY[name], format_bytes(predicted), *cells)
    return table


def layer_seconds(
    program: Program, measured: Measured, depth: int | None
) -> dict[str, dict[str, float]]:
    """Layer -> measured seconds of its nodes in forward and in backward, and the estimate for both."""
    profile = measured.kind.profile
    assert profile is not None
    found: dict[str, dict[str, float]] = {}
    for way, of_nodes in zip(("forward", "backward"), profile.passes, strict=True):
        for name, (seconds, estimated) in of_nodes.items():
            layer = program.layers.get(name)
            home = _LOSS if layer is None else ".".join(layer.split(".")[:depth])
            row = found.setdefault(home, {})
            row[f"{way}_seconds"] = row.get(f"{way}_seconds", 0.0) + seconds
            row["estimated_seconds"] = row.get("estimated_seconds", 0.0) + estimated
    return found


def _seconds_table(
    rows: Mapping[str, Mapping[str, int]], seconds: Mapping[str, Mapping[str, float]]
) -> FittedTable:
    from placer.quantities import format_seconds

    whole = {
        column: sum(row[column] for row in seconds.values())
        for column in ("forward_seconds", "backward_seconds", "estimated_seconds")
    }
    total = whole["forward_seconds"] + whole["backward_seconds"]
    table = FittedTable(optional=("both, estimated",), show_footer=True)
    table.add_column("layer", footer="all", wraps=True)
    for column, heading in (
        ("forward_seconds", "forward"),
        ("backward_seconds", "backward"),
        ("estimated_seconds", "both, estimated"),
    ):
        table.add_column(heading, justify="right", footer=format_seconds(whole[column]))
    table.add_column("of time", justify="right")
    for layer in (*rows, _LOSS):
        row = seconds[layer]
        took = row["forward_seconds"] + row["backward_seconds"]
        table.add_row(
            layer or "(the model itself)",
            format_seconds(row["forward_seconds"]),
            format_seconds(row["backward_seconds"]),
            format_seconds(row["estimated_seconds"]),
            f"{took / total:.1%}" if total else "",
        )
    return table


def layer_costs(program: Program, costs: CostTable, depth: int | None) -> dict[str, dict[str, int]]:
    """Layer -> bytes and FLOPs, in program order; ``""`` is the model's own code.

    A tied parameter is counted where it is first used, and a saved value at the first node that saves it.
    ``output`` is the sum over the operations of the layer, ``transient`` the maximum.
    """
    homes = []
    for name in costs.names:
        parts = program.nodes[name].layer.split(".")
        homes.append(".".join(parts[:depth]))
    rows: dict[str, dict[str, int]] = {}
    for i, home in enumerate(homes):
        row = rows.setdefault(home, dict.fromkeys(_COLUMNS, 0))
        node = costs.nodes[i]
        row["output"] += node.output_nbytes
        row["forward_flops"] += node.forward_flops
        row["backward_flops"] += node.backward_flops
        live = max(node.forward_transient, node.backward_transient)
        row["transient"] = max(row["transient"], live)
    for tensor in costs.state:
        if tensor.readers and not tensor.is_buffer:
            rows[homes[tensor.readers[0]]]["parameters"] += tensor.nbytes
    for value in costs.values:
        savers = [node for node in value.savers if node < len(homes)]
        if savers:
            rows[homes[savers[0]]]["saved"] += value.nbytes
    return rows


def _table(rows: Mapping[str, Mapping[str, int]], total: Mapping[str, int]) -> FittedTable:
    left_out = ("transient", "output", "of FLOPs", "backward FLOPs", "forward FLOPs")
    table = FittedTable(optional=left_out, show_footer=True)
    table.add_column("layer", footer="all", wraps=True)
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
    from placer.quantities import format_bytes

    value = row[column]
    if not column.endswith("flops"):
        return format_bytes(value)
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.2f} {unit}"
    return str(value)
