"""Finds the nodes that form regions: those of the layers that a spec names, if in-place writes allow it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from placer.regions.types import Region, RegionBoundaries, RegionKey

if TYPE_CHECKING:
    from torch import fx

    from placer.program import Program

Keys = tuple[RegionKey | None, ...]


def region_keys(program: Program, recomputed: Collection[str], offloaded: Collection[str]) -> Keys:
    """The key of each node of ``program.order``, or None if its saved activations are kept.

    ``recomputed`` and ``offloaded`` are paths of layers and include all layers inside them. If both a
    layer and one inside it are named, the outer layer is one region.
    """
    keys: list[RegionKey | None] = []
    for name in program.order:
        layer = program.nodes[name].layer
        again, away = _outermost(layer, recomputed), _outermost(layer, offloaded)
        if again is None and away is None:
            keys.append(None)
            continue
        label = max(again or "", away or "", key=len)
        keys.append(RegionKey(label=label, recompute=again is not None, offload=away is not None))
    return whole_groups(program, keys)


def region_boundaries(program: Program) -> RegionBoundaries:
    """Positions where regions of ``program`` may begin and end, by the rules of `whole_groups`."""
    groups, unsafe = _groups(program)
    split: dict[int, list[list[int]]] = {}  # position -> groups with nodes on both sides of it
    for group in groups:
        for i in range(min(group) + 1, max(group) + 1):
            split.setdefault(i, []).append(group)
    cannot_end = _no_region_ends(program)
    return RegionBoundaries(
        free=frozenset(range(len(program.order))) - split.keys(),
        ending={
            i: min(min(group) for group in there)
            for i, there in split.items()
            if not any(cannot_end(group, i) for group in there)
        },
        unsafe=frozenset(unsafe),
    )


def _no_region_ends(program: Program) -> Callable[[Sequence[int], int], bool]:
    """A predicate of a group and a position: must no region end there, between nodes of the group?

    None may end there if the group has a constant, or if nodes after the position write to parameters or
    buffers: when the nodes before it run again, they would read the written values.
    """
    writers = {i for i, each in enumerate(program.nodes.values()) if each.writes}
    constants = {i for i, name in enumerate(program.order) if name in program.captured.constants}

    def cannot_end(group: Sequence[int], position: int) -> bool:
        return any(i in constants or (i >= position and i in writers) for i in group)

    return cannot_end


def _groups(program: Program) -> tuple[list[list[int]], set[int]]:
    """Groups of nodes that share written memory, and nodes that must run once.

    These are the groups that read an input, modules that change attributes or variables, and RReLUs.
    """
    position = {name: i for i, name in enumerate(program.order)}
    nodes = {node.name: node for node in program.graph.nodes}
    inputs = {node.name for node in program.graph.nodes if node.op == "placeholder"}
    changing = program.captured.changing
    unsafe = {i for i, each in enumerate(program.nodes.values()) if each.layer in changing}
    unsafe |= {position[name] for name, node in nodes.items() if _is_rrelu(program, node)}
    for names in program.colocated:
        if any(source.name in inputs for n in names for source in nodes[n].all_input_nodes):
            unsafe |= {position[name] for name in names}
    return [[position[name] for name in group] for group in program.colocated], unsafe


def _is_rrelu(program: Program, node: fx.Node) -> bool:
    """Is it an RReLU? It writes its noise after autograd has saved it, which hooks on saved tensors miss."""
    if node.op == "call_module":
        from torch import nn  # not above: commands read specs before they import torch

        return isinstance(program.model.get_submodule(str(node.target)), nn.RReLU)
    return getattr(node.target, "__name__", "") in ("rrelu", "rrelu_")


def whole_groups(program: Program, keys: Sequence[RegionKey | None]) -> Keys:
    """``keys`` with None for nodes that cannot be in a region without the others of their group.

    The nodes of a group share memory that one of them writes. A region with only some of them would read
    values that were written later when it runs again. So regions with nodes of one group are joined if both
    are recomputed or offloaded in the same way; otherwise these nodes are in no region. There is one
    exception: a recomputed region may have the first nodes of a group if the others are not recomputed,
    because it allocates the memory anew when it runs again (for example a ``BatchNorm`` in the region and an
    in-place ``ReLU`` after it). A group that reads the model's inputs is in no region, since it may write to
    them, and neither is a module that changes attributes or variables.
    """
    groups, unsafe = _groups(program)
    cannot_end = _no_region_ends(program)
    found = [None if i in unsafe else key for i, key in enumerate(keys)]
    while True:
        runs = list(accumulate(i == 0 or key != found[i - 1] for i, key in enumerate(found)))
        split = next(
            (
                g
                for g in groups
                if _is_split(g, found, runs) and not _ends_in(g, found, runs, cannot_end)
            ),
            None,
        )
        if split is None:
            return tuple(found)
        between = range(min(split), max(split) + 1)
        policies = {
            None if k is None else (k.recompute, k.offload)
            for k in found[between[0] : between[-1] + 1]
        }
        joined = found[split[0]] if len(policies) == 1 else None
        for i in between if joined is not None else split:
            found[i] = joined


def _is_split(group: Sequence[int], keys: Sequence[RegionKey | None], runs: Sequence[int]) -> bool:
    """Are some nodes of the group in a region, but not all of them in the same one?"""
    inside = [keys[i] is not None for i in group]
    return any(inside) and (not all(inside) or len({runs[i] for i in group}) > 1)


def _ends_in(
    group: Sequence[int],
    keys: Sequence[RegionKey | None],
    runs: Sequence[int],
    cannot_end: Callable[[Sequence[int], int], bool],
) -> bool:
    """Does a recomputed region end between nodes of the group, at an allowed place, with none after it?"""
    members = sorted(group)
    first = keys[members[0]]
    after = [i for i in members if runs[i] != runs[members[0]]]
    if first is None or not first.recompute or cannot_end(group, after[0]):
        return False
    return not any(key is not None and key.recompute for key in (keys[i] for i in after))


def find_regions(
    nodes: Sequence[str], key_of: Mapping[str, RegionKey | None]
) -> tuple[Region, ...]:
    """The regions of a stage that runs ``nodes`` in this order; ``key_of`` gives the key of each node.

    >>> key = RegionKey(label="encoder", recompute=True, offload=False)
    >>> regions = find_regions(["a", "b", "c"], {"a": None, "b": key, "c": key})
    >>> [(region.first, region.last) for region in regions]
    [('b', 'c')]
    """
    regions = []
    for key, run in groupby(nodes, key=lambda name: key_of.get(name)):
        names = list(run)
        if key is not None:
            regions.append(
                Region(first=names[0], last=names[-1], recompute=key.recompute, offload=key.offload)
            )
    return tuple(regions)


def with_overlap(regions: Iterable[Region]) -> tuple[Region, ...]:
    """``regions`` with ``overlapped`` set: offloaded values are copied while kernels run."""
    return tuple(replace(region, overlapped=region.offload) for region in regions)


def _outermost(layer: str, chosen: Collection[str]) -> str | None:
    """The shortest of ``layer`` and its ancestors that is among ``chosen``."""
    parts = layer.split(".")
    paths = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return next((path for path in paths if path and path in chosen), None)
