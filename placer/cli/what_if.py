"""``placer what-if``: what would be different if a spec said something else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from placer.cli.auto import Devices, written_devices
from placer.cli.fields import errors_name_options, spec_fields
from placer.cli.options import AsJson, Kind, ModelOptions, Processes
from placer.cli.output import EXIT_NO_FIT, human_console, print_json
from placer.cli.progress import progress
from placer.errors import PlacerError, first_few
from placer.plan.types import Plan
from placer.spec import PlacementSpec
from placer.spec.rows import shifted_rows

Count = Annotated[
    int | None,
    typer.Option(
        "--devices",
        metavar="N",
        min=1,
        help="So many devices per replica, like the first one. Layers of others are placed anew.",
    ),
]
Fields = Annotated[
    dict[str, Any],
    spec_fields(
        *("microbatches", "schedule", "replicas", "checkpoint", "offload", "chunks", "space"),
        *(
            "precision",
            "optimizer",
            "batch_norm",
            "objective",
            "batch",
            "shard_state",
            "shard_over",
        ),
        has_spec=True,
    ),
]
Spec = Annotated[
    Path | None,
    typer.Argument(metavar="[SPEC]", help="Placement spec. Without it, MODEL is a saved plan."),
]

_SHOWN = 6  # layers that are placed anew

EXAMPLE = "placer what-if plan.json --microbatches 4"


def what_if(
    model_options: ModelOptions,
    fields: Fields,
    device: Devices,
    spec: Spec = None,
    devices: Count = None,
    processes: Processes = False,
    kind: Kind = None,
    as_json: AsJson = False,
) -> None:
    """Plan a model with a spec, and with a changed one, and show what is different.

    Give MODEL and SPEC with their options, or only a plan that 'plan -o' or 'auto --plan' saved. Options that
    are fields of a spec are the changes, and so are --devices, --device and, where the devices have a kind,
    --kind. The exit code is 3 if the changed one does not fit.
    """
    from placer.spec import load_spec

    if spec is not None:
        before = load_spec(spec, layer_paths=model_options.layer_paths)
    else:
        from placer.cli.sources import made_of, saved_plan

        saved = saved_plan(model_options)
        model_options, before = made_of(saved, model_options)
        processes |= saved.processes
    new_kind = kind if all(each.kind for each in before.devices) else None
    changed = _with_devices(before, devices, device, new_kind) | fields
    if not changed.get("offload"):
        changed.pop("offload_overlap", None)
    if not fields and devices is None and not device and not new_kind:
        raise PlacerError("options", "change nothing", "give one, such as --microbatches 4")
    with errors_name_options(device or [each.name for each in before.devices]):
        after = PlacementSpec.model_validate(changed)
    model_options.check()
    console = human_console(as_json=as_json)
    anew = [
        f"{layer} (was on {name})"
        for layer, name in before.layers.items()
        if layer not in after.layers
    ]
    if anew:
        console.print(f"placed anew: {', '.join(first_few(anew, _SHOWN))}", markup=False)
    loaded = model_options.load(console)
    from placer.cli.measured import with_kind
    from placer.report import verdict
    from placer.report.differences import differences
    from placer.simulation.judge import JudgingPlanner
    from placer.tables import Table

    plans: list[Plan] = []
    for spec_of, name in ((before, "as it is"), (after, "changed")):
        if not plans or after.batch != before.batch:
            make = JudgingPlanner(*loaded.record(console, spec_of), processes=processes)
        with progress(console, f"planning {name}", make):
            plans.append(make(with_kind(spec_of, None if new_kind else kind)))
    changes = differences(*plans)
    headers = ("", "as it is", "changed")
    if changes:
        console.print(Table(headers=headers, rows=changes, names=headers, words=headers[1:]))
    else:
        console.print("no difference")
    told = [f"note: {note}" for note in plans[1].notes if note not in plans[0].notes]
    console.print("\n".join(["", *told, *verdict(plans[1])]), markup=False, soft_wrap=True)
    if as_json:
        texts = [change._asdict() for change in changes]
        print_json({"fits": plans[1].fits, "changes": texts})
    if not plans[1].fits:
        raise typer.Exit(EXIT_NO_FIT)


def _with_devices(
    before: PlacementSpec, count: int | None, texts: Sequence[str], kind: str | None
) -> dict[str, Any]:
    """The fields of ``before`` with ``count`` devices, those of ``texts``, or devices of another ``kind``."""
    changed: dict[str, Any] = json.loads(before.to_json())
    if count is not None and texts:
        raise PlacerError("--devices", "is given, and --device too", "leave out one of them")
    first = before.devices[0]
    if texts:
        devices: list[Any] = written_devices(texts, kind or first.kind)
        changed.pop("replica_devices", None)
    elif before.machine is not None and kind is None:
        if count is None:
            return changed
        stages, left = divmod(count, before.space.number)
        if left:
            remedy = f"give a multiple of {before.space.number}, its devices per stage"
            raise PlacerError("--devices", f"{count} devices are no whole number of stages", remedy)
        return {**changed, "stages": stages}
    else:
        rows = () if count is None else shifted_rows([first.name], count)
        like = [first.model_copy(update={"name": name}) for (name,) in rows] or before.devices
        devices = [{"name": each.name, "kind": kind} if kind else each for each in like]
    names = [each["name"] if isinstance(each, dict) else each.name for each in devices]
    layers = {pattern: name for pattern, name in before.layers.items() if name in names}
    changed.pop("machine", None)
    if len(devices) != len(before.devices):
        changed.pop("stages", None)
    return {**changed, "devices": devices, "layers": layers}
