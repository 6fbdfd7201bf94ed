"""Locates the autograd node whose backward failed, from what autograd leaves behind: free until then.

Autograd runs the nodes of a graph from the last made to the first (the highest number that is ready,
and a node is made after those that it hands gradients to), and a node that is done frees what it
saved. So the one that raised comes after the last that has freed, and no later than the first that
has not::

    made    0 conv ── 1 add ── 2 relu ── 3 view ── 4 conv ── 5 loss
    saved     held     none     held      none     freed     freed
                                 ▲          ▲    ran: 5, 4; raised: 3 or 2. What keeps nothing only
                                 └──────────┘    moves or adds numbers: 2, unless a hook raised

A leaf that accumulates is run at once. The first half of a split backward keeps its graph and frees
nothing: it is run again without keeping it.

Nodes have no layers. The stage's forward is run again without data (`run_fake_forward`), where each node is
made by a known line of the stage's code, and the two graphs are compared.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import BackwardHook

from placer._torch import EngineCall, failed_engine_call, has_run, run_engine, sequence_number
from placer.autograd_graph import leaf_of, nodes_behind

Trace = Sequence[str]  # the nodes of a graph in the order in which they were made; see `trace_of`


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingNodes:
    """What may have failed: positions in the ``trace`` of the graph, or modules that are known to have."""

    trace: Trace = ()
    positions: tuple[int, ...] = ()
    modules: tuple[str, ...] = ()


def find_failing_nodes(
    error: BaseException, part: nn.Module, *, may_run_again: bool
) -> FailingNodes | None:
    """Whose backward raised ``error``; None when it was not raised in one, or cannot be told.

    Only with ``may_run_again`` a backward that kept its graph is run a second time. The graph is of
    no use afterwards. Takes time proportional to the size of the graph.
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
    if call.frames:  # a hook, or a backward of the user's own
        owners = _hooked_leaves(order[max(last, 0) : held], call.frames[0], names)
        if owners:
            return FailingNodes(modules=tuple(owners))
    elif window and ran[window[-1]] is False:
        window = window[-1:]
    index = {node: position for position, node in enumerate(graph)}
    return FailingNodes(
        trace=trace_of(graph, names), positions=tuple(sorted(index[node] for node in window))
    )


def _running(frames: Iterable[FrameType], nodes: Sequence[Node]) -> list[Node]:
    """Of ``nodes`` the one whose backward, written in Python, these frames run."""
    values = [value for frame in frames for value in frame.f_locals.values()]
    return [node for node in nodes if any(value is node for value in values)]


def _run_again(call: EngineCall) -> EngineCall | None:
    """The same call of the engine, but freeing its graph; None when it does not fail this time."""
    try:
        run_engine(call)
    except Exception as error:
        return failed_engine_call(error)
    return None


def reachable(roots: Iterable[Tensor | GradientEdge]) -> list[Node]:
    """The nodes of the graph behind ``roots``, as they were made; none that accumulate into leaves."""
    first = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    behind = nodes_behind(node for node in first if node is not None)
    return sorted((n for n in behind if sequence_number(n) is not None), key=number_of)


def _needed(graph: Sequence[Node], inputs: Sequence[Tensor | GradientEdge]) -> list[Node]:
    """Of ``graph``, as it was made, the nodes on a way to one of ``inputs``: the others are not run.

    All, if none are given.
    """
    if not inputs:
        return list(graph)
    nodes = {edge.node for edge in inputs if isinstance(edge, GradientEdge)}
    nodes.update(x.grad_fn for x in inputs if isinstance(x, Tensor) and x.grad_fn is not None)
    leaves = {id(x) for x in inputs if isinstance(x, Tensor) and x.grad_fn is None}
    wanted: set[Node] = set()
    for node in graph:  # what a node hands gradients to was made before it
        following = [f for f, _ in node.next_functions if f is not None]
        if any(f in wanted or f in nodes or id(leaf_of(f)) in leaves for f in following):
            wanted.add(node)
    return [node for node in graph if node in wanted]


def _hooked_leaves(nodes: Iterable[Node], frame: FrameType, names: Mapping[int, str]) -> list[str]:
    """The owners of the parameters that ``nodes`` hand gradients to and whose hook ``frame`` runs.

    That is a module, or a parameter of the whole model's own.
    """
    leaves = [leaf_of(f) for node in nodes for f, _ in node.next_functions if f is not None]
    hooked = [
        names[id(leaf)]
        for leaf in leaves
        if leaf is not None and id(leaf) in names and _has_hook(leaf, frame)
    ]
    return list(dict.fromkeys(name.rpartition(".")[0] or name for name in hooked))


def _has_hook(leaf: Tensor, frame: FrameType) -> bool:
    hooks = (leaf._backward_hooks or {}).values()
    return any(getattr(hook, "__code__", frame.f_code) is frame.f_code for hook in hooks)


def number_of(node: Node) -> int:
    """When ``node``, which accumulates into no leaf, was made: later ones have higher numbers."""
    number = sequence_number(node)
    assert number is not None
    return number


def parameter_names(module: nn.Module, among: Collection[str] | None = None) -> dict[int, str]:
    """The name of a parameter by its id; of several names (``among`` these) the last."""
    named = module.named_parameters(remove_duplicate=False)
    return {id(p): name for name, p in named if among is None or name in among}


def trace_of(made: Iterable[Node], names: Mapping[int, str]) -> list[str]:
    """A word for each node: its kind, and the parameters that it hands gradients to."""
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
    """Where a backward failed: in one of ``layers`` (none when it cannot be told), or after them all."""

    layers: tuple[str, ...] = ()
    after: bool = False  # what follows the stage's own code: the loss


def match_layers(failing: FailingNodes, trace: Trace, layers: Sequence[str]) -> FailureSite:
    """The layers of the nodes that may have failed; ``layers`` are those of the nodes of ``trace``.

    Graphs differ where a hook has computed something, and by the loss. A node between two that match
    is of their layer if that is one.
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
