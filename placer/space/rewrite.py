"""The rewrite that splits a program in space: every shard of a stage has a part of each value."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from pydantic import JsonValue
from torch import Tensor, fx

from placer._torch import storage_key
from placer.errors import CaptureError, SpecError
from placer.operands import tensors_of_tree
from placer.program import Program, register_rewrite, with_graph
from placer.program.rows.dependence import name_of
from placer.program.targets import UnderModes
from placer.space.call import Call, Local, Replace, Rule
from placer.space.chunks import CONVOLUTIONS, chunk_rewrites, find_joins, parts_of_join
from placer.space.inputs import input_layouts, refuse_unknown
from placer.space.layout import Layout
from placer.space.nodes import CutWhole, GatherParts, SpreadWhole, WholeShape
from placer.space.operators import FIRST
from placer.space.queries import OWN_BOXES
from placer.space.rules import find_rule
from placer.space.values import whole_values
from placer.spec import PlacementSpec
from placer.spec.layers import resolve_patterns
from placer.spec.rewrite import Rewrite

SPACE = "space"
_MAYBE_VIEWS = ("contiguous", "reshape", "reshape_as", "flatten")  # views if strides allow
_MOVING = ("permute", "transpose", "swapaxes", "getitem", "__getitem__")


def spec_rewrites(
    spec: PlacementSpec, inputs: Sequence[str], *, processes: bool
) -> tuple[Rewrite, ...]:
    """The rewrites that ``spec`` asks for: a split in space, or convolutions in chunks.

    ``inputs`` are the names of the model's. Only with ``processes``, one per device, are there inputs of
    which a process has its own part. Raises ``SpecError`` if what is cut is said of others.
    """
    space = spec.space
    if space.number == 1:
        return chunk_rewrites(spec.chunks)
    settings: dict[str, JsonValue] = {"shards": space.number}
    if isinstance(spec.chunks, int) and spec.chunks > 1:
        settings["chunks"] = spec.chunks
    for name in ("grid", "dims", "layers"):
        if given := getattr(space, name):
            settings[name] = list(given)
    if spec.space_dims:
        refuse_unknown(spec.space_dims, inputs)
        settings["inputs"] = {pattern: list(dims) for pattern, dims in spec.space_dims.items()}
    if space.own_boxes and processes:
        settings[OWN_BOXES] = True
    return (Rewrite(name=SPACE, settings=settings),)


@register_rewrite(SPACE)
def split_in_space(program: Program, settings: Mapping[str, JsonValue]) -> Program:
    """Let every shard have a part of each value: windows, norms, sums and gathers are nodes of the program.

    ``settings`` are ``shards``, and perhaps the ``grid``, ``dims`` of the inputs, patterns of ``layers``
    outside of which nothing is cut, the dims of some ``inputs``, the number of ``chunks``, and whether each
    process has ``own_boxes`` (`own_parts`). Raises ``SpecError`` if no input can be cut so, and
    ``CaptureError`` if forward writes to its inputs.
    """
    if program.written_inputs:
        raise CaptureError(
            f"input {program.written_inputs[0]}",
            "is changed in place by forward, which cannot be split in space",
            'leave out "space"',
        )
    values = whole_values(program)
    cutter = _Cutter(program, values, settings)
    whole: set[fx.Node] = set()
    while True:  # nodes that share memory that is written are all cut, or none is
        graph, layer_of = cutter.cut(whole)
        more = cutter.torn(whole)
        if not more:
            break
        whole |= more
    return with_graph(program, graph, layer_of)


@dataclass
class _Values:
    """The nodes that stand for one value of the original graph, each made when it is first read."""

    whole: fx.Node | None = None
    parts: fx.Node | None = None
    layout: Layout | None = None  # of ``parts``
    likely: Layout | None = None  # how to cut ``whole`` where a reader can run on parts
    is_state: bool = False  # a parameter or buffer, which every shard has
    spread: fx.Node | None = None


@dataclass
class _Cutter:
    """Writes the graph of a program whose values are cut."""

    program: Program
    values: Mapping[fx.Node, Any]
    settings: Mapping[str, JsonValue]
    _of: dict[fx.Node, _Values] = field(default_factory=dict)
    _rules: dict[str, Rule] = field(default_factory=dict)
    _uncut: set[fx.Node] = field(default_factory=set)
    _fixed: set[fx.Node] = field(default_factory=set)  # numbers that are the same in every call
    _upright: set[fx.Node] = field(default_factory=set)  # cut; their rows are the first dimension

    def __post_init__(self) -> None:
        self._modules = dict(self.program.model.named_modules(remove_duplicate=False))
        self._inputs = input_layouts(self.program, self.settings)
        patterns = cast("list[str]", self.settings.get("layers") or ["**"])
        inside, unmatched = resolve_patterns("space/layers", patterns, self._modules)
        if patterns == ["**"]:
            inside.add("")
        elif unmatched:
            raise SpecError(SpecError.UNNAMED, unmatched)
        self._chosen = inside
        self._shared = {name for group in self.program.colocated for name in group}
        self._joins = find_joins(self.program)
        self._parts_of = {join: parts_of_join(join) for join in self._joins}

    # -- the graph --------------------------------------------------------------------------------------

    def cut(self, whole: set[fx.Node]) -> tuple[fx.Graph, dict[str, str]]:
        """The graph, and the layer of each node; nodes of ``whole`` run on whole values."""
        self._graph, self._layer_of = fx.Graph(), dict(self.program.layers)
        self._of, self._rules, self._uncut = {}, {}, whole
        self._fixed, self._upright = set(), set()
        for node in self.program.graph.nodes:
            if node.op == "output":
                read = partial(self._whole, reader=node, reason="")
                self._graph.output(fx.node.map_arg(node.args[0], read))
            elif node.op == "placeholder":
                self._enter(node)
            elif self._is_fact(node):
                self._write_fact(node)
            elif node in self._joins and self._is_read_in_parts(node):
                pass
            else:
                self._write(node)
        layers = {
            node.name: self._layer_of[node.name]
            for node in self._graph.nodes
            if node.op not in ("placeholder", "output")
        }
        return self._graph, layers

    def torn(self, whole: set[fx.Node]) -> set[fx.Node]:
        """The nodes that share memory that is written, of which only some are cut."""
        node_of = {node.name: node for node in self.program.graph.nodes}
        found: set[fx.Node] = set()
        for group in self.program.colocated:
            known = [name for name in group if name in self._rules]
            cut = [name for name in known if not isinstance(self._rules[name], str)]
            if cut and len(cut) < len(known):
                found |= {node_of[name] for name in group}
        return found - whole

    def _enter(self, node: fx.Node) -> None:
        copied = self._graph.node_copy(node)
        self._of[node] = _Values(whole=copied, likely=self._inputs.get(node.name))
        if all(each.batch_dim in (0, None) for each in self.program.call.inputs):
            self._upright.add(node)

    def _write_fact(self, node: fx.Node) -> None:
        """A size, which may depend on the number of rows, is asked of the parts; others are constants."""
        name, source = name_of(node), node.all_input_nodes[0]
        is_shape = name in ("size", "numel") or node.args[1] == "shape"
        layout = self._of[source].layout
        sizes = [*node.args[1:], *node.kwargs.values()] if name == "size" else []
        cut = layout or self._of[source].likely
        if source.op == "placeholder":
            layout = cut  # so that no operation needs the whole input
        if sizes and isinstance(sizes[0], int) and cut is not None:
            dim = sizes[0] % len(cut.shape)
            if dim in cut.dims or (source in self._upright and dim >= FIRST):
                self._fixed.add(node)
        if not is_shape or layout is None:
            if is_shape:  # of a whole value
                whole = self._copy(node, lambda x: self._of[x].whole)
                self._of[node] = _Values(whole=whole)
            return
        target = WholeShape(layout)
        part = self._parts(source, node)
        counts = name == "numel"
        name = f"{node.name}_shape" if sizes or counts else node.name
        made = self._new(node, "call_function", target, (part,), name)
        if counts:
            made = self._new(node, "call_method", "numel", (made,), node.name)
        elif sizes:
            index = fx.node.map_arg(sizes[0], lambda x: self._whole(x, node, ""))
            made = self._new(node, "call_function", operator.getitem, (made, index), node.name)
        self._of[node] = _Values(whole=made)

    def _is_fact(self, node: fx.Node) -> bool:
        """Is it a size, a type or a device of a value that is cut?"""
        name = name_of(node)
        if name == "getattr" and node.args[1:] not in (("shape",), ("dtype",), ("device",)):
            return False
        known = name in ("getattr", "size", "numel") and node.op != "get_attr"
        return known and any(self._is_cut(x) for x in node.all_input_nodes)

    def _is_cut(self, node: fx.Node) -> bool:
        found = self._of.get(node)
        return found is not None and (found.layout is not None or found.likely is not None)

    def _is_read_in_parts(self, join: fx.Node) -> bool:
        """Are all tensors that ``join`` joins cut alike, so that its readers can take them?"""
        found = [self._of.get(part) for part in self._parts_of[join]]
        layouts = [x.layout or x.likely for x in found if x is not None]
        dims = {layout.dims for layout in layouts if layout is not None}
        return (
            len(dims) == 1
            and None not in layouts
            and all(isinstance(self._rule(user), Replace) for user in join.users)
        )

    def _write(self, node: fx.Node) -> None:
        self._offer(node)
        if node.all_input_nodes and all(x in self._fixed for x in node.all_input_nodes):
            self._fixed.add(node)
        if not any(self._is_cut(x) for x in self._read(node)):
            self._of[node] = _Values(
                whole=self._copy(node, lambda x: self._whole(x, node, "")),
                is_state=node.op == "get_attr",
            )
            return
        self._rules[node.name] = rule = self._rule(node)
        if self._keeps_rows_first(node, rule):
            self._upright.add(node)
        if isinstance(rule, str):
            made = self._copy(node, lambda x: self._whole(x, node, rule))
            self._of[node] = _Values(whole=made, likely=self._like_an_input(node))
        elif isinstance(rule, Local):
            layout = self._layout(node, rule.dims)
            made = self._copy(node, lambda x: self._aligned(x, node, layout))
            self._of[node] = _Values(parts=made, layout=layout)
        else:
            self._replace(node, rule)

    def _keeps_rows_first(self, node: fx.Node, rule: Rule) -> bool:
        """Are the rows the first dimension of the result, as of all that is cut of its inputs?"""
        result = self.values[node]
        moves = isinstance(rule, Local) and name_of(node) in _MOVING
        if isinstance(rule, str) or moves or not isinstance(result, Tensor):
            return False
        given = [x for x in self._read(node) if self._is_cut(x)]
        return all(x in self._upright and self.values[x].dim() == result.dim() for x in given)

    def _offer(self, node: fx.Node) -> None:
        """A whole value that a convolution reads, as after the tokens of a transformer, may be cut again."""
        if node.op != "call_module" or not isinstance(
            self._modules[str(node.target)], CONVOLUTIONS
        ):
            return
        source, rank = node.all_input_nodes[0], self.values[node].dim()
        if (found := self._of.get(source)) is None or found.whole is None or self._is_cut(source):
            return
        for like in self._inputs.values():
            if len(like.shape) == rank and min(like.dims) >= FIRST:
                layout = Layout(like.cuts, tuple(self.values[source].shape), like.dims)
                found.likely = layout if layout.can_be_cut else None
                return

    def _read(self, node: fx.Node) -> list[fx.Node]:
        """What ``node`` reads; for a concatenation that is not made, what it joins."""
        return [
            part
            for x in node.all_input_nodes
            for part in (self._parts_of[x] if x in self._joins and x not in self._of else (x,))
        ]

    def _rule(self, node: fx.Node) -> Rule:
        if node in self._uncut:
            return "it shares memory that is written with what is not cut"
        if isinstance(node.target, UnderModes):
            return "it runs under other modes"
        layer = self.program.layers[node.name]
        if layer not in self._chosen:
            return 'it is not among the "layers" that are cut'
        module = self._modules[str(node.target)] if node.op == "call_module" else None
        name = type(module).__name__ if module is not None else name_of(node)
        layouts = {}
        for x in self._read(node):
            found = self._of.get(x)
            layout = None if found is None else found.layout or found.likely
            if layout is not None:
                layouts[x] = layout
        parts_of = {x: y for x, y in self._parts_of.items() if x not in self._of}
        count = cast(int, self.settings.get("chunks", 1))
        shared = node.name in self._shared
        return find_rule(
            Call(node, name, module, self.values, layouts, parts_of, count, self._fixed, shared)
        )

    def _replace(self, node: fx.Node, rule: Replace) -> None:
        given: list[Any] = []
        if rule.takes_layer:
            target = str(node.target)
            given.append(self._new(node, "get_attr", target, (), f"{node.name}_layer"))
        given += fx.node.map_arg(list(rule.parameters), lambda x: self._state(x, node))
        for x, layout in rule.layouts.items():
            if not self._is_cut(x):
                self._of[x].likely = layout
        parts = [self._parts(x, node) for x in rule.inputs]
        for i, operation in enumerate(rule.before):
            name = f"{node.name}_pad{i or ''}"
            parts[i] = self._new(node, "call_function", operation, (parts[i],), name)
        given += parts
        made = self._new(node, "call_function", rule.operation, tuple(given), node.name)
        if rule.operation.is_whole:
            self._of[node] = _Values(whole=made)
        else:
            self._of[node] = _Values(parts=made, layout=self._layout(node, rule.dims))

    def _state(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """A weight, as every shard has it."""
        found = self._of[node]
        assert found.whole is not None
        if found.is_state:
            return found.whole
        return self._spread(found, reader)

    def _layout(self, node: fx.Node, dims: Sequence[int]) -> Layout:
        cuts = next(iter(self._inputs.values())).cuts
        shapes = [tuple(x.shape) for x in tensors_of_tree(self.values[node])]
        return Layout(cuts, shapes[0], tuple(dims))

    def _like_an_input(self, node: fx.Node) -> Layout | None:
        """How a result that was made of whole values is cut again: like an input of the same lengths."""
        result = self.values[node]
        if not isinstance(result, Tensor):
            return None
        for x in node.all_input_nodes:
            layout = self._of[x].layout or self._of[x].likely if x in self._of else None
            if layout is None or len(layout.shape) != result.dim():
                continue
            if all(layout.shape[d] == result.shape[d] for d in layout.dims):
                return Layout(layout.cuts, tuple(result.shape), layout.dims)
        return None

    # -- the forms of a value ---------------------------------------------------------------------------

    def _copy(self, node: fx.Node, read: Any) -> fx.Node:
        made = self._graph.node_copy(node, read)
        if self._is_written_copy(node):
            made = self._new(node, "call_method", "clone", (made,), f"{node.name}_copy")
        return made

    def _is_written_copy(self, node: fx.Node) -> bool:
        """Is it a copy that is written, but a view if it reads a contiguous value, as a gathered one is?"""
        if name_of(node) not in _MAYBE_VIEWS or node.name not in self._shared:
            return False
        source, made = self.values[node.all_input_nodes[0]], self.values[node]
        return storage_key(source) != storage_key(made)

    def _new(
        self, reader: fx.Node, op: str, target: Any, arguments: tuple[Any, ...], name: str
    ) -> fx.Node:
        """A node of the layer that ``reader`` belongs to."""
        made = self._graph.create_node(op, target, arguments, name=name)
        layer = self.program.layers.get(reader.name, "")
        self._layer_of[made.name] = layer
        return made

    def _whole(self, node: fx.Node, reader: fx.Node, reason: str) -> Any:
        """The whole value of ``node``; a number, if it is one that is known."""
        found = self._of.get(node)
        if found is None:
            if node in self._joins:
                return self._join(node, reader, reason)
            return self._known(node)
        if found.whole is None:
            assert found.parts is not None and found.layout is not None
            if not isinstance(self.values[node], Tensor):
                raise CaptureError(
                    f"layer {self.program.layers[node.name]}",
                    f"{node.name} makes several tensors in parts, and {reader.name} reads them whole",
                    'name the layers to cut in "space": {"layers": […]}',
                )
            found.whole = self._new(
                node,
                "call_function",
                GatherParts(found.layout, reader.name if reason else "", reason),
                (found.parts,),
                f"{node.name}_all",
            )
        return found.whole

    def _join(self, node: fx.Node, reader: fx.Node, reason: str) -> fx.Node:
        """A concatenation after all."""
        made = self._copy(node, lambda x: self._whole(x, reader, reason))
        self._of[node] = _Values(whole=made)
        return made

    def _known(self, node: fx.Node) -> Any:
        value = self.values[node]
        return tuple(value) if isinstance(value, torch.Size) else value

    def _parts(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """The parts of a value that is cut, or may be."""
        found = self._of[node]
        if found.parts is None:
            assert found.likely is not None and found.whole is not None
            found.layout = found.likely
            found.parts = self._new(
                reader, "call_function", CutWhole(found.likely), (found.whole,), f"{node.name}_cut"
            )
        return found.parts

    def _aligned(self, node: fx.Node, reader: fx.Node, layout: Layout) -> Any:
        """``node`` for an operation on parts, whose result has this ``layout``."""
        found = self._of.get(node)
        if found is None:
            return self._known(node)
        if found.layout is not None or found.likely is not None:
            return self._parts(node, reader)
        value = self.values[node]
        if not isinstance(value, Tensor):
            return found.whole
        shift = len(layout.shape) - value.dim()
        dims = [d - shift for d in layout.dims]
        if all(d >= 0 and value.shape[d] == layout.shape[d + shift] > 1 for d in dims):
            found.likely = Layout(layout.cuts, tuple(value.shape), tuple(dims))
            return self._parts(node, reader)
        if found.is_state:
            return found.whole
        return self._spread(found, reader)

    def _spread(self, found: _Values, reader: fx.Node) -> fx.Node:
        if found.spread is None:
            assert found.whole is not None
            found.spread = self._new(
                reader,
                "call_function",
                SpreadWhole(next(iter(self._inputs.values()))),
                (found.whole,),
                f"{found.whole.name}_each",
            )
        return found.spread
