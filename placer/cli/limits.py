"""Print how far a model can be split: its pieces, and the modules that stay whole, with reasons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from placer.quantities import format_bytes, format_count
from placer.tables import Table

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN = 8  # how many modules are listed for one reason


def print_limits(console: Console, result: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Print the result of ``placer check`` without a spec; ``sizes`` maps a text like '16GiB' to bytes."""
    console.print(
        f"{result['nodes']} operations in {result['pieces']} pieces that can go to different "
        "devices\n"
    )
    pieces = result["pieces_per_layer"].items()
    rows = [(layer or "(the model itself)", str(count)) for layer, count in pieces]
    console.print(Table(columns={"layer": "words", "pieces": "number"}, rows=rows))
    console.print()
    _print_whole(console, result["whole_modules"])
    _print_largest(console, result["largest_piece"])
    _print_devices(console, result, sizes)
    for note in result["notes"]:
        console.print(f"note: {note}", style="dim", markup=False)


def _print_devices(console: Console, result: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    tried = result["tried"]
    per_replica = " for each replica" if tried["replicas"] > 1 else ""
    for size, devices in result["devices_needed"].items():
        understood = format_bytes(sizes[size])
        same = understood.replace(".00", "").replace(" ", "") == size
        each = size if same else f"{size} ({understood})"
        answer = f"does not fit on up to 64 devices of {each}"
        kept = result["kept_free"][size]
        if sizes[size] <= kept:
            answer = (
                f"does not fit on devices of {each}: the CUDA context and the reserve take "
                f"{format_bytes(kept)} of each"
            )
        elif devices:
            answer = f"fits on {format_count(devices, 'device')} of {each}{per_replica}"
        console.print(answer)
    if result["devices_needed"]:
        cut = format_count(tried["microbatches"], "micro-batch", "micro-batches")
        optimizer = f"training with {tried['optimizer']}" if tried["training"] else "inference"
        hint = (
            f"Tried in one process: {tried['precision']}, {optimizer}, {cut}, "
            f"{format_count(tried['replicas'], 'replica')}, without recomputing or offloading; "
            "others were not (--precision, --microbatches, --replicas). This counts tensors, the "
            "CUDA context and 2% of each device kept free; a plan also counts what torch's "
            "allocator loses."
        )
        console.print(hint, style="dim")


def _print_whole(console: Console, modules: list[dict[str, Any]]) -> None:
    """Print the modules that stay whole, grouped by class and reason, the slowest first in a group."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for module in modules:
        key = module["class"], module["reason"], module["location"]
        groups.setdefault(key, []).append(module)
    for (kind, reason, location), members in groups.items():
        members.sort(key=lambda m: -_share(m))
        names = ", ".join(m["layer"] or "the model itself" for m in members[:_SHOWN])
        more = f" and {len(members) - _SHOWN} more" if len(members) > _SHOWN else ""
        where = f" ({location})" if location else ""
        console.print(f"stays whole: {names}{more}: {reason}{where}", markup=False)
        limit = _limit(members[0])
        one = "it" if len(members) == 1 else "each"
        console.print(f"  {kind}: {one} is {members[0]['done']}{limit}", style="dim", markup=False)
        if not members[0]["layer"]:
            hint = "  if you move this code into a submodule, only that one stays whole"
            console.print(hint, style="dim", markup=False)


def _limit(module: Mapping[str, Any]) -> str:
    """How the module limits the number of equal stages, as the end of a sentence."""
    if "share_of_bytes" not in module:
        return ""
    rates = " by reference rates" if module["share_of_seconds"] is None else ""
    shares = (
        f"; {module['layer'] or 'it'} has {_share(module):.0%} of the time of a step{rates} and "
        f"{module['share_of_bytes']:.0%} of its memory"
    )
    stages = module["most_equal_stages"]
    if stages is None or stages > 16:
        return shares
    plural = "stage is" if stages == 1 else f"{stages} equal stages are"
    return (
        f"{shares}: no more than {plural} possible"
        if stages > 1
        else f"{shares}: its stage is the slowest, however the rest is split"
    )


def _share(module: Mapping[str, Any]) -> float:
    """The share of the module in the time of a step, by reference rates if the kind is not known."""
    share = module.get("share_of_seconds") or module.get("share_by_reference_rates")
    return float(share or 0.0)


def _print_largest(console: Console, largest: Mapping[str, Any] | None) -> None:
    if largest is None:
        return
    layers = [layer or "the model itself" for layer in largest["layers"]]
    more = f" and {len(layers) - 4} more" if len(layers) > 4 else ""
    peak, least = format_bytes(largest["peak"]), format_bytes(largest["least_bytes"])
    console.print(
        f"largest piece that cannot be split: {', '.join(layers[:4])}{more}. It needs {peak} on a "
        f"device of its own, and at least {least} in addition to other stages on its device. With "
        f"{peak} of usable memory per device, the model needs at least "
        f"{format_count(largest['least_devices'], 'device')}.",
        markup=False,
    )
