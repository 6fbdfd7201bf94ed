"""Writes the notes of a plan: what a user should know in addition to its numbers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from placer.cost import CostTable
from placer.errors import first_few
from placer.partition import PlanningOptions
from placer.planner.batch import rows_of_step
from placer.planner.devices import device_slot
from placer.program import Program
from placer.quantities import format_bytes, format_count
from placer.schedule import split_batch
from placer.space import count_chunked, count_windows, cuts_of, find_gathered
from placer.spec import PlacementSpec, resolve_layers

_NAMED = 3  # layers that a note names
_MOST_NAMED = 8  # devices of a replica that are named, not only the first and the last
_COMPILED = (
    "Stages are compiled when they first run. Peaks and times are those of stages that are not compiled: "
    "compiled ones save other activations, and may need more or less memory."
)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def _chunk_notes(program: Program, spec: PlacementSpec) -> list[str]:
    """What the spec's ``chunks`` do."""
    if spec.chunks in (1, "auto") or spec.space.number > 1:
        return []
    count = count_chunked(program)
    if not count:
        return [
            '"chunks": no convolution reads a concatenation of channels, so nothing is changed.'
        ]
    what = format_count(count, "convolution")
    return [f"{what} of concatenated channels run in up to {spec.chunks} chunks of planes."]


def _space_notes(program: Program, spec: PlacementSpec, costs: CostTable) -> list[str]:
    """How the model is cut, and which values are gathered because their readers cannot be."""
    cuts = cuts_of(program)
    if cuts is None and spec.space.number > 1:
        return [
            "Nothing is split in space, because nothing that can be cut reads an input of the model: "
            "everything runs whole."
        ]
    if cuts is None or cuts.shards == 1:
        return []
    grid = f" ({'x'.join(map(str, cuts.shape))})" if len(cuts.shape) > 1 else ""
    notes = [
        f"Every stage is split in space over {cuts.shards} devices{grid}, which exchange the edges of "
        f"their parts for {format_count(count_windows(program), 'operation')}."
    ]
    position = {name: i for i, name in enumerate(costs.names)}
    for reason, layer_of in find_gathered(program).items():
        layers = list(dict.fromkeys(layer_of.values()))
        more = f" and {len(layers) - _NAMED} more" if len(layers) > _NAMED else ""
        at = [position[name] for name in layer_of]
        nbytes = format_bytes(sum(costs.nodes[i].output_nbytes for i in at))
        sent = format_bytes(int(sum(part[at].sum() for part in costs.work.sent)))
        notes.append(
            f"Gathered, and run whole on every shard: {', '.join(layers[:_NAMED])}{more} ({reason}). That "
            f"gathers {nbytes} per micro-batch, for which a shard sends {sent}, forward and backward."
        )
    return notes


def placement_notes(
    program: Program,
    spec: PlacementSpec,
    options: PlanningOptions,
    costs: CostTable,
    *,
    rows: Sequence[Sequence[str]],
    microbatches: int,
) -> tuple[str, ...]:
    """The notes for ``program`` under ``spec`` that do not depend on the stages.

    ``rows`` are the devices of each replica. ``microbatches`` is the number asked for;
    ``options.microbatches`` is at most the number of rows of the batch.
    """
    replicas = len(rows)
    notes = [
        *_cut_notes(program, spec, replicas, microbatches),
        *_replica_notes(spec, rows),
        *_memory_notes(spec),
        *_room_notes(spec),
        *_shared_notes(program, spec),
        *_chunk_notes(program, spec),
        *_space_notes(program, spec, costs),
        *([_COMPILED] if spec.compile else []),
    ]
    is_split = options.microbatches > 1 or replicas > 1
    has_batch_norm = any(
        isinstance(m, _BATCH_NORMS) or getattr(m, "track_running_stats", False)
        for m in program.model.modules()
    )
    if is_split and program.call.batch_size is not None:
        split = [
            each.name if each.batch_dim == 0 else f"{each.name} (its dim {each.batch_dim})"
            for each in program.call.inputs
            if each.batch_dim is not None
        ]
        notes.append(f"The batch is split along dim 0 of {', '.join(split)}.")
    if is_split and has_batch_norm and spec.training and spec.batch_norm == "per_microbatch":
        notes.append(
            "BatchNorm in train mode takes its statistics, and InstanceNorm its running statistics, "
            "per micro-batch and replica, as with "
            "nn.DataParallel: results are those of the same slices run one after the other."
        )
    if is_split and has_batch_norm and spec.training and spec.batch_norm == "deferred":
        notes.append(
            "BatchNorm in train mode normalises by the statistics of each micro-batch and replica, "
            "but running statistics are updated once per step, as if the batch had not been split. "
            "This covers the buffers that torch's batch_norm and instance_norm update; other buffers "
            "change with every micro-batch."
        )
    if options.schedule != spec.schedule:
        notes.append(
            f"The schedule is {options.schedule}, not {spec.schedule}: both halves of a split backward would "
            "run what is recomputed, and keep it in between."
        )
    if options.microbatches > 1 and options.schedule != "GPipe":
        notes.append(
            f"placed.step() follows {options.schedule}. Calling the module and loss.backward() instead "
            "keeps all micro-batches at once, as GPipe does, and needs GPipe's memory."
        )
    whole: dict[str, list[str]] = {}
    for each in program.captured.whole_modules:
        whole.setdefault(each.located_reason, []).append(each.layer or "the model")
    for reason, layers in whole.items():
        stay = "stays whole on" if len(layers) == 1 else "stay whole, each on"
        notes.append(f"{', '.join(first_few(layers, 3))} {stay} one device: {reason}")
    if spec.checkpoint or spec.offload:
        notes += [
            f"{layer} is neither recomputed nor offloaded, because it changes attributes or variables, or "
            "differentiates, which a second run cannot do again"
            for layer in sorted(program.captured.changing)
        ]
    return (*notes, *program.captured.notes)


def _room_notes(spec: PlacementSpec) -> list[str]:
    """The devices that have no room for tensors, such as one whose memory lacks a zero."""
    slots = [device_slot(device, spec) for device in spec.devices]
    return [
        f"{slot.name} has no room for tensors: its context and what is kept free take "
        f"{format_bytes(slot.withheld)}, and its memory is {format_bytes(slot.budget)}."
        for slot in slots
        if slot.budget is not None and slot.withheld >= slot.budget
    ]


def _cut_notes(
    program: Program, spec: PlacementSpec, replicas: int, microbatches: int
) -> list[str]:
    """Notes for a batch that has too few rows for the requested replicas or micro-batches."""
    rows = rows_of_step(program, spec)
    if rows is None:
        return []
    cuts = split_batch(rows, replicas, microbatches)
    notes = []
    if len(cuts) < replicas:
        notes.append(
            f"A batch of {rows} rows gives work to only {len(cuts)} of {replicas} replicas."
        )
    if len(cuts[0]) < microbatches:
        notes.append(
            f"A replica's {format_count(sum(cuts[0]), 'row')} can fill only "
            f"{format_count(len(cuts[0]), 'micro-batch', 'micro-batches')}, not {microbatches}."
        )
    return notes


def _replica_notes(spec: PlacementSpec, rows: Sequence[Sequence[str]]) -> list[str]:
    """A note on the devices of replicas that the spec does not name; those of a machine are known."""
    if len(rows) == 1 or spec.replica_devices or spec.machine is not None:
        return []
    first, *others = [
        ", ".join(row) if len(row) <= _MOST_NAMED else f"{row[0]} … {row[-1]}" for row in rows
    ]
    return [
        f"{format_count(len(others), 'more replica')} on {'; '.join(others[:3])}{' …' * (len(others) > 3)}, "
        f"planned with the kind and memory of {first}."
    ]


def _memory_notes(spec: PlacementSpec) -> list[str]:
    """A note on devices to which the spec gives more memory than their kind has."""
    notes: dict[str, str] = {}  # one for each kind
    for device in spec.devices:
        has = device_slot(device.model_copy(update={"memory": None}), spec).budget
        if device.kind and device.memory and has and device.memory > has:
            note = (
                f'"memory" of {device.name} is {format_bytes(device.memory)}, but the kind {device.kind} has '
                f'{format_bytes(has)}. Leave "memory" out to plan with that.'
            )
            notes.setdefault(device.kind, note)
    return list(notes.values())


def _shared_notes(program: Program, spec: PlacementSpec) -> list[str]:
    """Notes on modules with several names, where the spec places these names on different devices."""
    if len(set(spec.layers.values())) < 2:
        return []
    placed, _ = resolve_layers(spec.layers, layer_paths(program))
    told: set[str] = set()
    notes = []
    for names in shared_modules(program.model):
        devices = list(dict.fromkeys(placed[name] for name in names if name in placed))
        inside = any(names[0].startswith(f"{name}.") for name in told)
        if len(devices) > 1 and not inside:
            told.add(names[0])
            notes.append(
                f"{' and '.join(names)} are one module: it is on {devices[0]}, not on "
                f"{' and '.join(devices[1:])}."
            )
    return notes


def layer_paths(program: Program) -> list[str]:
    """The paths that a spec's patterns can match: all names of every module."""
    return [name for name, _ in program.model.named_modules(remove_duplicate=False)]


def shared_modules(model: nn.Module) -> list[list[str]]:
    """All names of every module that has several, in order."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    return [group for group in names.values() if len(group) > 1]
