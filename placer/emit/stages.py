"""Generate a Python function for each stage of a plan from the captured graph."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn
from torch.nn import functional as F

from placer.emit.boxed import BoxedCodeGen, compile_graph
from placer.emit.names import ReadPath, WithKeywords, is_plain, is_plain_path
from placer.emit.shards import expand_shards
from placer.emit.types import SegmentCode, StageCode, StagedModel
from placer.errors import PlanError
from placer.plan.types import Plan
from placer.program import Program, first_names, is_torch_leaf
from placer.program.graphs import new_node
from placer.program.targets import CallMethod, call_module
from placer.regions import Region
from placer.space import cut_inputs

_DEVICE, _TREE = "stage_device", "stage_layers"
_NORMS = frozenset({F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm})

# Graph of a program -> the nodes and regions of the latest plan's stages, and their code: a plan is emitted
# for its dry run, and again when it is placed.
_latest: WeakKeyDictionary[fx.Graph, tuple[Any, tuple[StageCode, ...]]] = WeakKeyDictionary()


def emit_stages(program: Program, plan: Plan, *, together: bool = True) -> StagedModel:
    """Code for all stages of ``plan``, whose nodes are those of ``program``.

    If stages are split in space, the code is that of all shards ``together``, or of any one of them.

    A stage runs its nodes in the plan's order, which its peak memory depends on. A value that a later
    stage reads is an output of its stage and an input of every stage that reads it. The last stage
    returns all results of the model, so that they are on one device. Raises ``PlanError`` if a node
    comes before a node that it reads.
    """
    made_from = together, tuple((stage.nodes, stage.regions) for stage in plan.stages)
    source, shard_of = program.graph, dict[str, int]()
    layouts = cut_inputs(program) if plan.shards > 1 else {}
    if together and plan.shards > 1:
        expanded = expand_shards(program, plan)
        program, plan, shard_of = expanded.program, expanded.plan, dict(expanded.shard_of)
    key, stages = _latest.get(source, (None, ()))
    if key != made_from:
        stages = _emit_all(program, plan, shard_of)
        _latest[source] = made_from, stages
    stage_of = {name: s for s, stage in enumerate(plan.stages) for name in stage.nodes}
    owners = _owners(program, stage_of)
    return StagedModel(
        stages=stages,
        graph_inputs=tuple(_placeholders(program.graph)),
        written_inputs=frozenset(program.written_inputs),
        result=_result(program.graph),
        returned_state=_returned_state(program.graph, owners),
        rows=program.captured.results,
        stored=program.captured.stored,
        replaced=program.captured.replaced,
        state=program.captured.state,
        state_stage=owners,
        constants=dict(program.captured.constants),
        constant_paths=program.captured.constant_paths,
        call=program.call,
        conditions=program.captured.conditions,
        together=together,
        shard_of=shard_of,
        layers=program.layers,
        layouts=layouts,
    )


def _emit_all(program: Program, plan: Plan, shard_of: Mapping[str, int]) -> tuple[StageCode, ...]:
    """The code of all stages."""
    stage_of = {name: s for s, stage in enumerate(plan.stages) for name in stage.nodes}
    num_stages = len(plan.stages)
    nodes = {node.name: node for node in program.graph.nodes}
    external = set(_placeholders(program.graph)) | set(program.captured.constants)
    result = _result(program.graph)
    returned = tuple(dict.fromkeys(name for kind, name in result if kind == "value"))

    reads: list[dict[str, None]] = [{} for _ in range(num_stages)]
    for name in program.order:
        if name in program.captured.constants:
            continue
        for source in nodes[name].all_input_nodes:
            if source.name in external or stage_of[source.name] != stage_of[name]:
                reads[stage_of[name]][source.name] = None
    for name in returned:
        if stage_of.get(name) != num_stages - 1 or name in program.captured.constants:
            reads[-1][name] = None
    read_elsewhere = {name for names in reads for name in names}

    stages = []
    for index, planned in enumerate(plan.stages):
        own = [n for n in planned.nodes if n not in program.captured.constants]
        _check_order(index, [nodes[name] for name in own])
        crossing = tuple(name for name in own if name in read_elsewhere)
        outputs = returned if index == num_stages - 1 else crossing
        stages.append(
            _emit_stage(
                program,
                index,
                [nodes[n] for n in own],
                tuple(reads[index]),
                outputs,
                planned.regions,
                shard_of,
            )
        )
    return tuple(stages)


def _placeholders(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.op == "placeholder"]


def _check_order(index: int, own: Sequence[fx.Node]) -> None:
    later = {node.name for node in own}
    for node in own:
        early = next((s.name for s in node.all_input_nodes if s.name in later), None)
        if early is not None:
            raise PlanError(
                f"stage {index}",
                f"{node.name!r} comes before {early!r}, which it reads",
                "restore the order of the stage's nodes, or plan again",
            )
        later.discard(node.name)


def _returned_state(graph: fx.Graph, state: Container[str]) -> dict[str, str]:
    nodes = [node for node in graph.output_node().all_input_nodes if node.op == "get_attr"]
    return {node.name: str(node.target) for node in nodes if node.target in state}


def _result(graph: fx.Graph) -> tuple[tuple[str, Any], ...]:
    (leaves,) = graph.output_node().args
    assert isinstance(leaves, list | tuple)
    return tuple(("value", x.name) if isinstance(x, fx.Node) else ("constant", x) for x in leaves)


def _owners(program: Program, stage_of: Mapping[str, int]) -> dict[str, int]:
    """Parameter or buffer -> the first stage that reads it, or 0 if none does.

    All names of a tied parameter have the same stage.
    """
    first_of = first_names(program.model)
    owner: dict[str, int] = {}
    for node, each in program.nodes.items():
        for name in each.reads:
            first = first_of[name]
            owner[first] = min(owner.get(first, stage_of[node]), stage_of[node])
    return {name: owner.get(first, 0) for name, first in first_of.items()}


def _emit_stage(
    program: Program,
    index: int,
    own: list[fx.Node],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    regions: Sequence[Region],
    shard_of: Mapping[str, int],
) -> StageCode:
    """Generate the segments of a stage with the nodes ``own``, from the last one to the first."""
    needed = set(outputs)  # values that later segments or stages read
    segments: list[SegmentCode] = []
    for part, region in reversed(list(_split_at_regions(own, regions))):
        inside = {node.name for node in part}
        reads = dict.fromkeys(s.name for n in part for s in n.all_input_nodes)
        taken = tuple(name for name in reads if name not in inside)
        given = tuple(node.name for node in part if node.name in needed)
        released = frozenset(taken) - needed
        segments.insert(0, _emit_segment(program, part, taken, given, released, region, shard_of))
        needed |= set(taken)
    modules = dict.fromkeys(name for segment in segments for name in segment.modules)
    attributes = dict.fromkeys(name for segment in segments for name in segment.attributes)
    return StageCode(
        index=index,
        inputs=inputs,
        outputs=outputs,
        modules=tuple(modules),
        attributes=tuple(attributes),
        state=tuple(dict.fromkeys(n for node in own for n in program.nodes[node.name].reads)),
        segments=tuple(segments),
    )


def _split_at_regions(
    own: list[fx.Node], regions: Sequence[Region]
) -> Iterator[tuple[list[fx.Node], Region | None]]:
    """Split the stage's nodes: (nodes, region) for each region, (nodes, None) between regions."""
    starts = {region.first: region for region in regions}
    part: list[fx.Node] = []
    current: Region | None = None
    for node in own:
        if node.name in starts:
            if part:
                yield part, current
            part, current = [], starts[node.name]
        part.append(node)
        if current is not None and node.name == current.last:
            yield part, current
            part, current = [], None
    if part:
        yield part, current


def _emit_segment(
    program: Program,
    own: list[fx.Node],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    released: frozenset[str],
    region: Region | None,
    shard_of: Mapping[str, int],
) -> SegmentCode:
    """Generate the function of a segment with the nodes ``own``.

    Nodes of ``shard_of`` read the modules and the device of their shard, which come first among the inputs.
    """
    graph = fx.Graph()
    graph.set_codegen(BoxedCodeGen(_TREE))
    device = graph.placeholder(_DEVICE)
    tree = None if all(map(_is_plain, own)) else graph.placeholder(_TREE)
    others = {
        shard: (graph.placeholder(f"{_TREE}_{shard}"), graph.placeholder(f"{_DEVICE}_{shard}"))
        for shard in range(1, 1 + max((shard_of.get(node.name, 0) for node in own), default=0))
    }
    values: dict[str, fx.Node] = {name: graph.placeholder(name) for name in inputs}
    modules: dict[str, None] = {}
    attributes: dict[str, None] = {}
    containers: dict[str, fx.Node] = {}
    taken = {*inputs, *(node.name for node in own)}
    for node in own:
        where = device
        if node.name in shard_of:
            own_tree, where = others[shard_of[node.name]]
            copied = _copy_without_names(graph, node, values, own_tree)
        elif tree is None or _is_plain(node):
            copied = _copy(graph, node, values, containers, taken)
        else:
            copied = _copy_without_names(graph, node, values, tree)
        values[node.name] = _follow_stage_device(node, copied, where)
        if node.op == "call_module":
            modules[str(node.target)] = None
        elif node.op == "get_attr":  # a tensor, or a module that is passed to a function
            is_module = isinstance(attrgetter(str(node.target))(program.model), nn.Module)
            (modules if is_module else attributes)[str(node.target)] = None
    graph.output(tuple(values[name] for name in outputs))
    forward = compile_graph(graph)
    written = (n for node in own for n in program.nodes[node.name].writes)
    return SegmentCode(
        inputs=inputs,
        outputs=outputs,
        released=released,
        modules=tuple(modules),
        attributes=tuple(attributes),
        written=tuple(dict.fromkeys(written)),
        reads_written=_reads_written(program, own),
        recompute=region is not None and region.recompute,
        offload=region is not None and region.offload,
        overlapped=region is not None and region.overlapped,
        shards=1 + len(others),
        forward=forward,
    )


def _reads_written(program: Program, own: Sequence[fx.Node]) -> bool:
    """Does one of the nodes read a parameter or buffer that one of them writes?

    A layer of torch or a norm, which writes statistics only, does not count.
    """
    infos, here = program.nodes, {node.name for node in own}
    writers = [node for node in own if infos[node.name].writes and node.target not in _NORMS]
    layers = [node for node in writers if node.op == "call_module"]
    for module in (program.model.get_submodule(str(layer.target)) for layer in layers):
        if not (is_torch_leaf(module) and type(module).__module__.startswith("torch.nn.modules.")):
            return True
    written = {name for node in writers for name in infos[node.name].writes}
    values = [(node, infos[node.name].reads) for node in own if node.op == "get_attr"]
    values += [(node, infos[node.name].writes) for node in writers if node not in layers]
    return any(
        user.name in here and not written.intersection(names).issubset(infos[user.name].writes)
        for value, names in values
        for user in value.users
    )


def _copy(
    graph: fx.Graph,
    node: fx.Node,
    values: Mapping[str, fx.Node],
    containers: dict[str, fx.Node],
    taken: set[str],
) -> fx.Node:
    """A copy of ``node`` in ``graph``; the layers of a block share the line that looks the block up.

    ``nn.Module`` finds a child in 0.3 µs, and a path has several. ``containers`` are the blocks so far, by
    path; their names are none of ``taken``.
    """
    owner, _, leaf = str(node.target).rpartition(".")
    if node.op != "call_module" or "." not in owner or not is_plain(leaf):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n.name])
        return new_node(graph, node.op, node.target, args, kwargs, node.name)
    if owner not in containers:
        name = owner.replace(".", "_")
        while name in taken:
            name += "_"
        taken.add(name)
        containers[owner] = graph.create_node("get_attr", owner, name=name)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n.name])
    return graph.create_node(
        "call_method", leaf, (containers[owner], *args), kwargs, name=node.name
    )


def _is_plain(node: fx.Node) -> bool:
    """Can the names of layers and keywords in ``node`` be written into source code?"""
    target = str(node.target) if node.op in ("call_module", "get_attr") else ""
    return (not target or is_plain_path(target)) and all(map(is_plain, node.kwargs))


def _copy_without_names(
    graph: fx.Graph, node: fx.Node, values: Mapping[str, fx.Node], tree: fx.Node
) -> fx.Node:
    """A copy of ``node`` in ``graph`` that keeps names of layers and keywords out of the source code."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n.name])
    if node.op == "get_attr":
        return graph.create_node(
            "call_function", ReadPath(str(node.target)), (tree,), name=node.name
        )
    function = CallMethod(str(node.target)) if node.op == "call_method" else node.target
    if node.op == "call_module":
        args = (graph.call_function(ReadPath(str(node.target)), (tree,)), *args)
        function = call_module
    assert callable(function)
    if not all(map(is_plain, kwargs)):
        args, function = (*args, *kwargs.values()), WithKeywords(function, kwargs)
        kwargs = {}
    return graph.create_node("call_function", function, args, kwargs, name=node.name)


def _follow_stage_device(node: fx.Node, copied: fx.Node, device: fx.Node) -> fx.Node:
    """Replace results of ``x.device``, and devices among the arguments, by the stage's device."""
    if node.op == "call_function" and node.target is getattr and node.args[1:2] == ("device",):
        return device
    if node.op in ("call_function", "call_method"):
        is_device = lambda x: isinstance(x, torch.device)  # noqa: E731
        given = copied.args, copied.kwargs
        args, kwargs = fx.node.map_aggregate(given, lambda x: device if is_device(x) else x)
        if (args, kwargs) != given:  # rarely, and fx takes long to change a node
            copied.args, copied.kwargs = args, kwargs
        if "device" in copied.kwargs and copied.kwargs["device"] is not None:
            copied.kwargs = {**copied.kwargs, "device": device}
    return copied
