"""Costs of all blocks of a program from a run of a few of them (`placer.program.blocks`).

Of each repeat, the first two blocks and the last two ran. An item of the costs (a value, a gradient) belongs
to the first block that makes or consumes it; the home of the gradient of a weight that all blocks read is
the weight's first reader, wherever that is. Those of the second block are repeated for all blocks that were
left out, if the next to last block has the same. Items that belong to no block (a mask that all blocks read)
must be read by both blocks alike, and are then read by all. If anything is otherwise, there is no answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from placer.cost.measured import Measured
from placer.program.blocks import Repeat, Shortened

# Fields with a position, and with a tuple of positions or of (position, bytes).
_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "values": (("producer",), ("users", "savers", "parts")),
    "gradients": (("source", "target", "home", "sender"), ("earlier",)),
    "added": (("node", "home"), ()),
}
Move = Callable[[int], int]


class _Unsure(Exception):
    """The blocks differ, or share something."""


def expand(found: Measured, short: Shortened) -> Measured | None:
    """The costs of the whole program of ``short`` from those of its run; None if blocks are not alike."""
    try:
        return _expanded(found, short)
    except _Unsure:
        return None


def _expanded(found: Measured, short: Shortened) -> Measured:
    if found.row_gradients:
        raise _Unsure
    at = short.positions
    ran = {position: i for i, position in enumerate(at)}
    blocks = _Blocks(short.repeats, _weight_homes(found, short, ran))
    everywhere = range(at[-1] + 1)
    source = [ran[blocks.template(position)] for position in everywhere]
    lists = {
        name: blocks.expand(
            [_moved(x, *fields, at.__getitem__) for x in getattr(found, name)], fields
        )
        for name, fields in _FIELDS.items()
    }
    values = sorted(lists["values"], key=lambda value: value.producer)
    number = {key: i for i, key in enumerate(_numbered(v.producer for v in values))}
    keys = list(_numbered(at[v.producer] if v.producer >= 0 else -1 for v in found.values))

    def results(position: int, like: int) -> tuple[int, ...]:
        """The values of the node at ``position``, which are like those of the node at ``like``."""
        held = (keys[index] for index in found.results[ran[like]])
        makers = [(blocks.maker(position, like, made), i) for made, i in held]
        _require(all(maker in number for maker in makers))
        return tuple(number[maker] for maker in makers)

    for position in everywhere:
        other = blocks.next_to_last(position)
        if other is not None:
            a, b = ran[position], ran[other]
            _require(
                found.nodes[a] == found.nodes[b] and found.operations[a] == found.operations[b]
            )
            _require((a in found.saving) == (b in found.saving))
            _require(results(other, position) == results(other, other))
    return replace(
        found,
        nodes=tuple(found.nodes[i] for i in source),
        values=tuple(values),
        results=tuple(results(position, at[i]) for position, i in enumerate(source[:-1])),
        gradients=tuple(sorted(lists["gradients"])),
        added=tuple(sorted(lists["added"], key=lambda sum_: sum_.node)),
        saving=frozenset(p for p, i in enumerate(source) if i in found.saving),
        operations=tuple(found.operations[i] for i in source),
    )


def _weight_homes(found: Measured, short: Shortened, ran: Mapping[int, int]) -> frozenset[int]:
    """The nodes of first blocks that were the first to read weights which all blocks read."""
    return frozenset(
        node
        for repeat in short.repeats
        for node in range(repeat.begin, repeat.begin + repeat.period)
        if found.weights[ran[node]] > found.weights[ran[node + repeat.period]]
    )


def _numbered(makers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Each maker with the number of times that it occurred before."""
    seen = Counter[int]()
    for maker in makers:
        yield maker, seen[maker]
        seen[maker] += 1


def _require(condition: bool) -> None:
    if not condition:
        raise _Unsure


def _position(x: Any) -> int:
    return int(x if isinstance(x, int) else x[0])


def _moved(item: Any, single: Iterable[str], many: Iterable[str], move: Move) -> Any:
    """``item`` at other positions; those below 0 stay."""

    def each(x: Any) -> Any:
        position = _position(x)
        moved = position if position < 0 else move(position)
        return moved if isinstance(x, int) else (moved, *x[1:])

    changed: dict[str, Any] = {name: each(getattr(item, name)) for name in single}
    changed.update({name: tuple(map(each, getattr(item, name))) for name in many})
    return replace(item, **changed)


class _Blocks:
    """Where the blocks of ``repeats`` are. Positions are those in the whole program."""

    def __init__(self, repeats: Sequence[Repeat], homes: frozenset[int]) -> None:
        self._homes = homes
        self._of: dict[int, tuple[Repeat, int]] = {
            position: (repeat, block)
            for repeat in repeats
            for position in range(repeat.begin, repeat.end)
            if (block := repeat.block_of(position)) is not None
        }

    def template(self, position: int) -> int:
        """The node that ran for the one at ``position``."""
        repeat, block = self._of.get(position, (None, 0))
        if repeat is None or repeat.is_kept(block):
            return position
        return position - (block - 1) * repeat.period

    def next_to_last(self, position: int) -> int | None:
        """The node of the next to last block for one of the second block; None for any other node."""
        repeat, block = self._of.get(position, (None, 0))
        return (
            None if repeat is None or block != 1 else position + (repeat.count - 3) * repeat.period
        )

    def maker(self, node: int, like: int, made: int) -> int:
        """The node that makes a result of ``node``, if ``made`` is the one that makes that of ``like``."""
        repeat, block = self._of.get(node, (None, 0))
        other, made_in = self._of.get(made, (None, 0))
        if repeat is None or other is None:
            return made
        shift = node - like
        if block == repeat.count - 2 and like == node and made_in == 1:
            shift = (repeat.count - 4) * repeat.period  # it read what the second block made
        _require(repeat is other and (not shift or made_in <= 1))
        return made + shift

    def expand(
        self, items: Sequence[Any], fields: tuple[tuple[str, ...], tuple[str, ...]]
    ) -> list[Any]:
        """``items`` with those of the blocks that were left out."""
        found: list[Any] = []
        second, next_to_last = Counter[Any](), Counter[Any]()
        for item in items:
            single, many = self._moving(item, fields[0]), fields[1]
            blocks = self._blocks_of(getattr(item, name) for name in single)
            if any(not repeat.is_kept(b) for repeat, own in blocks.items() for b in own):
                continue  # a stand-in's: what the second block has is repeated for it
            repeated = next((repeat for repeat, own in blocks.items() if min(own) == 1), None)
            for repeat, own in blocks.items():
                if min(own) == repeat.count - 2:
                    next_to_last[item] += 1
            if repeated is None:
                found.append(self._read_by_all(item, many, blocks))
                continue
            _require(len(blocks) == 1)
            copies = list(self._copies(item, (single, many), repeated))
            found += copies[:-1]
            second[copies[-1]] += 1
        _require(second == next_to_last)
        return found

    def _moving(self, item: Any, single: tuple[str, ...]) -> tuple[str, ...]:
        """The fields of ``item`` that differ between blocks: not the home of a shared weight's gradient."""
        others = tuple(name for name in single if name != "home")
        if others == single or item.home not in self._homes:
            return single
        repeat, block = self._of.get(item.home, (None, 0))
        own = self._blocks_of(getattr(item, name) for name in others)
        return others if repeat is None or block not in own.get(repeat, ()) else single

    def _blocks_of(self, positions: Iterable[int]) -> dict[Repeat, set[int]]:
        found: dict[Repeat, set[int]] = {}
        for position in positions:
            if position in self._of:
                repeat, block = self._of[position]
                found.setdefault(repeat, set()).add(block)
        return found

    def _copies(
        self, item: Any, fields: tuple[tuple[str, ...], tuple[str, ...]], repeat: Repeat
    ) -> Iterator[Any]:
        """``item``, which belongs to the second block, for every block from that one to the next to last."""
        seam = repeat.count - 2  # ran after the second block

        for copy in range(repeat.count - 2):

            def move(position: int, copy: int = copy) -> int:
                other, block = self._of.get(position, (None, 0))
                if other is None:
                    return position
                _require(other is repeat and block in (1, seam))
                return position + (copy - (block == seam) * (seam - 2)) * repeat.period

            yield _moved(item, *fields, move)

    def _read_by_all(self, item: Any, many: Sequence[str], blocks: dict[Repeat, set[int]]) -> Any:
        """``item``, which belongs to no block that was left out, with the readers in those blocks."""
        changed = {}
        for name in many:
            readers = getattr(item, name)
            for repeat, own in self._blocks_of(map(_position, readers)).items():
                ends = blocks.get(repeat, {0, repeat.count - 1})
                if min(ends) > 0 or own <= {0, 1}:  # what one of the kept blocks makes
                    _require(own <= {min(ends), min(ends) + 1})
                elif min(own) <= 1:
                    _require(max(ends) != 1 or max(own) == repeat.count - 1)
                    readers = self._in_all_blocks(readers, repeat)
            if readers is not getattr(item, name):
                changed[name] = readers
        return replace(item, **changed) if changed else item

    def _in_all_blocks(self, readers: Sequence[Any], repeat: Repeat) -> tuple[Any, ...]:
        """``readers`` with those of the second block of ``repeat`` repeated for each that was left out."""
        by_block: dict[int, list[Any]] = {}
        for x in readers:
            position = _position(x)
            block = repeat.block_of(position)
            if block is not None:
                offset = position - block * repeat.period
                by_block.setdefault(block, []).append(
                    offset if isinstance(x, int) else (offset, *x[1:])
                )
        second = by_block.get(1, [])
        _require(second == by_block.get(repeat.count - 2, []))
        missing = []
        for block in range(2, repeat.count - 2):
            if block in by_block:  # stand-ins
                _require(by_block[block] == second)
                continue
            shift = block * repeat.period
            missing += [x + shift if isinstance(x, int) else (x[0] + shift, *x[1:]) for x in second]
        return tuple(sorted((*readers, *missing)))
