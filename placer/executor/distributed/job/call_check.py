"""Checks that all ranks make the same call, by one small message from each while it begins to work.

Otherwise ranks whose messages do not match would wait for each other until they time out, compute with
rows of different batches, or be ended by gloo without a Python exception.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from placer._torch import all_gather_single
from placer.errors import PlacerError
from placer.executor.distributed.job.groups import gather_objects, wait_function
from placer.executor.distributed.job.join import name_ranks

Method = Literal["placed(x)", "placed.step", "placed.clip_grad_norm_", "placer.save", "placer.load"]
_NOTHING = -1  # in place of a number of rows
_SAMPLED = 32  # about so many values of a tensor are compared
_REMEDY = "make all these calls on all ranks, in the same order and with the same options"
_SAME_BATCH = (
    "give every rank the whole batch; or with own_rows=True, give all ranks of a replica the rows of "
    "that replica (placed.sampler selects them)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDescription:
    """The call that this rank makes.

    ``inputs`` are the tensors of the model's inputs, by name, if the call has any; ``target`` is the target
    of the loss. ``options`` must be the same on all ranks. ``counted`` is what the loss's normalizer counts
    in the target, on ranks that compute losses.
    """

    method: Method
    options: Mapping[str, object] = field(default_factory=dict)
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    target: Any = None
    rows: int | None = None  # None: the call has no batch
    own_rows: bool = False
    counted: float | None = None

    def of_all(self) -> dict[str, str]:
        """What must be the same on all ranks, as text by its name in errors."""
        wanted = {
            f"requires_grad of input {n}": str(x.requires_grad) for n, x in self.inputs.items()
        }
        given = {name: str(value) for name, value in self.options.items()}
        return {"call": self.method, "own_rows": str(self.own_rows), **given, **wanted}

    def of_batch(self) -> dict[str, str]:
        """What must be the same on all ranks that are given the same rows."""
        shapes = {f"input {n}": f"{list(x.shape)} of {x.dtype}" for n, x in self.inputs.items()}
        return {"batch": f"{self.rows} rows", **shapes}


class CallCheck:
    """Starts an exchange of messages about the call between all ranks; `wait` compares them.

    A rank may work in the meantime, but must not communicate before it has called `wait`. If the calls do
    not match, every rank raises the same ``PlacerError`` there. That is the case if ranks make different
    calls, or if ``count`` refuses the rows of the replicas. The number of rows and the shapes of inputs
    must be the same on all ranks, or with ``own_rows`` on all ranks of a replica. ``replicas`` has the ranks
    of each replica.

    ``readers`` has for each of the model's inputs which ranks of a replica have stages that read it;
    ``last`` says which one computes losses. The values of inputs are compared by a sample; the
    message has ``room`` for those of so many inputs, and the last has that of all further ones. Different
    values are an error if a replica would compute with rows of different batches, otherwise a warning: a
    rank may be given anything for an input that it does not read, and random augmentations may differ.
    """

    def __init__(
        self,
        called: CallDescription,
        *,
        room: int,
        replicas: Sequence[Sequence[int]],
        readers: Mapping[str, Sequence[int]],
        last: int,
        world: dist.ProcessGroup,
        device: torch.device,
        count: Callable[[Sequence[int]], int | None] | None = None,
    ) -> None:
        self._called = called
        self._replicas = replicas
        self._everyone = range(sum(map(len, replicas)))
        self._last = last
        self._world = world
        self._count = count
        # The inputs that share a number, and the ranks of a replica that read any of them.
        names = list(called.inputs)
        self._slots = [[name] for name in names[: room - 1]] + [names[room - 1 :]] * (
            room <= len(names)
        )
        self._readers = [sorted({d for n in slot for d in readers[n]}) for slot in self._slots]
        samples = [_sample([called.inputs[n] for n in slot]) for slot in self._slots]
        numbers = [
            _digest(called.of_all()),
            _digest(called.of_batch()),
            _NOTHING if called.rows is None else called.rows,
            math.nan if called.counted is None else called.counted,
            _sample([x for x in tree_leaves(called.target) if isinstance(x, Tensor)]),
            *samples,
            *[0] * (room - len(samples)),
        ]
        mine = torch.tensor(numbers, dtype=torch.float64, device=device)
        numbers_of_all = mine.new_empty(len(self._everyone), len(mine))
        work = all_gather_single(numbers_of_all.view(-1), mine, world, async_op=True)
        # None when the messages have been compared, which frees them.
        self._exchange: tuple[Tensor, Callable[[], object]] | None
        self._exchange = numbers_of_all, wait_function(work)
        self._refusal: PlacerError | None = None
        # Known after `wait`: the result of ``count``, and what the normalizer counts in the target of the
        # whole batch.
        self.total: int | None = None
        self.counted: float | None = None

    def wait(self) -> None:
        """Wait for the messages of all ranks. Raises ``PlacerError``, each time, if calls do not match."""
        if self._exchange is not None:
            numbers, wait = self._exchange
            wait()
            self._exchange = None
            try:
                rows = self._compare(numbers.tolist())
                self.total = None if self._count is None else self._count(rows)
            except PlacerError as error:
                self._refusal = error
        if self._refusal is not None:
            raise self._refusal from None

    def _compare(self, numbers: Sequence[Sequence[float]]) -> list[int]:
        """The number of rows that each replica was given; raises ``PlacerError`` if calls do not match."""
        calls, batches, rows, counted, targets, *samples = zip(*numbers, strict=True)
        alike = self._replicas if self._called.own_rows else [self._everyone]
        if len(set(calls)) > 1:
            raise self._difference(self._called.of_all(), [self._everyone], _REMEDY)
        if any(len({batches[rank] for rank in group}) > 1 for group in alike):
            raise self._difference(self._called.of_batch(), alike, _SAME_BATCH)
        for slot, readers, values in zip(self._slots, self._readers, samples, strict=False):
            for group in self._replicas:
                self._compare_samples(", ".join(slot), readers, values, targets, group)
        counts = [count for count in counted if not math.isnan(count)]
        if counts:  # one per replica; without ``own_rows`` all replicas have the same target
            self.counted = sum(counts) if self._called.own_rows else counts[0]
        rank = dist.get_rank(self._world)
        first = next(group[0] for group in alike if rank in group)
        if any(values[rank] != values[first] for values in samples):
            warnings.warn(
                f"rank {rank} was given other inputs than rank {first}: {_SAME_BATCH}", stacklevel=5
            )
        return [int(rows[group[0]]) for group in self._replicas]

    def _difference(
        self, mine: Mapping[str, str], groups: Sequence[Sequence[int]], remedy: str
    ) -> PlacerError:
        """The error for calls whose digests differ within one of ``groups``; a collective call."""
        said = gather_objects(mine, self._world)
        for first, *others in groups:
            for rank in others:
                for name in {**said[first], **said[rank]}:
                    here, there = said[rank].get(name), said[first].get(name)
                    if here != there:
                        problem = f"is {here} on rank {rank}, but {there} on rank {first}"
                        return PlacerError(name, problem, remedy)
        raise AssertionError("equal calls have different digests")

    def _compare_samples(
        self,
        name: str,
        reading: Sequence[int],
        samples: Sequence[float],
        targets: Sequence[float],
        ranks: Sequence[int],
    ) -> None:
        """Raise ``PlacerError`` if the replica would compute with rows of different batches.

        ``ranks`` are those of the replica, of which those at the positions ``reading`` read the input. The
        error is certain if ranks that read the input have different values of it, or if the rank that
        computes losses has another input and another target than a rank that reads the input. (A tensor with
        only one value may be a placeholder for an input that the rank does not use, so it is not compared.)
        """
        readers = [ranks[position] for position in reading]
        if not readers:
            return
        odd = [rank for rank in readers if samples[rank] != samples[readers[0]]]
        last = ranks[self._last]
        if last not in readers and all(
            given[last] != given[readers[0]] and _varies(given[last]) and _varies(given[readers[0]])
            for given in (samples, targets)
        ):
            odd.append(last)
        if odd:
            raise PlacerError(
                f"input {name}",
                f"has other values on {name_ranks(odd)} than on rank {readers[0]}, and the stages of "
                "these ranks compute one result",
                _SAME_BATCH,
            )


def _digest(said: Mapping[str, str]) -> int:
    return zlib.crc32(repr(list(said.items())).encode())


def _sample(tensors: Sequence[Tensor]) -> int:
    """A hash of some values of ``tensors``, taken evenly along every dimension.

    It is odd if the values of any tensor differ from each other.
    """
    values = []
    for tensor in tensors:
        if tensor.layout == torch.strided and tensor.numel():
            along_each = max(2, round(_SAMPLED ** (1 / max(tensor.dim(), 1))))
            places = tuple(slice(None, None, max(1, size // along_each)) for size in tensor.shape)
            values.append(tensor.detach()[places].flatten().tolist())
    varies = any(value != own[0] for own in values for value in own)
    return 2 * zlib.crc32(repr(values).encode()) + varies


def _varies(sample: float) -> bool:
    """Whether a result of `_sample` is of values that differ from each other."""
    return sample % 2 == 1
