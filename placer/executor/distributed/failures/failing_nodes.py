"""Locates the autograd node whose backward failed, after the failure, so it costs nothing before.

Autograd runs the nodes of a graph from the last created to the first: of those that are ready it takes
the one with the highest sequence number, and a node is created after the nodes that it passes gradients
to. A node that has run frees its saved tensors. So the node that raised is after the last one that has
freed them, and not after the first one that has not::

    created  0 conv ── 1 add ── 2 relu ── 3 view ── 4 conv ── 5 loss
    saved      kept     none     kept      none     freed     freed
                                  ▲          ▲    5 and 4 have run, so 3 or 2 has raised. A node that
                                  └──────────┘    saves nothing hardly ever raises: 2, unless a hook did

A node that accumulates into a leaf runs as soon as it is ready. The first half of a split backward
retains its graph and frees nothing; it is run again without retaining the graph.

Autograd nodes do not know their layers. So the stage's forward is run again on fake tensors
(`run_fake_forward`), where each node is created by a known line of the stage's code, and the two graphs
are compared.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import BackwardHook

from placer._torch import (
    EngineCall,
    failed_engine_call,
    has_run,
    run_engine,
    sequence_number,
)
from placer.autograd_graph import leaf_of, nodes_behind

Trace = Sequence[str]  # a word for each node of a graph, in the order of creation; see `trace_of`


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingNodes:
    """The nodes that may have failed, as positions in ``trace``, or the modules that have failed."""

    trace: Trace = ()
    positions: tuple[int, ...] = ()
    modules: tuple[str, ...] = ()


def find_failing_nodes(
    error: BaseException, part: nn.Module, *, may_run_again: bool
) -> FailingNodes | None:
    """The nodes whose backward may have raised ``error``; None if unknown, or if no backward raised it.

    With ``may_run_again``, a backward that retained its graph is run a second time; the graph cannot be
    used afterwards. Takes time proportional to the size of the graph.
    """
    call = failed_engine_call(error)
    if call is None:
        return None
    paths = {module: path for path, module in part.named_modules()}
    for frame in call.frames:
        for value in frame.f_locals.values():
            if isinstance(value, BackwardHook) and value.module in paths:
                return FailingNodes(modules=(paths[value.module],))
    if call.retains_graph:
        again = _run_again(call) if may_run_again else None
        if again is None:
            return None
        call = again
    graph = reachable(call.roots)
    order = _needed(graph, call.inputs)[::-1]
    ran = {node: has_run(node) for node in order}
    last = max((i for i, node in enumerate(order) if ran[node]), default=-1)
    held = next((i for i, node in enumerate(order) if i > last and ran[node] is False), len(order))
    window = _running(call.frames, order) or order[last + 1 : held + 1]
    names = parameter_names(part)
    in_python = bool(call.frames)  # a hook, or a backward that is written in Python
    if not in_python and window and ran[window[-1]] is False:
        window = window[-1:]
    index = {node: position for position, node in enumerate(graph)}
    return FailingNodes(
        trace=trace_of(graph, names), positions=tuple(sorted(index[node] for node in window))
    )


def _running(frames: Iterable[FrameType], nodes: Sequence[Node]) -> list[Node]:
    """The nodes whose backward is written in Python and runs in one of ``frames``."""
    values = [value for frame in frames for value in frame.f_locals.values()]
    return [node for node in nodes if any(value is node for value in values)]


def _run_again(call: EngineCall) -> EngineCall | None:
    """Repeat the engine call without retaining the graph; None if it does not fail this time."""
    try:
        run_engine(call)
    except Exception as error:
        return failed_engine_call(error)
    return None


def reachable(roots: Iterable[Tensor | GradientEdge]) -> list[Node]:
    """The nodes behind ``roots`` in the order of creation, without those that accumulate into leaves."""
    first = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    behind = nodes_behind(node for node in first if node is not None)
    return sorted((n for n in behind if sequence_number(n) is not None), key=number_of)


def _needed(graph: Sequence[Node], inputs: Sequence[Tensor | GradientEdge]) -> list[Node]:
    """The nodes of ``graph`` (in the order of creation) on a path to one of ``inputs``.

    Autograd does not run the others. All nodes, if there are no ``inputs``.
    """
    if not inputs:
        return list(graph)
    nodes = {edge.node for edge in inputs if isinstance(edge, GradientEdge)}
    nodes.update(x.grad_fn for x in inputs if isinstance(x, Tensor) and x.grad_fn is not None)
    leaves = {id(x) for x in inputs if isinstance(x, Tensor) and x.grad_fn is None}
    wanted: set[Node] = set()
    for node in graph:  # a node passes gradients to nodes that were created before it
        following = [f for f, _ in node.next_functions if f is not None]
        if any(f in wanted or f in nodes or id(leaf_of(f)) in leaves for f in following):
            wanted.add(node)
    return [node for node in graph if node in wanted]


def number_of(node: Node) -> int:
    """The sequence number of ``node``, which must not accumulate into a leaf; later ones are higher."""
    number = sequence_number(node)
    assert number is not None
    return number


def parameter_names(module: nn.Module, among: Collection[str] | None = None) -> dict[int, str]:
    """Names of parameters by id; if one has several names, the last (of those in ``among``)."""
    named = module.named_parameters(remove_duplicate=False)
    return {id(p): name for name, p in named if among is None or name in among}


def trace_of(made: Iterable[Node], names: Mapping[int, str]) -> list[str]:
    """A word for each node: its kind, and the names of parameters to which it passes gradients."""
    words = []
    for node in made:
        leaves = [
            leaf_of(following) for following, _ in node.next_functions if following is not None
        ]
        own = [names[id(leaf)] for leaf in leaves if id(leaf) in names]
        words.append(" ".join([node.name(), *own]))
    return words


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureSite:
    """Where a backward failed: in one of ``layers`` (empty if unknown), or in the loss after them."""

    layers: tuple[str, ...] = ()
    after: bool = False  # in the backward of the loss


def match_layers(failing: FailingNodes, trace: Trace, layers: Sequence[str]) -> FailureSite:
    """The layers of the ``failing`` nodes, found by alignment with ``trace``, whose layers are known.

    The two graphs differ by the loss and by the computations of hooks. A node that does not match gets
    the layer of its neighbours if both have the same.
    """
    matcher = difflib.SequenceMatcher(a=failing.trace, b=trace, autojunk=False)
    found = {
        block.a + i: layers[block.b + i]
        for block in matcher.get_matching_blocks()
        for i in range(block.size)
    }
    if found and failing.positions and min(failing.positions) > max(found):
        return FailureSite(after=True)
    named = [_layer_at(position, found) for position in reversed(failing.positions)]
    return FailureSite(layers=tuple(dict.fromkeys(named)) if all(named) else ())


def _layer_at(position: int, found: Mapping[int, str]) -> str:
    if position in found:
        return found[position]
    before = max((p for p in found if p < position), default=None)
    after = min((p for p in found if p > position), default=None)
    if before is None or after is None or found[before] != found[after]:
        return ""
    return found[before]
