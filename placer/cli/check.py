"""``placer check``: check a spec against a model, or show how far a model can be split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from placer.cli.fields import spec_fields, spec_of_options
from placer.cli.findings import print_error_as, sarif
from placer.cli.options import REPEATABLE, AsJson, Kind, LossOptions, ModelOptions
from placer.cli.output import EXIT_NO_FIT, human_console, print_json
from placer.cli.progress import progress
from placer.errors import CaptureError, PlacerError, first_few, some_names

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from placer.cli.loaded_model import LoadedModel
    from placer.program import Program
    from placer.spec import PlacementSpec

_SHOWN = 6  # how many of the layers that the spec does not place are listed
_SIZES = ("8GiB", "16GiB", "24GiB", "80GiB")

Spec = Annotated[
    Path | None,
    typer.Argument(metavar="[SPEC]", help="Placement spec (JSON, YAML or TOML) to check."),
]
Form = Annotated[
    Literal["text", "json", "sarif", "github"],
    typer.Option(
        "--format",
        help="What is on stdout: text; json; sarif, for code scanners; or github, annotations of a workflow.",
    ),
]
Memory = Annotated[
    list[str],
    typer.Option(
        "--memory",
        metavar="SIZE",
        help="Without SPEC: say how many devices of this size the model needs; repeatable.",
        **REPEATABLE,
    ),
]
Fields = Annotated[
    dict[str, Any], spec_fields("optimizer", "training", "precision", "microbatches", "replicas")
]


EXAMPLE = "placer check net.py:Net spec.json --input 8x64"


def check(
    model_options: ModelOptions,
    memory: Memory,
    loss_options: LossOptions,
    fields: Fields,
    spec: Spec = None,
    kind: Kind = None,
    form: Form = "text",
    as_json: AsJson = False,
) -> None:
    """Check a spec against a model; without a spec, show how far the model can be split.

    A spec alone (one argument that ends in .json, .yaml or .toml) is checked too, without its layers.

    --memory and the options that are fields of a spec are for a model without a spec.
    """
    from placer.spec import load_spec
    from placer.spec.text import FORMATS

    form = "json" if as_json else form
    if spec is None and Path(model_options.model).suffix.lower() in FORMATS:
        _check_alone(Path(model_options.model), model_options, form)
        return
    console = human_console(as_json=form != "text")
    if spec is None:
        sizes = _sizes(memory)
        device = {"name": "cuda:0"} if kind is None else {"name": "cuda:0", "kind": kind}
        counted = {**fields, "loss": loss_options.spec(), "objective": "memory"}
        assumed = spec_of_options(devices=[device], **counted)
        model_options.check()
        _check_model(console, model_options.load(console), assumed, sizes, form)
        return
    wanted = loss_options.added_to(load_spec(spec, layer_paths=model_options.layer_paths))
    for option in ("memory",) * bool(memory) + tuple(fields):
        remedy = "leave it out, or leave out the spec to see how many devices the model needs"
        raise PlacerError(f"--{option}", f"cannot be given with a spec: {spec} has its own", remedy)
    model_options.check(inputs_required=False)
    loaded = model_options.load(console, inputs_required=False)
    from placer.cli.measured import with_kind

    _check_spec(console, loaded, with_kind(wanted, kind), str(spec), form)


def _print_result(form: str, result: dict[str, Any]) -> None:
    """Print the result of a check that found nothing wrong, in a form for programs."""
    if form == "json":
        print_json(result)
    elif form == "sarif":
        print_json(sarif("", [], None))


def _check_alone(path: Path, model_options: ModelOptions, form: str) -> None:
    """Print that the spec in ``path`` is valid, as far as that can be seen without a model."""
    from placer.quantities import format_bytes, format_count
    from placer.spec import load_spec

    if model_options.inputs:
        remedy = f"name the model: placer check MODEL {path} --input …"
        raise PlacerError(str(path), "is a spec, and --input is for a model", remedy)
    spec = load_spec(path)
    console = human_console(as_json=form != "text")
    alike: dict[tuple[str, str], list[str]] = {}  # memory and kind -> the devices
    for device in spec.devices:
        size = format_bytes(device.memory) if device.memory else ""
        alike.setdefault((size, device.kind or ""), []).append(device.name)
    devices = [" ".join(filter(None, (some_names(each), *of))) for of, each in alike.items()]
    patterns = format_count(len(spec.layers), "pattern")
    console.print(f"{path} is a valid spec for {', '.join(devices)}", markup=False)
    hint = f"to check its {patterns} of layers, name the model: placer check MODEL {path}"
    if spec.layers:
        console.print(hint, style="dim", markup=False)
    _print_result(form, {"valid": True, "layers_placed": None, "layers": None})


def _check_spec(
    console: Console, loaded: LoadedModel, spec: PlacementSpec, source: str, form: str
) -> None:
    """Print whether ``spec`` is valid for the model and, if there are inputs, whether it fits.

    Raises ``SpecError`` for patterns that match no layer, and exits if the plan does not fit.
    """
    from torch import nn

    from placer.api import check_layers
    from placer.cli.misfit import find_remedies, report_misfit, with_comparisons
    from placer.cost import find_loss
    from placer.report import plan_table
    from placer.search.auto import plan_of
    from placer.simulation.judge import JudgingPlanner
    from placer.spec import resolve_layers

    check_layers(loaded.model, spec)
    find_loss(spec.loss)
    modules = dict(loaded.model.named_modules(remove_duplicate=False))
    paths = [name for name in modules if name]
    placed = set(resolve_layers(spec.layers, paths)[0])
    lists = (nn.ModuleList, nn.ModuleDict, nn.Sequential)  # which compute nothing themselves
    for path in reversed(paths):
        parts = [f"{path}.{name}" for name, _ in modules[path].named_children()]
        if parts and isinstance(modules[path], lists) and placed.issuperset(parts):
            placed.add(path)
    places = f"it places {len(placed)} of {len(paths)} layers"
    if not spec.layers:
        places = f"it leaves the choice for all {len(paths)} layers to placer"
    console.print(f"{source} is valid for {loaded.target}: {places}", markup=False)
    free = [path for path in paths if path not in placed]
    if spec.layers and free:
        tops = [path for path in free if path.rpartition(".")[0] not in free]
        names = ", ".join(first_few(tops, _SHOWN))
        console.print(f"not in the spec, so placer chooses: {names}", markup=False)
    result: dict[str, Any] = {"valid": True, "layers_placed": len(placed), "layers": len(paths)}
    if not loaded.has_inputs:
        console.print("give --input to see whether it fits", style="dim")
        _print_result(form, result)
        return
    program, leaves = loaded.record(console, spec)
    make = JudgingPlanner(program, leaves)
    with progress(console, "planning", make):
        made = with_comparisons(plan_of(spec, make), spec, make)
    console.print(plan_table(made))
    if made.fits or form == "json":
        _print_result(form, {**result, "fits": made.fits})
    if not made.fits:
        error = find_remedies(console, spec, made, make)
        if form != "json":
            print_error_as(form, error, EXIT_NO_FIT, source)
        report_misfit(console, spec, made, make, error)


def _check_model(
    console: Console,
    loaded: LoadedModel,
    assumed: PlacementSpec,
    sizes: Sequence[tuple[str, int]],
    form: str,
) -> None:
    """Print how far the model can be split, and how many devices of each size it needs under ``assumed``."""
    from placer.cli.limits import print_limits
    from placer.planner.cut_limits import count_pieces
    from placer.quantities import format_count

    program, leaves = loaded.record(console)
    rows = program.call.batch_size or 1
    if rows < (parts := int(assumed.replicas) * int(assumed.microbatches)):
        problem = (
            f"the batch of the example has {format_count(rows, 'row')}, too few for {parts} parts"
        )
        raise PlacerError("--microbatches, --replicas", problem, "give an --input with more rows")
    pieces = count_pieces(program)
    operations = Counter(program.layers.values())
    whole = [
        {
            "layer": module.layer,
            "class": type(loaded.model.get_submodule(module.layer)).__qualname__,
            "reason": module.reason,
            "location": module.location,
            "done": "kept whole on one device",
            "calls": operations[module.layer],
        }
        for module in program.captured.whole_modules
    ]
    notes = (
        [f"only this batch size: {program.captured.fixed_batch_reason}"]
        if program.captured.fixed_batch_reason
        else []
    )
    notes += program.captured.notes
    result: dict[str, Any] = {
        "nodes": len(program.order),
        "pieces": pieces.count,
        "pieces_per_layer": pieces.per_layer,
        "whole_modules": whole,
        "largest_piece": None,
        "devices_needed": {},
        "kept_free": {size: _kept_free(nbytes) for size, nbytes in sizes},
        "tried": _tried(assumed),
        "notes": notes,
    }
    try:
        result |= _measured(program, leaves, assumed, sizes, whole, notes)
    except (
        CaptureError
    ) as error:  # for example if a module that stays whole reads values of tensors
        notes.append(f"memory cannot be estimated: {error.where} {error.problem}")
    print_limits(console, result)
    _print_result(form, result)


def _measured(
    program: Program,
    leaves: Sequence[Tensor],
    assumed: PlacementSpec,
    sizes: Sequence[tuple[str, int]],
    whole: Sequence[dict[str, Any]],
    notes: list[str],
) -> dict[str, Any]:
    from placer.cost import CostEstimates
    from placer.plan.summary import describe_loss
    from placer.planner.cut_limits import devices_needed, measure_limits
    from placer.planner.unknown_times import unknown_kinds

    estimate = CostEstimates(program)
    limits = measure_limits(program, leaves, assumed, estimate)
    known = not unknown_kinds(assumed)

    def share(seconds: float) -> dict[str, float | None]:
        rounded = round(seconds, 4)
        return {
            "share_of_seconds": rounded if known else None,
            "share_by_reference_rates": None if known else rounded,
        }

    loss: dict[str, Any] = {}
    if (counted := limits.loss) is not None:
        notes.append(describe_loss(counted, "the last stage's device"))
        kept = {"function": counted.function, "assumed": counted.assumed, "bytes": counted.nbytes}
        loss = {"loss": kept}
    for module in whole:
        found = limits.whole[module["layer"]]
        module |= {
            **share(found.seconds),
            "share_of_bytes": round(found.nbytes, 4),
            "most_equal_stages": found.most_stages,
        }
    return loss | {
        "largest_piece": {
            "peak": limits.largest.peak,
            "least_bytes": limits.least_bytes,
            "least_devices": limits.least_devices,
            **share(limits.largest_share.seconds),
            "layers": list(limits.largest.layers),
            "nodes": list(limits.largest.nodes),
        },
        "devices_needed": {
            size: devices_needed(program, leaves, assumed, nbytes, estimate)
            for size, nbytes in sizes
        },
    }


def _tried(spec: PlacementSpec) -> dict[str, Any]:
    """The choices under which numbers of devices were found."""
    fields = ("precision", "microbatches", "replicas", "training", "optimizer")
    return {field: getattr(spec, field) for field in fields}


def _kept_free(memory: int) -> int:
    """Bytes of a device with ``memory`` bytes that tensors may not use: the context and the reserve."""
    from placer.planner.devices import device_slot
    from placer.spec import DeviceSpec, PlacementSpec

    device = DeviceSpec(name="cuda:0", memory=memory)
    return device_slot(device, PlacementSpec(devices=(device,))).withheld


def _sizes(texts: list[str]) -> list[tuple[str, int]]:
    from placer.spec.fields import device_memory

    sizes = []
    for text in texts or _SIZES:
        try:
            sizes.append((text, device_memory(int(text) if text.isdecimal() else text)))
        except ValueError as error:
            raise PlacerError("--memory", str(error)) from None
    return sizes
