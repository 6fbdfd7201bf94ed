"""How values depend on the rows of the batch: which have a part per row, and what mixes rows.

A recording is compared with that of twice the batch, node by node. A dimension that is twice as large has the
rows; a value that depends on them but does not grow is a statistic of the batch. Where a value with rows is
computed from a statistic, or along the rows, a slice of the batch gives other results than the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx, nn

from placer.program.rows.axes import argument, computes_along, flat
from placer.program.rows.batch import BatchDim
from placer.program.targets import SELECTS, UnderModes

Combination = Literal["same", "mean", "sum", "concatenate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """How a value of the whole batch follows from those of its slices.

    ``dim`` is the dimension along which those of the slices are concatenated. Without, ``combination`` says
    how they give the whole: all are the same, theirs is a mean or a sum over rows, or the whole has all of
    them, one after the other; None if that is not known.
    ``depends``: it depends on the values of inputs that are split. ``blocks``: the rows come so many
    times, one block after the other. ``numbered``: it is made from the numbers of the rows, 0, 1, 2, …, which
    begin anew in every slice. ``rank`` is how many dimensions a result has; None if that is not known.
    """

    dim: BatchDim = None
    combination: Combination | None = "same"
    depends: bool = False
    blocks: int = 1
    numbered: bool = False
    rank: int | None = None

    @property
    def is_known(self) -> bool:
        """Do values of slices give that of the whole batch?"""
        return not self.numbered and (self.dim is not None or self.combination is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """A node whose result has rows that depend on other rows of the batch."""

    node: str
    reason: str  # begins with "it"
    location: str = ""  # the line, if it is not the node's
    layer: str = ""  # the module, if it is not the node's


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFlow:
    """How each node depends on the rows of the batch, and the nodes that mix rows."""

    rows: Mapping[str, Rows]
    mixing: tuple[Mixing, ...]


Shapes = Sequence[Any]
"""For each node of a graph: the shape of its tensor, its number, or None if it is neither."""


def find_rows(
    graph: fx.Graph,
    shapes: Shapes,
    doubled: Shapes,
    batch_dims: Sequence[BatchDim],
    model: nn.Module,
    independent: Sequence[bool],
    written: Mapping[str, Collection[str]],
    read: Mapping[str, Collection[str]],
    written_values: Mapping[str, Collection[str]],
    *,
    rows: int = 1,
    counting: Mapping[str, bool],
) -> RowFlow:
    """Follow the rows through ``graph``; ``doubled`` are the shapes for twice the batch.

    ``batch_dims`` are those of the placeholders. ``independent`` nodes do not depend on the inputs of the
    single node that makes them. ``written`` and ``read`` have the names of parameters and
    buffers that nodes write and read, ``written_values`` of earlier nodes whose memory they write. ``rows``
    is the size of the batch, if no input has it; ``counting`` are `counting_nodes`.
    """
    flow = _Flow(
        dict(zip(graph.nodes, zip(shapes, doubled, strict=True), strict=True)),
        model,
        rows,
        counting,
    )
    alone = {node for node, each in zip(graph.nodes, independent, strict=True) if each}
    dims = iter(batch_dims)
    changed: set[str] = set()  # state that depends on the batch
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            flow.start(node, next(dims))
            continue
        if node in alone:
            flow.rows[node] = Rows()
            continue
        state_mixes = not flow.is_batch_norm(node) and changed.intersection(read.get(node.name, ()))
        flow.follow(node, state_mixes=bool(state_mixes))
        # What a module writes need not depend on the batch (a spectral norm), and cannot be seen here.
        if flow.rows[node].depends and node.op != "call_module":
            changed.update(written.get(node.name, ()))
        if node.name in written_values:
            flow.write(node, written_values[node.name])
    return RowFlow(
        rows={node.name: rows for node, rows in flow.rows.items()}, mixing=tuple(flow.mixing)
    )


def rows_by_size(shape: Any, doubled: Any) -> Rows:
    """How a result depends on the batch, by its ``shape``, or number, and that for twice the batch."""
    if isinstance(shape, torch.Size) and isinstance(doubled, torch.Size):
        if len(shape) == len(doubled):
            grown = [d for d, (a, b) in enumerate(zip(shape, doubled, strict=True)) if a != b]
            if len(grown) == 1:
                return Rows(dim=grown[0], combination=None, depends=True)
        return Rows(combination=None, depends=True)
    return Rows() if shape == doubled else Rows(combination=None)


def counting_nodes(graph: fx.Graph, doubled: fx.Graph) -> dict[str, bool]:
    """The nodes that compute with other numbers in ``doubled``, the same operations on twice the batch.

    As in ``x / len(x)``, where Python makes a number of a size. Are they twice as large?
    """
    found = {}
    for node, other in zip(graph.nodes, doubled.nodes, strict=True):
        once, twice = _numbers(node), _numbers(other)
        if once != twice:
            found[node.name] = twice == [2 * x for x in once]
    return found


def _numbers(node: fx.Node) -> list[Any]:
    """The numbers with which ``node`` computes, which are no sizes."""
    name = name_of(node).strip("_")
    if name in _FILLING:
        given = [argument(node, "fill_value", None, position=_FILLING[name])]
    else:
        given = flat([node.args, *node.kwargs.values()]) if name in ARITHMETIC else []
    return [x for x in given if isinstance(x, int | float)]


def is_norm(module: nn.Module) -> bool:
    """Is ``module`` a layer with running statistics, such as BatchNorm?"""
    return "running_mean" in module._buffers and "num_batches_tracked" in module._buffers


def is_norm_function(node: fx.Node) -> bool:
    """Does ``node`` call ``batch_norm`` or ``instance_norm``?"""
    target: Any = node.target
    if isinstance(target, UnderModes):
        target = target.function
    return getattr(target, "__name__", "") in ("batch_norm", "instance_norm")


class _Flow:
    def __init__(
        self,
        shapes: Mapping[fx.Node, tuple[Any, Any]],
        model: nn.Module,
        rows: int,
        counting: Mapping[str, bool],
    ) -> None:
        self.rows: dict[fx.Node, Rows] = {}
        self.mixing: list[Mixing] = []
        self._shapes = shapes
        self._nodes = {node.name: node for node in shapes}
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._names = {node: self._find_name(node) for node in shapes}
        self._size = rows  # of the batch
        self._counting = counting

    def start(self, node: fx.Node, dim: BatchDim) -> None:
        self.rows[node] = Rows() if dim is None else Rows(dim=dim, combination=None, depends=True)
        if dim is not None and self._size == 1:
            self._size = self._shapes[node][0][dim]

    def follow(self, node: fx.Node, *, state_mixes: bool) -> None:
        sources = [self.rows[source] for source in self._sources(node)]
        depends = any(source.depends for source in sources) or state_mixes
        depends |= node.name in self._counting
        shape, doubled = self._shapes[node]
        if self._names[node] in _INDEXING:  # what is selected by numbers of rows is none itself
            sources = sources[:1]
        numbered = any(source.numbered for source in sources) or self._names[node] in _NUMBERING
        numbered |= isinstance(shape, torch.Size) and not depends and self._along_rows(node)
        if self._names[node] == "_pack_padded_sequence" and depends:
            self._note(
                node, "it packs the sequences of the batch, and the longest decides the sizes"
            )
        if depends and self._scales_by_frequency(node):
            self._note(node, "it divides gradients by how often the batch has an index")
        if depends and self._names[node] == "embedding_bag" and self._has_offsets(node):
            self._note(node, "it takes bags out of one row of indices, by their offsets")
        if not isinstance(shape, torch.Size):
            self.rows[node] = self._other(shape, doubled, depends=depends, numbered=numbered)
            others = any(source.combination == "same" for source in sources)
            if (
                self._names[node] in ("add", "sub")
                and self.rows[node].combination == "sum"
                and others
            ):
                # A count of rows that begins at 0 only looks like a sum: each slice adds to what it was.
                self.rows[node] = Rows(combination=None, depends=depends)
        else:
            grown = [d for d, (a, b) in enumerate(zip(shape, doubled, strict=True)) if a != b]
            if not grown:
                counts = any(x.combination == "sum" and not x.depends for x in sources)
                combination = self._combination(node) if depends or counts else "same"
                self.rows[node] = Rows(combination=combination, depends=depends)
            else:
                blocks = self._blocks(node, grown[0], shape)
                self.rows[node] = Rows(
                    dim=grown[0],
                    combination=None,
                    depends=depends,
                    blocks=blocks,
                    numbered=numbered,
                )
            if depends and grown:
                self._check(node, grown, shape, doubled, state_mixes=state_mixes)
                if self.mixing and self.mixing[-1].node == node.name:  # said once
                    self.rows[node] = replace(self.rows[node], numbered=False)

    def write(self, node: fx.Node, names: Collection[str]) -> None:
        """``node`` writes these values, which from now on depend on what it depends on.

        An input without rows may also count calls, which slices do more often.
        """
        depends = self.rows[node].depends
        target = node.args[0] if node.args else None
        for each in map(self._nodes.__getitem__, names):
            if self.rows[each].dim is None or not isinstance(target, fx.Node):
                continue
            if self._writes_some_rows(node, target):
                if depends or self.rows[each].depends:
                    self._note(node, "it writes some of the rows of the batch")
                    break
                self.rows[each] = replace(self.rows[each], numbered=True)
        counts = self.rows[node].dim is None and self.rows[node].combination != "same"
        for each in map(self._nodes.__getitem__, names):
            if not depends and not (counts and each.op == "placeholder"):
                continue
            if self.rows[each].dim is None:
                whole = each in node.args[:1] and self._names[node].endswith("_")
                combination = self.rows[node].combination if whole else None
                self.rows[each] = Rows(combination=combination, depends=True)
            elif depends:
                self.rows[each] = replace(self.rows[each], depends=True)

    def _other(self, value: Any, doubled: Any, *, depends: bool, numbered: bool) -> Rows:
        """Of a number, which depends on sizes only, or of a tuple, whose items are nodes of their own."""
        if not isinstance(value, int | float):
            return Rows(combination=None, depends=depends, numbered=numbered)
        if value == doubled:
            return Rows()
        return Rows(combination="sum" if doubled == 2 * value else None)

    # -- values without rows -----------------------------------------------------------------------

    def _combination(self, node: fx.Node) -> Combination | None:
        """How the statistics of slices that ``node`` computes give that of the batch."""
        name, module = self._names[node], self._module(node)
        sources = [self.rows[source] for source in node.all_input_nodes]
        if node.name in self._counting:
            of_sum = name in _DIVISIONS and [x.combination for x in sources] == ["sum"]
            return "mean" if of_sum and self._counting[node.name] else None
        found = {source.combination for source in sources}
        if any(source.dim is not None for source in sources):
            with_rows = all(x.dim is not None or x.combination == "same" for x in sources)
            if not with_rows:
                return None
            if name in _REDUCTIONS:
                return _REDUCTIONS[name]
            if name in _LOSSES:
                asked = (
                    module.reduction if module is not None else argument(node, "reduction", "mean")
                )
                return _REDUCTIONS.get(str(asked).removeprefix("batch"))
            return None
        if name in _DIVISIONS and len(node.args) == 2:
            top, bottom = (
                self.rows[x].combination if isinstance(x, fx.Node) else "same" for x in node.args
            )
            if bottom == "same":
                return top
            is_count = isinstance(node.args[1], fx.Node) and not self.rows[node.args[1]].depends
            return "mean" if (top, bottom) == ("sum", "sum") and is_count else None
        if name in ("mul", "multiply", "__mul__", "__rmul__"):
            others = found - {"same"}
            few = sum(source.combination != "same" for source in sources) == 1
            return next(iter(others)) if few else None
        if name in _SUMS:
            # A number, which counts once per slice
            plain = len(node.all_input_nodes) < len(node.args)
            if found <= {"mean", "same"}:
                return "mean"
            return "sum" if found == {"sum"} and not plain else None
        if name in _LINEAR and len(found - {"same"}) == 1 and len(found) == 1:
            return next(iter(found))
        return None

    # -- values with rows --------------------------------------------------------------------------

    def _blocks(self, node: fx.Node, dim: int, shape: torch.Size) -> int:
        """How often the rows come one after the other along ``dim``."""
        name = self._names[node]
        sources = [x for x in node.all_input_nodes if self.rows[x].dim is not None]
        if not sources:
            return 1
        blocks = max(self.rows[source].blocks for source in sources)
        first = sources[0]
        if name in _VIEWS:
            return max(1, self._before(first) // max(1, math.prod(shape[:dim])))
        if name in ("cat", "concat", "concatenate"):
            along = argument(node, "dim", 0, position=1)
            if along % len(shape) == dim:  # the same one may be there twice
                joined = argument(node, "tensors", (), position=0)
                return sum(self.rows[x].blocks for x in joined if x in sources)
        if name in ("repeat", "tile"):
            times = flat(node.args[1:])
            given = times[dim - len(shape)] if len(times) >= len(shape) - dim else 1
            blocks *= int(given) if isinstance(given, int) else 1
        if name in SELECT_NAMES and self._names[first] in _SPLITS:
            whole = next((x for x in first.all_input_nodes if self.rows[x].dim == dim), None)
            if whole is not None:
                size: int = self._shapes[whole][0][dim]
                return max(1, self.rows[whole].blocks * shape[dim] // size)
        return blocks

    def _before(self, node: fx.Node) -> int:
        """How often the rows come one after the other in ``node``, counting the dimensions before theirs."""
        rows, shape = self.rows[node], self._shapes[node][0]
        return rows.blocks * (math.prod(shape[: rows.dim]) if isinstance(shape, torch.Size) else 1)

    def _numbers_of_blocks(self, node: fx.Node, length: int) -> set[int]:
        """Of the values with ``length`` entries for the rows that ``node`` reads side by side."""
        sources = [(self.rows[x], self._shapes[x][0]) for x in self._sources(node)]
        return {
            rows.blocks
            for rows, shape in sources
            if rows.dim is not None and shape[rows.dim] == length
        }

    def _views_parts(self, node: fx.Node, dim: int, shape: torch.Size) -> bool:
        """Does a view put parts of several rows where ``shape`` seems to have one row, at ``dim``?"""
        sources = [x for x in node.all_input_nodes if self.rows[x].dim is not None]
        if self._names[node] not in _VIEWS or not sources:
            return False
        blocks, rest = divmod(self._before(sources[0]), max(1, math.prod(shape[:dim])))
        return rest > 0 or shape[dim] % (blocks * self._size) > 0

    def _check(
        self, node: fx.Node, grown: list[int], shape: Any, doubled: Any, *, state_mixes: bool
    ) -> None:
        """Note ``node`` if its rows depend on other rows."""
        dim = grown[0]
        if self.is_batch_norm(node):
            return
        statistic = next(
            (x for x in self._tensors_read(node) if self.rows[x].depends and self._is_statistic(x)),
            None,
        )
        if state_mixes:
            self._note(node, "it reads a buffer or parameter that was set from the batch")
        elif statistic is not None:
            self._note(node, f"it uses a statistic of the batch ({statistic.name})")
        elif len(grown) > 1 or len(self._numbers_of_blocks(node, shape[dim])) > 1:
            self._note(node, "it pairs the rows of the batch with each other")
        elif (
            doubled[dim] != 2 * shape[dim]
            or shape[dim] % self._size
            or (self._names[node] == "masked_select" and self.rows[node.all_input_nodes[0]].dim)
            or self._views_parts(node, dim, shape)
        ):
            self._note(node, "it regroups the rows of the batch")
        elif self._along_rows(node):
            self._note(node, "it computes along the rows of the batch")
        elif node.name in self._counting or (
            self._names[node].strip("_") in ARITHMETIC
            and any(
                isinstance(value, int | float) and value != doubled
                for value, doubled in (self._shapes[source] for source in node.all_input_nodes)
            )
        ):
            self._note(node, "it computes with the number of rows")
        elif any(self.rows[x].numbered for x in self._values_read(node)):
            self._note(node, "it uses the numbers of the rows, which begin anew in every slice")

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        """Nodes whose values ``node`` reads, not only their shapes or types."""
        name = self._names[node]
        if name.endswith("_like") or name.startswith("new_"):
            return []
        if name.endswith("_as") or name == "to":
            return [x for x in node.all_input_nodes if x is node.args[0]]
        return node.all_input_nodes

    def _tensors_read(self, node: fx.Node) -> Iterator[fx.Node]:
        """Nodes whose values ``node`` reads; for an item of a tuple, what the tuple was made from."""
        for source in self._sources(node):
            value = self._shapes[source][0]
            if isinstance(value, torch.Size):
                yield source
            elif value is None and node.target in SELECTS and source.op != "placeholder":
                yield from self._tensors_read(source)

    def _values_read(self, node: fx.Node) -> list[fx.Node]:
        """Nodes with whose values ``node`` computes; indexing only passes on those of its first argument."""
        if self._names[node] not in _INDEXING:
            return list(self._tensors_read(node))
        others = (node.args[0], self._row_index(node))
        return [x for x in self._sources(node) if x not in others]

    def _is_statistic(self, node: fx.Node) -> bool:
        return isinstance(self._shapes[node][0], torch.Size) and self.rows[node].dim is None

    def _along_rows(self, node: fx.Node) -> bool:
        """Does ``node`` compute along the dimension that has the rows?"""
        while node.target in SELECTS and isinstance(node.args[0], fx.Node):
            if isinstance(self._shapes[node.args[0]][0], torch.Size):
                break
            node = node.args[0]
        name, module = self._names[node], self._module(node)
        sources = [x for x in node.all_input_nodes if self.rows[x].dim is not None]
        if not sources or not isinstance(self._shapes[sources[0]][0], torch.Size):
            return False
        first = sources[0]
        dim, rank = self.rows[first].dim, len(self._shapes[first][0])
        assert dim is not None
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            return dim != (0 if module.batch_first else 1) or rank < 3
        if name == "scaled_dot_product_attention":
            return dim >= rank - 2
        given = {
            x: (rows.dim, len(shape))
            for x in sources
            if (rows := self.rows[x]).dim is not None
            and isinstance(shape := self._shapes[x][0], torch.Size)
        }
        if name == "as_strided" or computes_along(node, module, name, given):
            return True
        if name not in _INDEXING or node.args[0] is not first:
            return False
        index = self._row_index(node)
        if index is None or not isinstance(self._shapes[index][0], torch.Size):
            return False
        return not self._is_position(index)

    def _row_index(self, node: fx.Node) -> fx.Node | None:
        """The value with which an indexing ``node`` chooses rows of its first argument, or None."""
        name, target = self._names[node], node.args[0] if node.args else None
        shape = self._shapes[target][0] if isinstance(target, fx.Node) else None
        if name not in _INDEXING or not isinstance(shape, torch.Size):
            return None
        assert isinstance(target, fx.Node)
        dim = self.rows[target].dim
        if name.rstrip("_") in _BY_DIM:
            along = argument(node, "dim", None, position=1)
            inside = isinstance(along, int) and along % len(shape) == dim
            found = argument(node, "index", None, position=2) if inside else None
        else:
            parts = _index_parts(argument(node, "indices", None, position=1), len(shape))
            found = parts[dim] if dim is not None and dim < len(parts) else None
        return found if isinstance(found, fx.Node) else None

    def _writes_some_rows(self, node: fx.Node, target: fx.Node) -> bool:
        """Does ``node`` write to rows of ``target`` with some numbers, or to a view of some rows?

        As in ``x[0] = 0``, ``x[0].zero_()`` or ``x.narrow(0, 0, 2).add_(1)``.
        """
        shape, doubled = self._shapes[target]
        if self._names[node] in ("setitem", "__setitem__"):
            return self._numbers_rows(target, node.args[1])
        return isinstance(shape, torch.Size) and not any(
            2 * a == b for a, b in zip(shape, doubled, strict=True)
        )

    def _numbers_rows(self, tensor: fx.Node, index: Any) -> bool:
        """Does ``index`` select rows of ``tensor`` by constant numbers?"""
        dim, shape = self.rows[tensor].dim, self._shapes[tensor][0]
        if dim is None or not isinstance(shape, torch.Size):
            return False
        parts = _index_parts(index, len(shape))
        part = parts[dim] if dim < len(parts) else slice(None)
        if isinstance(part, slice):
            return any(isinstance(end, int) and end != 0 for end in (part.start, part.stop))
        return isinstance(part, int)

    def _is_position(self, node: fx.Node) -> bool:
        """Is it the numbers of the rows, 0, 1, 2, …?"""
        name = self._names[node]
        if name in ("arange", "nonzero"):
            return True
        passes = name in _LINEAR or name in ("long", "int", "getitem", "__getitem__")
        sources = list(self._tensors_read(node))
        return passes and len(sources) == 1 and self._is_position(sources[0])

    def _scales_by_frequency(self, node: fx.Node) -> bool:
        """Is ``node`` a lookup that divides the gradient of a word by its count in the batch?"""
        if self._names[node] not in ("embedding", "embedding_bag"):
            return False
        module = self._module(node)
        given: Any = argument(node, "scale_grad_by_freq", default=False)
        return bool(given if module is None else module.scale_grad_by_freq)

    def _has_offsets(self, node: fx.Node) -> bool:
        position = 1 if node.op == "call_module" else 2
        return argument(node, "offsets", None, position=position) is not None

    def _note(self, node: fx.Node, reason: str) -> None:
        self.mixing.append(Mixing(node=node.name, reason=reason))

    # -- what a node calls -------------------------------------------------------------------------

    def is_batch_norm(self, node: fx.Node) -> bool:
        """Does ``node`` normalise by statistics of the batch? The spec says what that means for slices."""
        module = self._module(node)
        return is_norm(module) if module is not None else is_norm_function(node)

    def _module(self, node: fx.Node) -> nn.Module | None:
        called = node
        if node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
            called = node.args[0]  # under other modes, a function gets the module as an argument
        if (called.op == "call_module" and called is node) or called.op == "get_attr":
            return self._modules.get(str(called.target))
        return None

    def _find_name(self, node: fx.Node) -> str:
        module = self._module(node)
        if module is not None:
            return _FUNCTION_OF.get(type(module), type(module).__name__)
        return name_of(node)


def _index_parts(index: Any, rank: int) -> list[Any]:
    """What ``index`` says of each dimension, the last ones left out."""
    given = index if isinstance(index, tuple | list) else (index,)
    parts = [x for x in given if x is not None]
    if ... in parts:
        at = parts.index(...)
        parts[at : at + 1] = [slice(None)] * (rank - len(parts) + 1)
    return parts


def name_of(node: fx.Node) -> str:
    """The name of the function, method or operator that ``node`` calls."""
    target: Any = node.target
    if isinstance(target, UnderModes):
        target = target.function
    if (operator := getattr(target, "overloadpacket", None)) is not None:
        name = str(operator.__name__)
        return _OPERATORS.get(name, name)
    return str(getattr(target, "__name__", target))


_DIVISIONS = ("div", "true_divide", "truediv", "__truediv__")
_FILLING = {"full": 1, "full_like": 1, "new_full": 2, "fill": 1, "masked_fill": 2}
_SUMS = ("add", "sub", "__add__", "__radd__", "__sub__", "__rsub__", "add_", "sub_", "rsub")
_REDUCTIONS: Mapping[str, Combination] = {"mean": "mean", "sum": "sum", "count_nonzero": "sum"}
_LOSSES = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div"),
    *("binary_cross_entropy_with_logits", "poisson_nll_loss", "soft_margin_loss"),
)
_FUNCTION_OF: Mapping[type[nn.Module], str] = {
    nn.MSELoss: "mse_loss",
    nn.L1Loss: "l1_loss",
    nn.SmoothL1Loss: "smooth_l1_loss",
    nn.HuberLoss: "huber_loss",
    nn.BCELoss: "binary_cross_entropy",
    nn.BCEWithLogitsLoss: "binary_cross_entropy_with_logits",
    nn.KLDivLoss: "kl_div",
    nn.Embedding: "embedding",
    nn.EmbeddingBag: "embedding_bag",
    nn.Softmax: "softmax",
    nn.LogSoftmax: "log_softmax",
    nn.Flatten: "flatten",
    nn.Unflatten: "unflatten",
}
_OPERATORS = {"_softmax": "softmax", "_log_softmax": "log_softmax"}
# Functions f with f(a + b) = f(a) + f(b) and f(c * a) = c * f(a)
_LINEAR = (
    "neg", "clone", "detach", "to", "type", "float", "double", "half", "bfloat16", "cpu", "cuda",
    "view", "reshape", "flatten", "squeeze", "unsqueeze", "contiguous", "expand", "permute",
    "transpose", "t", "getitem", "__getitem__", "select", "stack", "cat", "sum", "mean", "getattr",
    "present_value",
)  # fmt: skip
_VIEWS = (
    *("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "ravel", "_unsafe_view"),
)
_SPLITS = ("chunk", "split", "tensor_split", "unbind")
_NUMBERING = (
    *("arange", "linspace", "logspace", "randperm", "nonzero", "eye"),
    *("tril_indices", "triu_indices", "meshgrid"),
)
ARITHMETIC = {
    prefix + name
    for name in ("mul", "div", "truediv", "add", "sub", "pow", "floordiv", "mod")
    for prefix in ("", "r", "i")
} | {"multiply", "divide", "true_divide", "floor_divide", "subtract", "remainder"}
# Functions with an index of one dimension, and all that take indices
_BY_DIM = (
    "index_select", "gather", "take_along_dim", "scatter", "scatter_add", "scatter_reduce", "index_add",
    "index_copy", "index_fill", "index_reduce",
)  # fmt: skip
_INDEXING = {
    *("getitem", "__getitem__", "setitem", "__setitem__", "index_put", "index_put_"),
    *_BY_DIM,
    *(f"{name}_" for name in _BY_DIM),
}
SELECT_NAMES: Collection[str] = ("getitem", "get_field")
