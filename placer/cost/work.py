"""The operations of all nodes as arrays, to compute the seconds of each node on any kind of device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from placer.cost.operations import Operation
from placer.machine.catalogue import DeviceKind
from placer.machine.rates import CLASSES, DTYPES, RATE_FIELDS, Rates

Vector = NDArray[np.float64]

_CODES = {
    (name, dtype): i * len(DTYPES) + j
    for i, name in enumerate(CLASSES)
    for j, dtype in enumerate(DTYPES)
}
_KEYS = tuple(_CODES)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassSeconds:
    """Seconds of each node in one pass: on the device, and on the host, which launches the kernels.

    The two overlap: the nodes that a process runs on a device take the larger of the two sums.
    """

    device: Vector
    host: Vector

    def with_sent(self, seconds: Vector) -> PassSeconds:
        """The same with so many more seconds on the device, which waits for other shards."""
        return replace(self, device=self.device + seconds) if seconds.any() else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Seconds of every node in forward and in backward; the last entry is the loss."""

    forward: PassSeconds
    backward: PassSeconds


class Work:
    """The operations of every node in forward and in backward; the last entry is the loss."""

    def __init__(
        self,
        names: Sequence[str],
        forward: Sequence[Sequence[Operation]],
        backward: Sequence[Sequence[Operation]],
        sent: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._names = (*names, "loss")
        # Bytes that each node sends to the other shards of its stage, in forward and in backward
        columns = zip(*sent, strict=True) if sent else ([0] * len(self._names),) * 2
        self.sent = tuple(np.array(column, dtype=np.float64) for column in columns)
        self._passes = (_Pass.of(forward), _Pass.of(backward))
        self._again: tuple[int, ...] = ()  # nodes whose forward runs again in backward
        self._known: dict[DeviceKind, Seconds] = {}

    def seconds(self, kind: DeviceKind) -> Seconds:
        """Seconds of every node on a device of this kind; measured seconds where its profile has them."""
        if kind not in self._known:
            forward, backward = (
                p.seconds(kind.rates, len(self._names)).with_sent(sent / kind.link_bandwidth)
                for p, sent in zip(self._passes, self.sent, strict=True)
            )
            if (own := kind.profile) is not None:
                forward = self._measured(forward, own.forward, own.forward_launch)
                backward = self._measured(backward, own.backward, own.backward_launch)
            self._known[kind] = Seconds(
                forward=forward, backward=_with_repeated(backward, forward, self._again)
            )
        return self._known[kind]

    def _measured(
        self,
        estimate: PassSeconds,
        measured: Mapping[str, tuple[float, float]],
        launched: Mapping[str, float],
    ) -> PassSeconds:
        """Replace estimates by a profile's measurements: name -> (measured, estimated at that time).

        A measurement is scaled by the ratio of today's estimate to the estimate made with it; the host
        launches a node in ``launched`` seconds whatever its size.
        """
        device, host = estimate.device.copy(), estimate.host.copy()
        for i, name in enumerate(self._names):
            if name in measured:
                seconds, estimated = measured[name]
                device[i] = seconds * (device[i] / estimated if estimated and device[i] else 1.0)
                host[i] = launched.get(name, 0.0)
        return PassSeconds(device=device, host=host)

    def operations(self) -> dict[str, list[tuple[int, Operation]]]:
        """(position of the node, operation) of all operations of each pass, to fit rates to."""
        return {
            way: list(p.operations())
            for way, p in zip(("forward", "backward"), self._passes, strict=True)
        }

    def with_repeated(self, nodes: Sequence[int]) -> Work:
        """A copy in which the forward of ``nodes`` runs again in backward, as often as they occur."""
        return self._copy(self._passes, tuple(nodes), 1.0)

    def with_share(self, share: float) -> Work:
        """A copy for a micro-batch with the fraction ``share`` of the rows."""
        shrunk = (self._passes[0].with_share(share), self._passes[1].with_share(share))
        return self._copy(shrunk, self._again, share)

    def _copy(self, passes: tuple[_Pass, _Pass], again: tuple[int, ...], share: float) -> Work:
        made = Work.__new__(Work)
        made.sent = tuple(sent * share for sent in self.sent)
        made._names, made._passes, made._again, made._known = self._names, passes, again, {}
        return made


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pass:
    """The operations of one pass: an array per field of `Operation`, and the position of the node."""

    node: NDArray[np.int64]
    code: NDArray[np.int64]
    flops: Vector
    nbytes: Vector
    width: Vector

    @classmethod
    def of(cls, nodes: Sequence[Sequence[Operation]]) -> _Pass:
        rows = [
            (i, _CODES[o.name, o.dtype], o.flops, o.nbytes, o.width)
            for i, operations in enumerate(nodes)
            for o in operations
        ]
        columns = list(zip(*rows, strict=True)) if rows else [()] * 5
        whole = [np.array(column, dtype=np.int64) for column in columns[:2]]
        real = [np.array(column, dtype=np.float64) for column in columns[2:]]
        return cls(node=whole[0], code=whole[1], flops=real[0], nbytes=real[1], width=real[2])

    def with_share(self, share: float) -> _Pass:
        return replace(self, flops=self.flops * share, nbytes=self.nbytes * share)

    def operations(self) -> list[tuple[int, Operation]]:
        columns = (self.node, self.code, self.flops, self.nbytes, self.width)
        return [
            (int(n), Operation(*_KEYS[int(c)], int(f), int(b), int(w)))
            for n, c, f, b, w in zip(*columns, strict=True)
        ]

    def seconds(self, rates: Rates, count: int) -> PassSeconds:
        """The formula of `placer.machine.rates.Rate.seconds` for all operations at once, summed by node."""
        rows = [[getattr(rates[key], field) for field in RATE_FIELDS] for key in _KEYS]
        columns = np.array(rows, dtype=np.float64).T[:, self.code]
        at = dict(zip(RATE_FIELDS, columns, strict=True))
        width = np.maximum(self.width, 1.0)
        padded = np.where(self.width > 0, np.ceil(width / at["tile"]) * at["tile"] / width, 1.0)
        limited = (at["row_bandwidth"] > 0) & (self.width > 0)
        reached = np.where(
            limited, np.minimum(at["bandwidth"], at["row_bandwidth"] * width), at["bandwidth"]
        )
        seconds = at["overhead"] + _quotient(self.flops * padded, at["flops"])
        seconds = seconds + _quotient(self.nbytes, reached)
        add = lambda weights: np.bincount(self.node, weights=weights, minlength=count)  # noqa: E731
        return PassSeconds(
            device=add(seconds).astype(np.float64), host=add(at["launch"]).astype(np.float64)
        )


def _quotient(amount: Vector, rate: Vector) -> Vector:
    """``amount / rate``; 0 where the rate is 0."""
    return np.divide(amount, rate, out=np.zeros_like(amount), where=rate > 0)


def _with_repeated(
    backward: PassSeconds, forward: PassSeconds, nodes: Sequence[int]
) -> PassSeconds:
    if not nodes:
        return backward
    device, host = backward.device.copy(), backward.host.copy()
    chosen = list(nodes)
    np.add.at(device, chosen, forward.device[chosen])
    np.add.at(host, chosen, forward.host[chosen])
    return PassSeconds(device=device, host=host)
