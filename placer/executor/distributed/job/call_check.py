"""Checks that all ranks make the same call, by one small message before they send anything else.

Otherwise ranks whose messages do not match would wait for each other until they time out, compute with
rows of different batches, or be ended by gloo without a Python exception.
"""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from placer.errors import PlacerError
from placer.executor.distributed.job.join import name_ranks
from placer.grid import Grid

Method = Literal["placed(x)", "placed.step", "placed.clip_grad_norm_", "placer.save", "placer.load"]
_METHODS: tuple[Method, ...] = get_args(Method)
_NOTHING = -1  # stands for None; as bits of a float it is a NaN, which no count is
_SAMPLED = 32  # about so many values of a tensor are compared
_REMEDY = "make all these calls on all ranks, in the same order and with the same options"
_SAME_BATCH = (
    "give every rank the whole batch; or with own_rows=True, give all ranks of a replica the rows of "
    "that replica (placed.sampler selects them)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDescription:
    """The call that this rank makes.

    ``names`` are the names of the model's inputs, and ``inputs`` their tensors, if the call has any;
    ``target`` is the target of the loss. Whatever call a rank makes, its message has ``room`` for the
    numbers of so many inputs. ``fault`` is an error that this rank found in its own call. ``counted`` is
    what the loss's normalizer counts in the target, on ranks that compute losses.
    """

    method: Method
    room: int
    names: Sequence[str] = ()
    options: Mapping[str, object] = field(default_factory=dict)
    inputs: Sequence[Tensor] = ()
    target: Any = None
    rows: int | None = None  # None: the call has no batch
    training: bool = False
    own_rows: bool = False
    fault: PlacerError | None = None
    counted: float | None = None

    def numbers(self) -> list[int]:
        """The numbers that ranks compare, in the order that `CallCheck` reads; as many for every call."""
        shapes = [(tuple(x.shape), str(x.dtype)) for x in self.inputs]
        first = self.input_numbers() if self.fits else []
        target = [x for x in tree_leaves(self.target) if isinstance(x, Tensor)]
        return [
            _METHODS.index(self.method),
            _number(sorted(self.options.items())),
            self.own_rows,
            self.training,
            -1 if self.rows is None else self.rows,
            _number(shapes),
            self.fault is not None,
            _bits(self.counted),
            _sample(target),
            *first,
            *[0] * (2 * self.room - len(first)),
        ]

    @property
    def fits(self) -> bool:
        """Whether the message has room for the numbers of all inputs."""
        return len(self.inputs) <= self.room

    def input_numbers(self) -> list[int]:
        """For every input a sample of its values, then whether it requires a gradient."""
        return [number for x in self.inputs for number in (_sample([x]), int(x.requires_grad))]


class CallCheck:
    """Starts an exchange of call descriptions between all ranks, and compares them at the end.

    Use it as a context manager; in the block a rank can prepare its own work. At the end of the block,
    if the calls do not match, every rank raises the same ``PlacerError``, in place of any exception of
    the block. That is the case if ranks make different calls, if any rank has found a fault, or if
    ``count`` refuses the rows of the replicas. The number of rows and the shapes of inputs must be the
    same on all ranks, or with ``own_rows`` on all ranks of a replica of the ``grid``.

    ``readers`` has for each of the model's inputs the devices of a replica whose stages read it;
    ``last_device`` is the device that computes losses. The values of inputs are compared by a sample.
    Different values are an error if a replica would compute with rows of different batches, otherwise a
    warning: a rank may be given anything for an input that it does not read, and random augmentations
    may differ.
    """

    def __init__(
        self,
        called: CallDescription,
        *,
        grid: Grid,
        readers: Mapping[str, Sequence[int]],
        last_device: int,
        world: dist.ProcessGroup,
        device: torch.device,
        count: Callable[[Sequence[int]], int | None] | None = None,
    ) -> None:
        self._called = called
        self._grid = grid
        self._readers = readers
        self._last_device = last_device
        self._world = world
        self._count = count
        self._device = device
        self._numbers, self._work = self._exchange(called.numbers())
        # Known at the end of the block: whether the calls match, the result of ``count``, and what the
        # normalizer counts in the target of the whole batch.
        self.alike = False
        self.total: int | None = None
        self.counted: float | None = None

    def __enter__(self) -> CallCheck:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            return  # the program is ending
        self._work.wait()
        try:
            rows = self._rows_if_alike()
            self.total = None if self._count is None else self._count(rows)
        except PlacerError as error:
            raise error from None
        self.alike = True
        del self._numbers, self._work  # free them before the step runs

    def _exchange(self, numbers: Sequence[int]) -> tuple[Tensor, dist.Work]:
        """Start to send ``numbers`` to all ranks; those of every rank, and the work to wait for."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        everyone = mine.new_empty(dist.get_world_size(self._world), len(mine))
        work = dist.all_gather(list(everyone), mine, group=self._world, async_op=True)
        assert work is not None  # this rank is in the group
        return everyone, work

    def _rows_if_alike(self) -> list[int]:
        """The number of rows that each replica was given; raises ``PlacerError`` if calls do not match."""
        ranks = self._numbers.tolist()
        columns = zip(*ranks, strict=True)
        methods, options, own_rows, training, rows, shapes, faults, counted, targets, *rest = (
            columns
        )
        _compare_methods([_METHODS[number] for number in methods])
        method, given = self._called.method, ", ".join(self._called.options)
        _compare(options, method, f"has other options ({given})", _REMEDY)
        _compare(own_rows, "own_rows", "is different", _REMEDY)
        _compare(training, "mode (placed.train(), placed.eval())", "is different", _REMEDY)
        replicas = self._grid.groups("pp")
        alike = replicas if self._called.own_rows else self._grid.groups("dp", "pp")
        for group in alike:
            _compare(rows, "batch", "has another number of rows", _SAME_BATCH, group)
            _compare(shapes, "inputs", "have other shapes or types", _SAME_BATCH, group)
        if not self._called.fits:  # all ranks make the same call, so they all come here
            more, work = self._exchange(self._called.input_numbers())
            work.wait()
            rest = list(zip(*more.tolist(), strict=True))
        inputs = self._called.names[: len(self._called.inputs)]
        values, wanted = rest[0 : 2 * len(inputs) : 2], rest[1 : 2 * len(inputs) : 2]
        for name, wants in zip(inputs, wanted, strict=True):
            if 0 < sum(wants) < len(ranks):
                raise PlacerError(
                    f"input {name}",
                    f"requires gradients on {sum(wants)} of {len(ranks)} ranks only, and each rank "
                    "computes a part of them",
                    "call requires_grad_() on all ranks, or on none",
                )
        if self._called.fault is not None:
            raise self._called.fault
        if any(faults):
            faulty = name_ranks([r for r, fault in enumerate(faults) if fault])
            raise PlacerError(method, f"was refused on {faulty}", "see the error of that rank")
        for name, samples in zip(inputs, values, strict=True):
            for group in replicas:
                self._compare_samples(name, samples, targets, group)
        counts = [_from_bits(bits) for bits in counted if bits != _NOTHING]
        if counts:  # one per replica; without ``own_rows`` all replicas have the same target
            self.counted = sum(counts) if self._called.own_rows else counts[0]
        rank = dist.get_rank(self._world)
        first = next(group[0] for group in alike if rank in group)
        if any(samples[rank] != samples[first] for samples in values):
            warnings.warn(
                f"rank {rank} was given other inputs than rank {first}: {_SAME_BATCH}", stacklevel=5
            )
        return [rows[group[0]] for group in replicas]

    def _compare_samples(
        self, name: str, samples: Sequence[int], targets: Sequence[int], ranks: Sequence[int]
    ) -> None:
        """Raise ``PlacerError`` if the replica would compute with rows of different batches.

        ``ranks`` are those of the replica's devices. This is certain if ranks that read the input have
        different values of it, or if the rank that computes losses has another input and another target
        than a rank that reads the input. (A tensor with only one value may be a placeholder for an
        input that the rank does not use, so it is not compared.)
        """
        readers = [ranks[device] for device in self._readers[name]]
        if not readers:
            return
        odd = [rank for rank in readers if samples[rank] != samples[readers[0]]]
        last = ranks[self._last_device]
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


def _compare_methods(methods: Sequence[str]) -> None:
    """Raise ``PlacerError`` if the ranks do not all call the same method."""
    ranks = {method: [r for r, m in enumerate(methods) if m == method] for method in methods}
    if len(ranks) > 1:
        said = ", ".join(f"{name_ranks(those)} at {method}" for method, those in ranks.items())
        raise PlacerError("call", f"is not the same on all ranks: {said}", _REMEDY)


def _compare(
    values: Sequence[int],
    what: str,
    problem: str,
    remedy: str,
    ranks: Sequence[int] | None = None,
) -> None:
    """Raise ``PlacerError`` if the ``values`` of these ranks, or of all, are not equal."""
    first, *others = range(len(values)) if ranks is None else ranks
    odd = [rank for rank in others if values[rank] != values[first]]
    if odd:
        raise PlacerError(what, f"{problem} on {name_ranks(odd)} than on rank {first}", remedy)


def _number(value: object) -> int:
    return zlib.crc32(repr(value).encode())


def _bits(number: float | None) -> int:
    return _NOTHING if number is None else int(struct.unpack("<q", struct.pack("<d", number))[0])


def _from_bits(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


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
    return 2 * _number(values) + any(value != own[0] for own in values for value in own)


def _varies(sample: int) -> bool:
    """Whether a result of `_sample` is of values that differ from each other."""
    return sample % 2 == 1
