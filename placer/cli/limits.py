"""Print how far a model can be split: its pieces, and the modules that stay whole, with reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from placer.errors import first_few
from placer.quantities import format_bytes, format_count
from placer.tables import Table

if TYPE_CHECKING:
    from rich.console import Console

_SECONDS = ("share_of_seconds", "share_by_reference_rates")  # one of them is known


def print_limits(console: Console, result: Mapping[str, Any]) -> None:
    """Print the result of ``placer check`` without a spec."""
    console.print(
        f"{result['nodes']} operations in {result['pieces']} pieces that can go to different "
        "devices\n"
    )
    pieces = result["pieces_per_layer"].items()
    rows = [(layer or "(the model itself)", str(count)) for layer, count in pieces]
    console.print(Table(headers=("layer", "pieces"), rows=rows, words=("layer",)))
    console.print()
    _print_whole(console, result["whole_modules"])
    _print_largest(console, result["largest_piece"])
    _print_devices(console, result)
    for note in result["notes"]:
        console.print(f"note: {note}", style="dim", markup=False)


def _print_devices(console: Console, result: Mapping[str, Any]) -> None:
    tried = result["tried"]
    per_replica = " for each replica" if tried["replicas"] > 1 else ""
    for size, devices in result["devices_needed"].items():
        if devices:
            console.print(f"fits on {format_count(devices, 'device')} of {size}{per_replica}")
        else:
            kept = format_bytes(result["kept_free"][size])
            console.print(
                f"does not fit on up to 64 devices of {size}, of which context and what is kept free take "
                f"{kept}"
            )
    if result["devices_needed"]:
        largest = result["largest_piece"]
        least = format_count(largest["least_devices"], "device")
        peak = format_bytes(largest["peak"])
        console.print(
            f"on smaller ones: at least {least}, each with {peak} for tensors, as the largest piece needs"
        )
        choices = ", ".join(f"{name} {value}" for name, value in tried.items())
        hint = (
            f"Tried in one process: {choices}; without recomputing or offloading. This counts tensors, the "
            "CUDA context and 2% of each device kept free; a plan also counts what torch's allocator loses."
        )
        console.print(hint, style="dim")


def _print_whole(console: Console, modules: Sequence[Mapping[str, Any]]) -> None:
    """Print the modules that stay whole on one device, the slowest first, and why.

    "most stages" is how many equal stages are possible with a module.
    """
    if not modules:
        return
    rows = [
        (
            module["layer"] or "the model itself",
            module["class"],
            f"{_share(module, _SECONDS):.0%}",
            f"{_share(module, ('share_of_bytes',)):.0%}",
            str(module.get("most_equal_stages") or ""),
            " ".join(filter(None, (module["reason"], module["location"]))),
        )
        for module in sorted(modules, key=lambda module: -_share(module, _SECONDS))
    ]
    headers = ("stays whole", "class", "of time", "of memory", "most stages", "why")
    words = ("stays whole", "class", "why")
    console.print(Table(headers=headers, rows=rows, words=words, optional=headers[1:5]))
    if any(not module["layer"] for module in modules):
        console.print("move this code into a submodule, and only that one stays whole", style="dim")
    console.print()


def _share(module: Mapping[str, Any], keys: Sequence[str]) -> float:
    """The first share of a module that is known; 0 if none is."""
    return float(next((module[key] for key in keys if module.get(key) is not None), 0.0))


def _print_largest(console: Console, largest: Mapping[str, Any] | None) -> None:
    if largest is None:
        return
    layers = [layer or "the model itself" for layer in largest["layers"]]
    peak, least = format_bytes(largest["peak"]), format_bytes(largest["least_bytes"])
    console.print(
        f"largest piece that cannot be split: {', '.join(first_few(layers, 4))}. It needs {peak} on a "
        f"device of its own, and {least} or more on a device that it shares with other stages.",
        markup=False,
        soft_wrap=True,
    )
