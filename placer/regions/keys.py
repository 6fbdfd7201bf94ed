"""From layers to regions: which nodes belong together, and which must be left alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from placer.regions.types import Region, RegionBoundaries, RegionKey

if TYPE_CHECKING:
    from placer.capture import Capture

Keys = tuple[RegionKey | None, ...]


def region_keys(capture: Capture, recomputed: Collection[str], offloaded: Collection[str]) -> Keys:
    """Per node of ``capture.order`` its key, None for a node whose saved activations are kept.

    ``recomputed`` and ``offloaded`` are layers with all that is below them: the outermost of them
    is a region as a whole.
    """
    keys: list[RegionKey | None] = []
    for name in capture.order:
        layer = capture.layer_of[name]
        again, away = _outermost(layer, recomputed), _outermost(layer, offloaded)
        if again is None and away is None:
            keys.append(None)
            continue
        label = max(again or "", away or "", key=len)
        keys.append(RegionKey(label=label, recompute=again is not None, offload=away is not None))
    return whole_groups(capture, keys)


def region_boundaries(capture: Capture) -> RegionBoundaries:
    """Where regions of ``capture`` may begin and end; see `whole_groups`."""
    groups, unsafe = _groups(capture)
    torn: dict[int, list[list[int]]] = {}
    for group in groups:
        for i in range(min(group) + 1, max(group) + 1):
            torn.setdefault(i, []).append(group)
    cannot_end = _no_region_ends(capture)
    return RegionBoundaries(
        free=frozenset(range(len(capture.order))) - torn.keys(),
        ending={
            i: min(min(group) for group in tearing)
            for i, tearing in torn.items()
            if not any(cannot_end(group, i) for group in tearing)
        },
        unsafe=frozenset(unsafe),
    )


def _no_region_ends(capture: Capture) -> Callable[[Sequence[int], int], bool]:
    """Must a group not be torn before a position? What was there before the forward is written after.

    Run again, the first nodes of the group would read what was written to the state or a constant.
    """
    writers = {i for i, name in enumerate(capture.order) if name in capture.mutated_state_of}
    constants = {i for i, name in enumerate(capture.order) if name in capture.constants}

    def cannot_end(group: Sequence[int], position: int) -> bool:
        return any(i in constants or (i >= position and i in writers) for i in group)

    return cannot_end


def _groups(capture: Capture) -> tuple[list[list[int]], set[int]]:
    """The groups of nodes that share written memory, and the nodes of those that read an input."""
    position = {name: i for i, name in enumerate(capture.order)}
    nodes = {node.name: node for node in capture.graph.nodes}
    inputs = {node.name for node in capture.graph.nodes if node.op == "placeholder"}
    unsafe: set[int] = set()
    for names in capture.together:
        if any(source.name in inputs for n in names for source in nodes[n].all_input_nodes):
            unsafe |= {position[name] for name in names}
    return [[position[name] for name in group] for group in capture.together], unsafe


def whole_groups(capture: Capture, keys: Sequence[RegionKey | None]) -> Keys:
    """``keys`` without those nodes that a region would hold without the others of their group.

    A group shares memory that one of its nodes writes to. Run again, a region that holds a part of
    it would read what was written since; regions that it links are joined where they are treated
    alike. A recomputed region may hold the first nodes of a group if the others are not recomputed:
    it makes the memory itself, and anew when it runs again (``BatchNorm`` in it, the ``ReLU`` in
    place after it). A group that reads the model's inputs is in none: it may be they that are
    written to.
    """
    groups, unsafe = _groups(capture)
    cannot_end = _no_region_ends(capture)
    found = [None if i in unsafe else key for i, key in enumerate(keys)]
    while True:
        runs = list(accumulate(i == 0 or key != found[i - 1] for i, key in enumerate(found)))
        torn = next(
            (
                g
                for g in groups
                if _is_torn(g, found, runs) and not _ends_in(g, found, runs, cannot_end)
            ),
            None,
        )
        if torn is None:
            return tuple(found)
        between = range(min(torn), max(torn) + 1)
        policies = {
            None if k is None else (k.recompute, k.offload)
            for k in found[between[0] : between[-1] + 1]
        }
        joined = found[torn[0]] if len(policies) == 1 else None
        for i in between if joined is not None else torn:
            found[i] = joined


def _is_torn(group: Sequence[int], keys: Sequence[RegionKey | None], runs: Sequence[int]) -> bool:
    """Are the nodes of the group apart, in a region or not?"""
    inside = [keys[i] is not None for i in group]
    return any(inside) and (not all(inside) or len({runs[i] for i in group}) > 1)


def _ends_in(
    group: Sequence[int],
    keys: Sequence[RegionKey | None],
    runs: Sequence[int],
    cannot_end: Callable[[Sequence[int], int], bool],
) -> bool:
    """Does a recomputed region end in the group, with none after it, where one may?"""
    members = sorted(group)
    first = keys[members[0]]
    after = [i for i in members if runs[i] != runs[members[0]]]
    if first is None or not first.recompute or cannot_end(group, after[0]):
        return False
    return not any(key is not None and key.recompute for key in (keys[i] for i in after))


def find_regions(
    nodes: Sequence[str], key_of: Mapping[str, RegionKey | None]
) -> tuple[Region, ...]:
    """The regions of a stage that has ``nodes`` in this order.

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


def _outermost(layer: str, chosen: Collection[str]) -> str | None:
    """The shortest of ``layer`` and its ancestors that is among ``chosen``."""
    parts = layer.split(".")
    paths = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return next((path for path in paths if path and path in chosen), None)
