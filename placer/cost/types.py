"""The cost table of a program: bytes and FLOPs of each node, and which nodes need which values."""

from __future__ import annotations

from dataclasses import dataclass

from placer.cost.work import Work
from placer.regions.types import RegionKey
from placer.state_layout import piece_length


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredValue:
    """One storage that forward made or received, and the nodes that need it, by position.

    ``producer`` is the node that made it, -1 for the model's inputs. ``users`` read it in forward;
    ``savers`` need it in backward. ``fixed``: it is made from weights alone (like autocast's copies of
    them), so its bytes do not depend on the rows of a micro-batch. ``parts`` has (node, bytes) of the nodes
    that save only a part of it.
    """

    nbytes: int
    producer: int
    users: tuple[int, ...]
    savers: tuple[int, ...]
    fixed: bool = False
    parts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PendingGradient:
    """A gradient that the backward of node ``source`` makes and the backward of ``target`` consumes.

    It belongs to the result of node ``home``. ``target`` is ``home``, unless the gradients of several
    readers of one result are added up; then ``target`` is the last of these readers. The storage may hold
    more than the target needs, as for the gradient of a concatenation: when the backward of ``sender``
    passes the gradient to another stage, ``surplus`` of its ``nbytes`` stay behind. ``earlier`` lists the
    other parts that ``sender`` passes on, as (node that consumes the part before ``target`` does, bytes).
    ``of_weight``: it is part of the gradient of a weight that several nodes read, not of an activation.
    """

    nbytes: int
    source: int
    target: int
    home: int
    sender: int
    surplus: int
    earlier: tuple[tuple[int, int], ...] = ()
    of_weight: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedGradient:
    """Additional bytes in the backward of ``node`` if ``home`` is in the same stage.

    If several nodes read the result of ``home``, their gradients are added up on the device of
    ``home``. ``before_sum`` is the part of ``nbytes`` that is needed before the sum is computed; the tensors
    that ``node`` saved are freed in between.
    """

    node: int
    home: int
    nbytes: int
    before_sum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCost:
    """Costs of one node for one micro-batch.

    ``forward_transient`` counts what the node makes: the most bytes alive at a time in its forward.
    ``backward_transient`` is the most bytes alive at a time in its backward: the gradients that it receives
    and makes, and the tensors that only it saved. The variants ``_offloaded`` are for a node whose saved
    tensors go to the host at once and are fetched when they are read.
    """

    forward_flops: int = 0
    backward_flops: int = 0
    forward_transient: int = 0
    forward_transient_offloaded: int = 0
    backward_transient: int = 0
    backward_transient_offloaded: int = 0
    backward_incoming: int = 0  # the gradients that it receives, a part of backward_transient
    output_nbytes: int = 0  # bytes of its result, which are sent if another stage reads it
    # Bytes that it offloads: copied to the host in forward and back in backward
    host_nbytes: int = 0
    host_pinned_nbytes: int = 0  # bytes of pinned host memory that ``host_nbytes`` take
    cast_nbytes: int = 0  # copies of weights in half precision that no node before it needs


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A parameter or buffer of the model. A tied one appears once, under its first name."""

    nbytes: int
    readers: tuple[int, ...]  # the nodes that read it, by position; ascending
    is_buffer: bool
    trained: bool  # it gets a gradient
    row_gradient_nbytes: int | None = None  # of a sparse gradient, for the rows that are looked up
    gradient_ranks: int = 1  # over which its gradient is divided

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of its gradient, or of a rank's piece of it."""
        if self.gradient_ranks > 1:  # sums of sparse gradients are dense
            return piece_length(self.nbytes, self.gradient_ranks)
        return self.nbytes if self.row_gradient_nbytes is None else self.row_gradient_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """The costs of all nodes for one micro-batch of one replica, independent of stages.

    Nodes are numbered by their position in ``names``, the program's order. Position ``len(names)`` is
    the loss, which is computed on the last stage.
    """

    names: tuple[str, ...]
    nodes: tuple[NodeCost, ...]  # one longer than names: the loss
    values: tuple[StoredValue, ...]
    results: tuple[tuple[int, ...], ...]  # per node: indices of the values that store its result
    gradients: tuple[PendingGradient, ...]  # sorted
    added: tuple[AddedGradient, ...]
    readers: tuple[tuple[int, ...], ...]  # per node: positions of the nodes that read its result
    input_readers: tuple[tuple[int, ...], ...]  # per tensor input of the model
    input_nbytes: tuple[int, ...]
    state: tuple[StateTensor, ...]
    saving: frozenset[int]  # nodes that save anything for backward, even only a weight
    work: Work  # the operations of the nodes, from which seconds are computed
    # Region of each node; (): all saved activations are kept
    keys: tuple[RegionKey | None, ...] = ()
    loss: str = ""  # its name

    @property
    def waiting_nbytes(self) -> list[int]:
        """Per node, the bytes of the gradient of its result, if it reads a trained weight; else 0.

        They wait between the two halves of a split backward (`placer.executor.stages.split_backward`).
        """
        readers = {node for tensor in self.state if tensor.trained for node in tensor.readers}
        return [self.nodes[i].output_nbytes if i in readers else 0 for i in range(len(self.nodes))]

    @property
    def trained_nbytes(self) -> int:
        """Bytes of the parameters that get gradients."""
        return sum(tensor.nbytes for tensor in self.state if tensor.trained)
