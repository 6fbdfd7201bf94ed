"""What a rule is given, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, fx, nn

from placer.program.rows.dependence import name_of
from placer.space.layout import Layout
from placer.space.nodes import InSpace

_ALIASES = {"dim": "axis", "keepdim": "keepdims", "dim0": "axis0", "dim1": "axis1"}


@dataclass(frozen=True)
class Call:
    """A node, by the ``name`` of what it calls.

    ``values`` has the whole value of every node on fake tensors. ``layouts`` are those of the inputs that are
    cut. ``parts_of`` has, for a concatenation that is not made, its tensors. ``fixed`` are the nodes whose
    number is the same in every call; ``is_shared`` says that its memory is written by some node.
    """

    node: fx.Node
    name: str
    module: nn.Module | None
    values: Mapping[fx.Node, Any]
    layouts: Mapping[fx.Node, Layout]
    parts_of: Mapping[fx.Node, Sequence[fx.Node]]
    count: int  # chunks of planes in which windowed operators run
    fixed: Collection[fx.Node] = ()
    is_shared: bool = False

    @property
    def result(self) -> Any:
        """The whole result."""
        return self.values[self.node]

    @property
    def inputs(self) -> list[fx.Node]:
        """The nodes that it reads."""
        return self.node.all_input_nodes

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument; one of a node with a number is that number."""
        given = self.node.args[position] if len(self.node.args) > position else default
        found = self.node.kwargs.get(name, self.node.kwargs.get(_ALIASES.get(name, ""), given))
        known: Any = fx.node.map_arg(
            found, lambda x: x if isinstance(self.values[x], Tensor) else self.values[x]
        )
        return known

    def is_of_sizes(self, node: fx.Node) -> bool:
        """Does it follow from sizes of tensors, and is no number of the caller's, or of an attribute?"""
        if node.op == "placeholder":
            return False
        if any(isinstance(self.values[x], Tensor) for x in node.all_input_nodes):
            return name_of(node) in ("size", "numel", "getattr")
        return all(map(self.is_of_sizes, node.all_input_nodes))

    def is_fixed(self, given: Any) -> bool:
        """Are all numbers in ``given`` the same in every call?"""
        found: list[fx.Node] = []
        fx.node.map_arg(given, found.append)
        return all(node in self.fixed for node in found)


@dataclass(frozen=True)
class Local:
    """The operation runs on each part as it is; the result has its dimensions ``dims`` cut.

    Inputs that are not cut are cut like the result where they are as long, and copied where they are not.
    """

    dims: tuple[int, ...]


@dataclass(frozen=True)
class Replace:
    """``operation`` runs instead, called with the layer (if it takes it), ``parameters`` and ``inputs``.

    If there are operations ``before``, one for each of the inputs, it gets their results.
    """

    operation: InSpace
    inputs: tuple[fx.Node, ...]
    parameters: tuple[Any, ...] = ()
    takes_layer: bool = False
    dims: tuple[int, ...] = ()  # of the result; none if it is whole
    # How inputs that are not cut are to be cut; the others are cut already.
    layouts: Mapping[fx.Node, Layout] = field(default_factory=dict)
    before: tuple[InSpace, ...] = ()


Rule: TypeAlias = Local | Replace | str
RuleMaker: TypeAlias = Callable[[Call], Rule]
