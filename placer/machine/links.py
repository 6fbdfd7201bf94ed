"""How long it takes to move bytes between the ranks of a job.

A collective of k ranks takes a latency, and the bytes that pass each rank over the *bus bandwidth*:
2 (k - 1) / k of the bytes for an all-reduce, half of that for a gather or a scatter. Bus bandwidth is what
nccl-tests measure (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One level of links: bytes/s that are sent, bytes/s of the bus in a collective, seconds of latency."""

    send: float
    bus: float
    latency: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links of a machine: ``inside`` a node of ``node`` devices, and the ``network`` between nodes.

    Ranks fill one node after the other. Without a network there is one node. The rates of the network are
    those of one card; a node has ``cards`` of them, and a collective uses as many as it has ranks in a node.

    >>> links = Links(inside=Link(send=100e9, bus=100e9), network=Link(send=10e9, bus=10e9), node=2)
    >>> links.send_seconds(1e9, 0, 1), links.send_seconds(1e9, 1, 2)
    (0.01, 0.1)
    >>> links.all_reduce_seconds(1e9, ranks=2, stride=1), links.all_reduce_seconds(1e9, ranks=4, stride=1)
    (0.01, 0.15)
    """

    inside: Link
    network: Link | None = None
    node: int = 1
    cards: int = 1

    def _node_of(self, rank: int) -> int:
        return rank // self.node if self.network is not None else 0

    def send_seconds(self, nbytes: float, source: int, target: int) -> float:
        """Seconds to send ``nbytes`` from one rank to another."""
        link = self.inside
        if self.network is not None and self._node_of(source) != self._node_of(target):
            link = self.network
        return link.latency + nbytes / link.send

    def all_reduce_seconds(self, nbytes: float, *, ranks: int, stride: int) -> float:
        """Seconds to sum ``nbytes`` over so many ranks, each ``stride`` after the one before it."""
        if ranks < 2 or not nbytes:
            return 0.0
        per_node = ranks if self.network is None else max(1, min(ranks, self.node // stride))
        nodes = -(-ranks // per_node)
        bus, latency = self.inside.bus, self.inside.latency
        if nodes > 1 and self.network is not None:
            bus = min(bus, self.network.bus * min(per_node, self.cards))
            latency += self.network.latency * (nodes - 1).bit_length()  # of a tree over the nodes
        return latency + 2 * (ranks - 1) / ranks * nbytes / bus

    def gather_seconds(self, nbytes: float, *, ranks: int, stride: int) -> float:
        """Seconds to gather ``nbytes`` from shares of so many ranks, or to sum and scatter them."""
        return self.all_reduce_seconds(nbytes, ranks=ranks, stride=stride) / 2

    def reduce_seconds(
        self, nbytes: float, *, ranks: int, stride: int, pieces: int = 1, rounds: int = 1
    ) -> float:
        """Seconds of each of ``rounds`` in which gradients of ``nbytes`` are summed over so many ranks.

        If they are divided, each of so many neighbours gets the sum of a piece in every round; what others
        have of the same piece is added once.
        """
        if pieces == 1:
            return self.all_reduce_seconds(nbytes, ranks=ranks, stride=stride)
        across = self.all_reduce_seconds(
            nbytes / pieces, ranks=ranks // pieces, stride=stride * pieces
        )
        return self.gather_seconds(nbytes, ranks=pieces, stride=stride) + across / rounds

    def at_worst(self) -> Links:
        """The same where collectives over nodes use one network card of a node, however many it has."""
        return replace(self, cards=1)
