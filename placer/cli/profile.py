"""``placer profile``: show estimated bytes and FLOPs per layer, and measure seconds on a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from placer.cli.fields import spec_fields, spec_of_options
from placer.cli.options import AsJson, Kind, ModelOptions, to_file
from placer.cli.output import human_console, print_json, tell_written
from placer.cli.progress import progress
from placer.quantities import BYTES, FLOPS, SECONDS, Units
from placer.tables import Table

if TYPE_CHECKING:
    from placer.cost import CostTable
    from placer.profiling import Measured
    from placer.program import Program

_COLUMNS = ("parameters", "output", "saved", "transient", "forward_flops", "backward_flops")
_PASSES = ("forward_seconds", "backward_seconds")
_LOSS = "(the loss)"

Depth = Annotated[
    int | None,
    typer.Option("--depth", min=1, metavar="N", help="Show layers to this depth, with all inside."),
]
Fields = Annotated[dict[str, Any], spec_fields("precision", "training")]
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
    to_file(
        "FILE", "Measure, and write a file for --profile, or for the kind of a device in a spec."
    ),
]
Rounds = Annotated[
    int, typer.Option("--rounds", min=1, metavar="N", help="Number of steps to measure.")
]
EXAMPLE = "placer profile net.py:Net --input 8x64 --depth 1 --device cpu"


def profile(
    model_options: ModelOptions,
    fields: Fields,
    depth: Depth = None,
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
    counted = spec_of_options(devices=["cpu"], **fields)
    model_options.check()
    console = human_console(as_json=as_json)
    measures = device is not None or output is not None
    loaded = model_options.load(console, allocate=measures)
    from placer.cost import estimate_costs
    from placer.machine.kindfile import save_kind
    from placer.profiling import check_output, device_here, file_values, known_kind, profile_model

    check_output(output)
    program, leaves = loaded.record(console)
    measured, values = None, None
    if measures:
        place = device_here(device or "")
        with progress(console, f"running steps on {place}") as told:
            measured = profile_model(
                program,
                loaded.model,
                leaves,
                base=known_kind(place, kind),
                device=place,
                precision=counted.precision,
                training=counted.training,
                rounds=rounds,
                each_round=lambda number: told.doing(f"step {number}"),
            )
        values = file_values(measured.kind, place)
        costs = measured.costs
    else:
        costs = estimate_costs(
            program, leaves, training=counted.training, precision=counted.precision
        )
    rows = layer_costs(program, costs, depth)
    total = {column: sum(row[column] for row in rows.values()) for column in _COLUMNS}
    total["transient"] = max((row["transient"] for row in rows.values()), default=0)
    seconds = None if measured is None else layer_seconds(program, measured, depth)
    console.print(_costs_table(rows, total) if seconds is None else _seconds_table(rows, seconds))
    memory = None
    if measured is not None and measured.memory is not None:
        memory = memory_rows(measured)
        console.print()
        console.print(_memory_table(memory))
    if output is not None and values is not None:
        save_kind(values, output)
        tell_written(console, "profile", output)
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


def _memory_table(rows: Mapping[str, Mapping[str, int]]) -> Table:
    headers = ("memory of a step, at its most", "predicted", "measured", "off by")
    cells: list[list[str | float]] = []
    for name, row in rows.items():
        predicted, found = row["predicted"], row.get("measured")
        off = f"{predicted / found - 1:+.1%}" if found else ""
        cells.append([name, predicted, "" if found is None else found, off])
    return Table(
        headers=headers, rows=cells, names=headers[:1], units=dict.fromkeys(headers[1:3], BYTES)
    )


def layer_seconds(
    program: Program, measured: Measured, depth: int | None
) -> dict[str, dict[str, float]]:
    """Layer -> measured seconds of its nodes in forward and in backward, and the estimate for both."""
    profile = measured.kind.profile
    assert profile is not None
    found: dict[str, dict[str, float]] = {}
    for way, of_nodes in (("forward", profile.forward), ("backward", profile.backward)):
        for name, (seconds, estimated) in of_nodes.items():
            layer = program.layers.get(name)
            home = _LOSS if layer is None else ".".join(layer.split(".")[:depth])
            row = found.setdefault(home, {})
            row[f"{way}_seconds"] = row.get(f"{way}_seconds", 0.0) + seconds
            row["estimated_seconds"] = row.get("estimated_seconds", 0.0) + estimated
    return found


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


def _costs_table(rows: Mapping[str, Mapping[str, int]], total: Mapping[str, int]) -> Table:
    figures = {column: (column, BYTES) for column in _COLUMNS[:-2]}
    figures |= {"forward_flops": ("forward", FLOPS), "backward_flops": ("backward", FLOPS)}
    optional = ("transient", "output", "of FLOPs", "backward", "forward")
    return _layers_table(rows, total, figures, ("of FLOPs", _COLUMNS[-2:]), optional)


def _seconds_table(
    rows: Mapping[str, Mapping[str, int]], seconds: Mapping[str, Mapping[str, float]]
) -> Table:
    figures = {
        "forward_seconds": ("forward", SECONDS),
        "backward_seconds": ("backward", SECONDS),
        "estimated_seconds": ("estimated", SECONDS),
    }
    total = {column: sum(row[column] for row in seconds.values()) for column in figures}
    shown = {layer: seconds[layer] for layer in (*rows, _LOSS)}
    return _layers_table(shown, total, figures, ("of time", _PASSES), ("estimated", "of time"))


def _layers_table(
    rows: Mapping[str, Mapping[str, float]],
    total: Mapping[str, float],
    figures: Mapping[str, tuple[str, Units]],
    share: tuple[str, Sequence[str]],
    optional: Sequence[str],
) -> Table:
    """A row per layer, and one for all of them.

    ``figures`` maps what a row has to a header and units; ``share`` is a header, and what its share is of.
    """
    header, summed = share
    whole = sum(total[column] for column in summed)

    def cells(name: str, row: Mapping[str, float]) -> list[str | float]:
        part = sum(row[column] for column in summed)
        return [name, *(row[column] for column in figures), f"{part / whole:.1%}" if whole else ""]

    def shown(layer: str) -> str:
        if not layer:
            return "(the model itself)"
        parts = any(other.startswith(f"{layer}.") for other in rows)
        return f"{layer} (itself)" if parts else layer  # without what its parts have

    return Table(
        headers=("layer", *(text for text, _ in figures.values()), header),
        names=("layer",),
        rows=[cells(shown(layer), row) for layer, row in rows.items()],
        optional=optional,
        footer=cells("all", total),
        units=dict(figures.values()),
    )
