"""Finds blocks of a program that repeat, as layers of a transformer do, and leaves most of them out.

What a run of the shortened program says of a block in the middle holds for all blocks that were left out,
if it says the same of two of them (`placer.cost.expand`).
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from placer.program.graphs import new_node
from placer.program.state import first_names, named_state
from placer.program.types import Program

# Of every repeat the first two blocks and the last two are kept: those in the middle see only their like.
KEPT = 4
# A value that more than `KEPT` nodes read, over more nodes than this, is known by its name, not by how many
# nodes ago it was made: all blocks may read it (masks, rotary tables, the input of a scan). The number that
# finds the longest repeats wins.
_WIDE = (64, 250, 1000)
_MOST_PERIODS = 30  # tried, those of which most nodes speak first
_LEAST_SAVED = 16  # nodes that shortening must leave out to be worth its time
# Operations that take the same memory and time whichever probability or factor they are called with.
_ANY_SHARE = frozenset(("bernoulli_", "div_", "mul_", nn.functional.dropout))
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """``count`` equal blocks of ``period`` nodes each, one after the other, from position ``begin``."""

    begin: int
    period: int
    count: int

    @property
    def end(self) -> int:
        """The position after its last node."""
        return self.begin + self.period * self.count

    @property
    def saved(self) -> int:
        """The number of nodes in the blocks that are left out."""
        return self.period * (self.count - KEPT)

    def block_of(self, position: int) -> int | None:
        """The number of the block that the node at ``position`` is in; None if it is in none."""
        return (position - self.begin) // self.period if self.begin <= position < self.end else None

    def is_kept(self, block: int) -> bool:
        """Is this one of the blocks that run?"""
        return block < KEPT // 2 or block >= self.count - KEPT // 2


@dataclass(frozen=True, kw_only=True)
class Shortened:
    """A program without most of its repeated blocks.

    ``order`` are the names of the nodes that run. The last two blocks of a repeat read what its second one
    makes. Where nodes outside a repeat read a result of a block that is left out, a `stand_in` runs.
    """

    program: Program
    repeats: tuple[Repeat, ...]
    graph: fx.Graph
    order: tuple[str, ...]

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """The position in the program of each node that runs, and of the loss."""
        of = {name: i for i, name in enumerate(self.program.order)}
        return (*(of[name] for name in self.order), len(of))


def shorten(program: Program) -> Shortened | None:
    """``program`` without most of its repeated blocks; None if it has too few to be worth it."""
    repeats = find_repeats(program)
    if sum(repeat.saved for repeat in repeats) < _LEAST_SAVED:
        return None
    position = {name: i for i, name in enumerate(program.order)}
    nodes = [node for node in program.graph.nodes if node.name in position]
    place = {
        node: (repeat, block)
        for repeat in repeats
        for node in nodes[repeat.begin : repeat.end]
        if not repeat.is_kept(block := (position[node.name] - repeat.begin) // repeat.period)
    }

    def like(node: fx.Node) -> fx.Node:
        """The node of the second block that stands for ``node``."""
        repeat, block = place[node]
        found: fx.Node = nodes[position[node.name] - (block - 1) * repeat.period]
        return found

    def read(reader: fx.Node, node: fx.Node) -> fx.Node:
        if node not in place:
            return made[node]
        repeat = place[node][0]
        inside = repeat.block_of(position.get(reader.name, -1)) is not None
        return made[like(node)] if inside else stands[node]

    graph, made, stands = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
    for node in program.graph.nodes:
        if node not in place:
            made[node] = graph.node_copy(node, partial(read, node))
            made[node].name = node.name
            continue
        repeat = place[node][0]
        if any(repeat.block_of(position.get(user.name, -1)) is None for user in node.users):
            args = (made[like(node)],)
            stands[node] = new_node(graph, "call_function", stand_in, args, {}, node.name)
    order = tuple(node.name for node in graph.nodes if node.op not in ("placeholder", "output"))
    return Shortened(program=program, repeats=repeats, graph=graph, order=order)


def stand_in(value: Any) -> Any:
    """A value like ``value``, whose gradient goes nowhere."""
    return _StandIn.apply(value) if isinstance(value, Tensor) else value


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return torch.empty_strided(
            value.size(), value.stride(), dtype=value.dtype, device=value.device
        )

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        return None


def find_repeats(program: Program) -> tuple[Repeat, ...]:
    """The repeats of ``program`` of more than `KEPT` blocks, in order; heuristic, the longest first.

    Blocks are equal if their nodes are the same operations, on state of the same shapes, and read what was
    made as many nodes before, or what the same node made before the first of them. They read nothing of
    earlier blocks than the one before, share no memory and no state that is written with other nodes, and
    differ in no argument but the index of a ``select`` and the probabilities of dropout.
    """
    crossing = _crossing(program)
    coder = _Coder(program)
    found = [_disjoint(program, coder(wide), crossing) for wide in _WIDE]
    return max(found, key=lambda repeats: sum(repeat.saved for repeat in repeats))


def _disjoint(
    program: Program, codes: NDArray[np.int64], crossing: Sequence[int]
) -> tuple[Repeat, ...]:
    """The longest repeats first, then those that overlap none of them."""
    candidates = sorted(_candidates(codes, crossing), key=lambda r: (-r.saved, r.period, r.begin))
    chosen: list[Repeat] = []
    separate = None
    for repeat in candidates:
        if all(repeat.end <= other.begin or other.end <= repeat.begin for other in chosen):
            separate = separate or _Separation(program)
            repeat = separate.without_last_readers(repeat)
            if repeat.saved > 0 and separate(repeat):
                chosen.append(repeat)
    return tuple(sorted(chosen, key=lambda r: r.begin))


def _candidates(codes: NDArray[np.int64], crossing: Sequence[int]) -> Iterator[Repeat]:
    """Every run of equal periods of codes, for the periods of which most codes speak.

    ``crossing`` is that of `_crossing`.
    """
    votes, latest = Counter[int](), dict[int, int]()
    for i, code in enumerate(codes.tolist()):
        if code in latest:
            votes[i - latest[code]] += 1
        latest[code] = i
    for period, _ in votes.most_common(_MOST_PERIODS):
        equal = np.concatenate(([False], codes[period:] == codes[:-period], [False]))
        edges = np.flatnonzero(np.diff(equal))
        for begin, end in edges.reshape(-1, 2).tolist():
            alike = range(begin, min(begin + period, end + period - (KEPT + 1) * period + 1))
            if len(alike) > 1:
                # Blocks meet after the first reader of what is between layers: the sum of the gradients of a
                # residual is from the first node of a layer to that of the one before.
                begin = min(alike[:-1], key=lambda i: crossing[i]) + 1
                yield Repeat(begin=begin, period=period, count=(end + period - begin) // period)


def _crossing(program: Program) -> list[int]:
    """For each position, how many values that earlier nodes made are read there or later."""
    position = {name: i for i, name in enumerate(program.order)}
    change = [0] * (len(position) + 2)
    for node in program.graph.nodes:
        if node.name in position and node.users:
            change[position[node.name] + 1] += 1
            change[max(position.get(user.name, len(position)) for user in node.users) + 1] -= 1
    return list(itertools.accumulate(change))


class _Separation:
    """Whether the blocks of a repeat share nothing with each other and with others but what they read."""

    def __init__(self, program: Program) -> None:
        position = {name: i for i, name in enumerate(program.order)}
        self._groups = [tuple(position[n] for n in group) for group in program.colocated]
        first = first_names(program.model)
        readers = defaultdict[str, set[int]](set)
        for name, info in program.nodes.items():
            for state in (*info.reads, *info.writes):
                readers[first[state]].add(position[name])
        written = {first[state] for info in program.nodes.values() for state in info.writes}
        self._groups += [tuple(group) for name, group in readers.items() if name in written]
        self._ends = [
            (min(group), max(group)) for name, group in readers.items() if name not in written
        ]
        self._sources = {
            position[node.name]: [
                position[s.name] for s in node.all_input_nodes if s.name in position
            ]
            for node in program.graph.nodes
            if node.name in position
        }

    def without_last_readers(self, repeat: Repeat) -> Repeat:
        """``repeat`` without its last block if the gradient of a state that its blocks read begins there."""
        blocks = [tuple(map(repeat.block_of, ends)) for ends in self._ends]
        begins = any(first != last == repeat.count - 1 for first, last in blocks)
        return replace(repeat, count=repeat.count - 1) if begins else repeat

    def __call__(self, repeat: Repeat) -> bool:
        for group in self._groups:
            if len({repeat.block_of(position) for position in group}) > 1:
                return False
        for node in range(repeat.begin, repeat.end):
            block = repeat.block_of(node) or 0
            for source in self._sources[node]:
                other = repeat.block_of(source)
                if other is not None and other < block - 1:
                    return False
        return True


class _Coder:
    """Numbers for the nodes of a program, equal for nodes that cost the same if what they read is alike."""

    def __init__(self, program: Program) -> None:
        modules = dict(program.model.named_modules())
        state = {name: _describe(tensor) for name, tensor in named_state(program.model)}
        self._position = {name: i for i, name in enumerate(program.order)}
        self._numbers: dict[Hashable, int] = {}
        # For each node what it does, but for what it reads: the nodes among its arguments.
        self._nodes: list[tuple[Hashable, list[fx.Node]]] = []
        for node in program.graph.nodes:
            if node.name not in self._position:
                continue
            constant = program.captured.constants.get(node.name)
            target: Hashable = node.target
            if node.op == "call_module":
                target = _settings(modules[node.target])
            elif node.op == "get_attr":
                target = None if node.target in state else node  # a submodule
                target = target if constant is None else _describe(constant)
            select, share = _is_select(node), node.target in _ANY_SHARE
            leaves = list(_leaves((node.args, node.kwargs)))
            arguments = tuple(
                None if isinstance(x, fx.Node) else _constant(x, any_index=select, any_share=share)
                for x in leaves
            )
            info = program.nodes[node.name]
            own = tuple(state[name] for name in info.reads)
            does = self._number((node.op, target, arguments, own, info.writes != ()))
            self._nodes.append((does, [x for x in leaves if isinstance(x, fx.Node)]))
        # How many nodes after it a value is last read that has more readers than blocks are kept; an input of
        # the graph counts as read for ever.
        self._read_until = {
            node: max(self._position.get(user.name, 0) for user in node.users)
            - self._position.get(node.name, -len(self._nodes))
            for node in program.graph.nodes
            if node.users and (len(node.users) > KEPT or node.op == "placeholder")
        }

    def __call__(self, wide: int) -> NDArray[np.int64]:
        """The numbers, if a value that is read more than ``wide`` nodes after it was made has its name."""
        return np.array(
            [
                self._number((does, tuple(self._read(at, source, wide) for source in sources)))
                for at, (does, sources) in enumerate(self._nodes)
            ],
            dtype=np.int64,
        )

    def _read(self, at: int, source: fx.Node, wide: int) -> Hashable:
        far = self._read_until.get(source, 0) > min(wide, len(self._nodes) - 1)
        return source.name if far else at - self._position[source.name]

    def _number(self, code: Hashable) -> int:
        return self._numbers.setdefault(code, len(self._numbers))


def _leaves(tree: Any) -> Iterator[Any]:
    """The nodes and constants in a node's arguments, and what tells their containers apart."""
    if isinstance(tree, slice):
        tree = (slice, tree.start, tree.stop, tree.step)
    if isinstance(tree, Mapping):
        tree = [part for pair in tree.items() for part in pair]
    if isinstance(tree, (tuple, list)):
        yield len(tree)
        for part in tree:
            yield from _leaves(part)
    else:
        yield tree


def _constant(value: Any, *, any_index: bool, any_share: bool) -> Hashable:
    if any_index and type(value) is int:
        return "any index"
    if isinstance(value, type):
        return value
    if any_share and type(value) is float and 0 < value < 1:
        return "any share"
    return (type(value), value) if isinstance(value, _PLAIN) else (type(value), id(value))


def _is_select(node: fx.Node) -> bool:
    """Does it index a tensor with numbers and whole or new dimensions? Then any index costs the same."""
    if node.target not in (operator.getitem, "__getitem__") or len(node.args) != 2:
        return False
    index = node.args[1]
    whole = slice(None)
    return (
        isinstance(index, tuple)
        and any(x == whole for x in index)
        and all(x is None or type(x) is int or x == whole for x in index)
    )


def _describe(tensor: Tensor) -> Hashable:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad


def _settings(module: nn.Module) -> Hashable:
    """What a module of torch.nn computes, apart from its weights; other modules are equal to none."""
    if any(not type(each).__module__.startswith("torch.nn.") for each in module.modules()):
        return id(module)
    return tuple(
        (path, type(each), len(each._forward_hooks), *_plain_attributes(each))
        for path, each in module.named_modules()
    )


def _plain_attributes(module: nn.Module) -> Iterator[Hashable]:
    for name, value in vars(module).items():
        parts = value if isinstance(value, tuple) else (value,)
        if all(isinstance(part, _PLAIN) for part in parts):
            yield name, type(value), value
        elif callable(value):
            yield name, id(value)
