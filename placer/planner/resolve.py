"""Applies a spec to a captured model: resolves layers to nodes, and "auto" to numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from placer.errors import SpecError
from placer.grid import NodeLayout
from placer.jsonfile import escape_token
from placer.partition import PlanningOptions
from placer.partition.policy.types import Policy
from placer.plan.check import one_copy
from placer.planner.devices import links_of
from placer.planner.notes import layer_paths, shared_modules
from placer.program import Program, is_inside
from placer.regions import RegionKey, region_keys
from placer.spec import PlacementSpec, resolve_layers, resolve_patterns
from placer.spec.check import Problem, execution_problems
from placer.spec.layers import match_paths
from placer.state_layout import ShardState, layout_of


def check_supported(spec: PlacementSpec, *, processes: bool) -> None:
    """Raise ``PlacerError`` for a spec that asks for something unsupported, with ``processes`` or without."""
    if problems := execution_problems(dict(spec)):  # of a spec that was made by `model_copy`
        raise SpecError(SpecError.UNNAMED, problems)
    if spec.shard_state in ("optimizer", "gradients") and not processes:
        raise one_copy()


def check_shard_over(spec: PlacementSpec, replicas: int) -> None:
    """Raise ``SpecError`` if state cannot be divided between as many replicas as the spec says."""
    if spec.shard_over == "auto" or replicas % spec.shard_over == 0:
        return
    near = max(n for n in range(1, spec.shard_over) if replicas % n == 0)
    problem = f"{spec.shard_over} does not divide the number of replicas, {replicas}"
    raise SpecError(SpecError.UNNAMED, [("/shard_over", problem, f"write {near}, or 'auto'")])


def wanted_devices(program: Program, spec: PlacementSpec) -> dict[str, str]:
    """The device of every node whose layer the spec places.

    If the spec places all layers on one device, the nodes between layers are on it too; otherwise the
    compiler places those. A module that cannot be split goes to the device of the layers inside it. Raises
    ``SpecError`` for layers that do not exist, and if the layers inside such a module are on several devices.
    """
    if not spec.layers:
        return {}
    placed, problems = resolve_layers(spec.layers, layer_paths(program))
    for layer, reason in _one_node_modules(program).items():
        inside = {path: device for path, device in placed.items() if _is_part(path, layer)}
        if len(set(inside.values())) > 1:
            problems.append(_on_two_devices(spec, layer, reason, inside))
        elif inside:
            placed[layer] = next(iter(inside.values()))
    if problems:
        raise SpecError(SpecError.UNNAMED, problems)
    for names in shared_modules(program.model):  # nodes have only a module's first name
        asked = [placed[name] for name in names if name in placed]
        if asked:
            placed.setdefault(names[0], asked[0])
    wanted = {node: placed[layer] for node, layer in program.layers.items() if layer in placed}
    devices = set(wanted.values())
    if len(devices) == 1 and all(node in wanted for node, layer in program.layers.items() if layer):
        return dict.fromkeys(program.layers, *devices)
    return wanted


def _one_node_modules(program: Program) -> dict[str, str]:
    """Modules that must be on one device with everything inside them, with the reason for each."""
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_module"}
    found = {
        layer: "it is one operation of torch.nn"
        for layer in sorted(targets)
        if next(program.model.get_submodule(layer).children(), None) is not None
    }
    return {**found, **{x.layer: x.located_reason for x in program.captured.whole_modules}}


def _module_around(path: str, whole: Mapping[str, str]) -> str | None:
    """The outermost module in ``whole`` that contains the module at ``path``; None if none does."""
    outer = (layer for layer in whole if layer != path and _is_part(path, layer))
    return min(outer, key=len, default=None)


def _is_part(path: str, layer: str) -> bool:
    """Whether the module at ``path`` is the one at ``layer`` ("": the whole model), or inside it."""
    return not layer or is_inside((layer,), path)


def _on_two_devices(
    spec: PlacementSpec, layer: str, reason: str, inside: Mapping[str, str]
) -> Problem:
    """The error for a spec that places parts of ``layer``, which cannot be split, on several devices."""
    (first, device), *others = inside.items()
    path, other = next((p, d) for p, d in others if d != device)
    pattern = next(p for p in reversed(spec.layers) if match_paths(p, [path]))
    name = layer or "the model"
    return (
        f"/layers/{escape_token(pattern)}",
        f"places {path} on {other!r}, but {name} stays whole on one device ({reason}), and {first} "
        f"is on {device!r}",
        f"place all of {name} on one device"
        + (", or move that line into a submodule of its own" if not layer else ""),
    )


def wanted_regions(program: Program, spec: PlacementSpec) -> tuple[RegionKey | None, ...]:
    """The region of each node by the spec's patterns, None if it has none; for inference all are None.

    Raises ``SpecError`` for patterns that match no layer, or only layers inside a module that stays whole.
    """
    by_field = {"checkpoint": spec.checkpoint, "offload": spec.offload}
    asked = {field: () if value == "auto" else value for field, value in by_field.items()}
    if not any(asked.values()):
        return (None,) * len(program.order)
    paths = layer_paths(program)
    whole = _one_node_modules(program)
    chosen, problems = {}, []
    for field, patterns in asked.items():
        found, unmatched = resolve_patterns(field, patterns, paths)
        chosen[field] = found if spec.training else set()
        problems += unmatched
        for index, pattern in enumerate(patterns):
            around = {_module_around(path, whole) for path in match_paths(pattern, paths) if path}
            if around and None not in around:
                layer = min(name for name in around if name is not None)
                problems.append(
                    (
                        f"/{field}/{index}",
                        f"{pattern!r} is inside {layer or 'the model'}, which stays whole "
                        f"({whole[layer]})",
                        f"write {layer!r}" if layer else "leave it out",
                    )
                )
    if problems:
        raise SpecError(SpecError.UNNAMED, problems)
    return region_keys(program, chosen["checkpoint"], chosen["offload"])


def policies_of(spec: PlacementSpec) -> tuple[Policy, ...]:
    """The policies that the spec allows the compiler to choose for saved activations."""
    recompute, offload = spec.checkpoint == "auto", spec.offload == "auto"
    if not spec.training:
        return ()
    found = [Policy(recompute=True)] * recompute + [Policy(offload=True)] * offload
    return (*found, *[Policy(recompute=True, offload=True)] * (recompute and offload))


def count_replicas(spec: PlacementSpec) -> int:
    """The number of replicas: the spec's, or for "auto" as many as this machine has devices for."""
    if spec.replicas != "auto":
        return int(spec.replicas)
    if spec.replica_devices:
        return 1 + len(spec.replica_devices)
    if spec.devices[0].name.startswith("cuda") and torch.cuda.is_available():
        return max(1, torch.cuda.device_count() // len(spec.devices))
    return 1


def planning_options(
    spec: PlacementSpec,
    sizes: Sequence[int],
    *,
    processes: bool,
    replicas: int = 1,
    host_correction: int = 0,
) -> PlanningOptions:
    """The planning options of the spec, for micro-batches with ``sizes`` rows.

    ``host_correction`` bytes of the host's budget are left free. Replicas share the rest if each has its
    own processes; in one process they run one after the other, so each can use all of it.
    """
    host_budget = spec.host_memory
    if host_budget is not None:
        host_budget = max(0, host_budget - host_correction) // (replicas if processes else 1)
    return PlanningOptions(
        objective="throughput" if spec.objective == "devices" else spec.objective,
        schedule="1F1B" if spec.schedule == "auto" else spec.schedule,
        microbatches=len(sizes),
        replicas=replicas,
        shards=spec.space.number,
        links=links_of(spec),
        node_layout=node_layout_of(spec),
        last_share=sizes[-1] / max(sizes[0], 1),
        optimizer=_optimizer(spec),
        training=spec.training,
        processes=processes,
        state_layout=layout_of(
            shard_state_of(spec),
            replicas=replicas,
            shards=spec.space.number,
            shard_over=None if spec.shard_over == "auto" else spec.shard_over,
        ),
        offload_overlap=spec.offload_overlap,
        host_budget=host_budget,
    )


def node_layout_of(spec: PlacementSpec) -> NodeLayout:
    """The spec's, or for "auto" the default, with which estimates are made."""
    return "stages" if spec.node_layout == "auto" else spec.node_layout


def shard_state_of(spec: PlacementSpec) -> ShardState:
    """The spec's, or for "auto" that of a model that fits without dividing anything."""
    return "none" if spec.shard_state == "auto" else spec.shard_state


def _optimizer(spec: PlacementSpec) -> str | Mapping[str, int]:
    if isinstance(spec.optimizer, str):
        return spec.optimizer
    return {"bytes_per_parameter": spec.optimizer.bytes_per_parameter}
