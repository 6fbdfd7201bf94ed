"""What every node of a captured model costs: bytes, FLOPs, and how long its values live."""

from __future__ import annotations

from dataclasses import dataclass

from placer.cost.work import Work
from placer.regions.types import RegionKey


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredValue:
    """One storage that forward made (or received), and who needs it; positions are node positions.

    ``producer`` is -1 for the model's inputs. ``savers`` are the nodes whose backward needs it.
    ``fixed``: made of weights alone (autocast's copies of them), so that its bytes do not depend on
    the rows of a micro-batch. ``parts``: nodes that save only a part of it, and the part's bytes.
    """

    nbytes: int
    producer: int
    users: tuple[int, ...]
    savers: tuple[int, ...]
    fixed: bool = False
    parts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingGradient:
    """A gradient that the backward of node ``source`` made and that of node ``target`` consumes.

    It belongs to the result of node ``home``: the target itself, or where the gradients of several
    readers add up, ``target`` being the last of them. It may be a view of more than is needed (the
    part of a concatenation): when the backward of ``sender`` hands it over to another stage,
    ``surplus`` bytes of ``nbytes`` stay behind. ``earlier`` are the other parts that ``sender``
    hands on: the nodes that consume them before ``target`` does, and their bytes. ``of_weight``: it
    is part of the gradient of a weight that several nodes read, and not of an activation.
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
    """Bytes that the backward of ``node`` needs on top in the stage that has ``home`` as well.

    Where several nodes read the result of ``home``, their gradients are added up on its device.
    ``waiting`` of the bytes are there before the sum is made: what ``node`` saved is let go between.
    """

    node: int
    home: int
    nbytes: int
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCost:
    """One node for one micro-batch; bytes are live bytes, traffic is bytes read and written."""

    forward_flops: int = 0
    backward_flops: int = 0
    forward_traffic: int = 0
    backward_traffic: int = 0
    forward_transient: int = 0  # most bytes that it made and that were live while it ran forward
    forward_sending: int = 0  # the same if what it saves goes to the host at once
    backward_transient: int = 0  # the same in its backward, with what came in and its own savings
    backward_fetching: int = 0  # the same if what it saved waits on the host until it is read
    backward_incoming: int = 0  # of backward_transient, the gradients that came in
    output_nbytes: int = 0  # what crosses if its result is needed elsewhere
    host_nbytes: int = 0  # what is offloaded on its account: out in forward, back in backward
    host_pinned_nbytes: int = 0  # what that takes of the host in pinned memory


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A parameter or buffer of the model, once, also where several names stand for it (tied weights)."""

    name: str
    nbytes: int
    readers: tuple[int, ...]  # the nodes that read it, by position; ascending
    is_buffer: bool
    trained: bool  # it gets a gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """The costs of all nodes for one micro-batch of one replica; owns no placement.

    Nodes are numbered by their position in ``names``, the program's order; position ``len(names)``
    stands for the loss, which is computed where the results are.
    """

    names: tuple[str, ...]
    nodes: tuple[NodeCost, ...]  # one longer than names: the loss
    values: tuple[StoredValue, ...]
    results: tuple[tuple[int, ...], ...]  # per node: which of the values its result is held in
    gradients: tuple[PendingGradient, ...]
    added: tuple[AddedGradient, ...]
    readers: tuple[tuple[int, ...], ...]  # per node: positions of the nodes that read its result
    input_readers: tuple[tuple[int, ...], ...]  # per tensor input of the model
    input_nbytes: tuple[int, ...]
    state: tuple[StateTensor, ...]
    saving: frozenset[int]  # nodes whose backward needs something saved, be it only a weight
    work: Work  # what the nodes run, for their seconds
    keys: tuple[RegionKey | None, ...] = ()  # per node; (): every saved activation is kept

    @property
    def trained_nbytes(self) -> int:
        """Bytes of the parameters that get gradients."""
        return sum(tensor.nbytes for tensor in self.state if tensor.trained)
