"""Find out which inputs have a row per sample of the batch, and along which dimension.

That an input has the batch's size may be chance, so it is tried: forward is recorded with twice the batch.
An input that forward needs larger then has a row per sample, and one that it does not accept then has none.
Where it takes both, the example cannot tell.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from placer.errors import CaptureError, nearest
from placer.program.fake.converter import FakeConverter
from placer.spec.fields import StoredRule
from placer.spec.layers import match_paths

# The dimension along which an input has a row per sample; None if every slice of the batch gets all of it.
BatchDim = int | None
_MOST_RUNS = 24  # of forward, to find the inputs that have a row per sample


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRules:
    """What is known about the inputs before forward is run.

    ``patterns`` are those of a spec, ``names`` are of inputs whose dimension is known. ``stored``: pattern of
    a stored value or a result -> how those of slices give that of the batch. ``is_split``: there
    will be several slices, so an input for which the example cannot tell is an error. ``in_turn``: a
    replica will have several. ``is_copied``: there will be several replicas. ``is_checked``: the patterns
    were those of another call, so one that matches no input is no mistake.
    """

    patterns: Mapping[str, BatchDim] = field(default_factory=dict)
    names: Mapping[str, BatchDim] = field(default_factory=dict)
    stored: Mapping[str, StoredRule] = field(default_factory=dict)
    is_split: bool = False
    in_turn: bool = False
    is_copied: bool = False
    is_checked: bool = False

    @classmethod
    def of(
        cls,
        batch_dims: Mapping[str, BatchDim],
        stored: Mapping[str, StoredRule],
        replicas: int | str,
        microbatches: int | str,
    ) -> SplitRules:
        """The rules of a spec or plan with these fields; "auto" may become several."""
        return cls(
            patterns=batch_dims,
            stored=stored,
            is_split=replicas != 1 or microbatches != 1,
            in_turn=microbatches != 1,
            is_copied=replicas != 1,
        )

    def with_names(self, names: Mapping[str, BatchDim]) -> SplitRules:
        """These rules and the dimensions of more inputs, which win; patterns need not match any more."""
        return replace(self, names={**self.names, **names}, is_checked=True)

    def with_marks(self, said: Mapping[str, BatchDim]) -> SplitRules:
        """These rules and the dimensions that a caller's marks say, which win."""
        return replace(self, names={**self.names, **said})

    def says(self, names: Sequence[str], dims: Sequence[BatchDim]) -> bool:
        """Has the user said of every input with rows how it is split?"""
        said = {name for pattern in self.patterns for name in match_paths(pattern, names)}
        return all(n in said for n, dim in zip(names, dims, strict=True) if dim is not None)

    def spell(self, names: Sequence[str], dims: Sequence[BatchDim]) -> str:
        """The spec's ``inputs`` for these dimensions, as JSON."""
        pairs = zip(names, dims, strict=True)
        return json.dumps({name: {"batch_dim": dim} for name, dim in pairs if dim is not None})

    def resolve(self, names: Sequence[str], inputs: Sequence[Tensor]) -> dict[str, BatchDim]:
        """The known dimension of each of the inputs ``names``.

        Raises ``CaptureError`` for a pattern that matches no input, and for a dimension that one lacks.
        """
        known: dict[str, BatchDim] = {}
        for pattern, dim in self.patterns.items():
            found = match_paths(pattern, names)
            if not found and not self.is_checked:
                near = nearest(pattern, names)
                hint = f"did you mean {near!r}? " if near else ""
                raise CaptureError(
                    f"/inputs/{pattern}",
                    "no tensor that forward is called with has this name",
                    f"{hint}the inputs are {', '.join(names) or 'none'}",
                )
            known |= dict.fromkeys(found, dim)
        known |= {name: dim for name, dim in self.names.items() if name in names}
        for name, tensor in zip(names, inputs, strict=True):
            dim = known.get(name)
            if dim is None:
                continue
            if not -tensor.dim() <= dim < tensor.dim():
                raise CaptureError(
                    f"/inputs/{name}",
                    f"batch_dim is {dim}, but the input has {tensor.dim()} dimensions",
                    f"its shape is {list(tensor.shape)}",
                )
            known[name] = dim % tensor.dim()
        return known


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The dimension of each input, and what forward does with twice the batch.

    ``doubled`` is what ``record`` returned for it; None if there is no batch, or if forward takes no other
    batch than the example's. ``unsure`` are the inputs for which the example cannot tell.
    """

    dims: tuple[BatchDim, ...]
    doubled: Any
    unsure: tuple[str, ...] = ()


def find_batch(
    names: Sequence[str],
    inputs: Sequence[Tensor],
    rules: SplitRules,
    record: Callable[[Sequence[Tensor]], Any],
    grows: Callable[[Any], bool],
    *,
    converter: FakeConverter,
) -> Batch:
    """Find the inputs that have a row per sample.

    ``record(inputs)`` records forward for inputs of other sizes and returns None if it fails;
    ``grows(recording)`` says whether a result is larger than the example's. One recording is made where all
    inputs with the batch's size as dimension 0 have it, and a few more where ``rules.is_split`` or where
    that fails.
    """
    known = rules.resolve(names, inputs)
    given = {i: dim for i, name in enumerate(names) if (dim := known.get(name)) is not None}
    free = [i for i, name in enumerate(names) if name not in known and inputs[i].dim()]
    runs = itertools.count()

    def run(dims: Mapping[int, int], times: Callable[[int], int] = lambda _: 2) -> Any:
        if next(runs) >= _MOST_RUNS:
            return None
        factors = [times(i) for i in range(len(inputs))]
        return record(grown(converter, inputs, [dims.get(i) for i in range(len(inputs))], factors))

    best: tuple[dict[int, int], Any] | None = None
    for rows in _row_counts(inputs, given, free, names):
        options = {i: [d for d, n in enumerate(inputs[i].shape) if n == rows] for i in free}
        for dims in _assignments(given, options):
            recording = run(dims)
            if recording is not None:
                best = best or (dims, recording)
                if grows(recording):
                    best = dims, recording
                break
        if best is not None and grows(best[1]):
            break
    dims, recording = best or (_likely(inputs, given, free), None)
    unsure: list[int] = []
    if rules.is_split and recording is not None:
        others = {i: o[0] for i in free if i not in dims and (o := _options(inputs, dims, i))}
        unsure = [i for i, dim in others.items() if run({**dims, i: dim}) is not None]
        for i in [i for i in list(dims)[1:] if i not in given]:
            if run(dims, lambda j, i=i: 2 if i == j else 3) is not None:  # type: ignore[misc]
                unsure.append(i)
    return Batch(
        dims=tuple(dims.get(i) for i in range(len(inputs))),
        doubled=recording,
        unsure=tuple(names[i] for i in sorted(unsure)),
    )


def unsure_error(
    batch: Batch, inputs: Sequence[Tensor], names: Sequence[str], *, unread: Collection[str]
) -> CaptureError | None:
    """An error if the example cannot tell how an input is split, unless forward ignores it."""
    unsure = [name for name in batch.unsure if name in names and name not in unread]
    if not unsure:
        return None
    sizes = zip(inputs, batch.dims, strict=False)  # tensors of the state come after the inputs
    rows = next(x.size(dim) for x, dim in sizes if dim is not None)
    name = unsure[0]
    tensor = inputs[names.index(name)]
    dim = list(tensor.shape).index(rows)
    return CaptureError(
        f"input {name}",
        f"has shape {list(tensor.shape)}, and the batch has {rows} rows, but forward also runs where the two "
        "sizes differ, so the example cannot tell whether it is split with the batch",
        f'write in the spec "inputs": {{"{name}": "whole"}} if every slice needs all of it, or '
        f'{{"{name}": {{"batch_dim": {dim}}}}} if it has a row per sample (where Python makes the example, '
        f"placer.Whole(x) or placer.Batched(x, {dim}) around it says the same)"
        + (f"; the same for {', '.join(unsure[1:])}" if unsure[1:] else ""),
    )


def _row_counts(
    inputs: Sequence[Tensor], given: Mapping[int, int], free: Sequence[int], names: Sequence[str]
) -> list[int]:
    """The sizes that the batch may have, the likeliest first."""
    if given:
        sizes = {names[i]: inputs[i].size(dim) for i, dim in given.items()}
        if len(set(sizes.values())) > 1:
            raise CaptureError(
                "/inputs",
                "the batch differs between inputs: "
                + ", ".join(f"{n}: {s}" for n, s in sizes.items()),
                "give all of them as many rows",
            )
        return list(dict.fromkeys(size for size in sizes.values() if size))
    return list(dict.fromkeys(inputs[i].size(0) for i in free if inputs[i].size(0)))


def _assignments(
    given: Mapping[int, int], options: Mapping[int, Sequence[int]]
) -> Iterator[dict[int, int]]:
    """Ways to choose inputs and dimensions, the likeliest first: all that may be, along dimension 0."""

    zero = {i: 0 for i, dims in options.items() if 0 in dims}
    possible = [i for i, dims in options.items() if dims]
    ways: Iterable[dict[int, int]] = itertools.chain(
        [zero],
        ({j: 0 for j in zero if j != i} for i in zero),
        ({i: 0} for i in zero),
        (
            {i: dim for i, dim in zip(possible, choice, strict=True) if dim is not None}
            for choice in itertools.product(*([*options[i], None] for i in possible))
        ),
    )
    tried: list[dict[int, int]] = []
    for way in itertools.islice(ways, 10 * _MOST_RUNS):
        dims = dict(sorted({**way, **given}.items()))
        if dims and dims not in tried:
            tried.append(dims)
            yield dims


def _likely(
    inputs: Sequence[Tensor], given: Mapping[int, int], free: Sequence[int]
) -> dict[int, int]:
    """The dimensions that are assumed if forward takes no other batch than the example's."""
    if given or not free:
        return dict(given)
    rows = inputs[free[0]].size(0)
    return {i: 0 for i in free if inputs[i].size(0) == rows}


def _options(inputs: Sequence[Tensor], dims: Mapping[int, int], index: int) -> list[int]:
    rows = next(inputs[i].size(dim) for i, dim in dims.items())
    return [d for d, size in enumerate(inputs[index].shape) if size == rows]


def grown(
    converter: FakeConverter,
    inputs: Sequence[Tensor],
    dims: Sequence[BatchDim],
    times: int | Sequence[int],
) -> list[Tensor]:
    """``inputs`` repeated along ``dims``: all of them as often, or each as often as ``times`` says."""
    factors = [times] * len(inputs) if isinstance(times, int) else times
    larger = []
    with converter.mode, torch.no_grad():
        for tensor, dim, count in zip(inputs, dims, factors, strict=True):
            if dim is None:
                larger.append(tensor)
                continue
            repeated = torch.cat([tensor] * count, dim).detach()
            larger.append(repeated.requires_grad_(tensor.requires_grad))
    return larger
