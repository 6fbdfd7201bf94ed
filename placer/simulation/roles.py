"""Finds ranks with the same role: they run equal nodes, with equal neighbours, in the same order."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from placer.emit import SegmentCode, StagedModel
from placer.executor.distributed.job.assignment import RankAssignment
from placer.executor.distributed.job.ownership import Ownership
from placer.executor.distributed.messages.crossings import Crossings, TensorSpec
from placer.plan.types import Plan
from placer.program import Program
from placer.schedule import Action, Message

# Compared by value; most other objects are the same only if they are one object.
_PLAIN = (
    *(int, float, complex, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What a rank runs: ranks with equal ``key`` have the same timeline.

    Only the ``names`` of values and the indices of its ``stages`` are others, in the same order.
    """

    key: Hashable
    names: tuple[str, ...]
    stages: tuple[int, ...] = ()


def find_role(
    program: Program,
    plan: Plan,
    staged: StagedModel,
    ownership: Ownership,
    assignment: RankAssignment,
    crossings: Sequence[Crossings],
    order: Sequence[Action],
    messages: Sequence[Message],
) -> Role:
    """The role of a rank, for the ``crossings`` of its micro-batches, and all ranks' actions and messages.

    Ranks get different keys whenever it is not certain that they do the same: if they read different inputs,
    constants or shared weights, or objects that cannot be compared.
    """
    me = assignment.device_index
    holders = [ownership.holders[ownership.first_name[name]] for name in ownership.names[me]]
    if program.captured.conditions.guess.others or any(c.staged is not staged for c in crossings):
        return Role(key=(assignment.rank,), names=(), stages=tuple(assignment.stage_indices))
    different = {id(each): each for each in crossings}
    numbers = _Numbers(program)
    key = (
        [numbers.value(numbers.state[name]) for name in ownership.names[me]],
        [each for each in zip(ownership.names[me], holders, strict=True) if len(each[1]) > 1],
        [numbers.stage(staged, plan, index) for index in assignment.stage_indices],
        numbers.order(order, messages, assignment),
        [numbers.crossings(each, assignment) for each in different.values()],
        [list(different).index(id(each)) for each in crossings],
    )
    return Role(
        key=_hashable(key), names=tuple(numbers.nodes), stages=tuple(assignment.stage_indices)
    )


class _Numbers:
    """Describes what a rank runs by numbers instead of names, in the order in which they are met."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._graph = {node.name: node for node in program.graph.nodes}
        self._modules = dict(program.model.named_modules(remove_duplicate=False))
        self.state: Mapping[str, Tensor] = {
            **dict(program.model.named_parameters(remove_duplicate=False)),
            **dict(program.model.named_buffers(remove_duplicate=False)),
        }
        self.nodes: dict[str, int] = {}
        self._objects: dict[int, int] = {}  # of tensors and modules, by id
        self._peers: dict[int, int] = {}

    def _node(self, name: str) -> int:
        return self.nodes.setdefault(name, len(self.nodes))

    def stage(self, staged: StagedModel, plan: Plan, index: int) -> Any:
        """The inputs, nodes and segments of a stage."""
        code, program = staged.stages[index], self._program
        # An input of the model, or a constant, is the same only for ranks that read this one.
        known = {*staged.graph_inputs, *staged.constants}
        return (
            index == len(plan.stages) - 1,
            [(self._node(name), name if name in known else "") for name in code.inputs],
            [
                self._operation(self._graph[name])
                for name in plan.stages[index].nodes
                if name not in program.captured.constants
            ],
            [self._node(name) for name in code.outputs],
            [self._segment(segment) for segment in code.segments],
        )

    def _operation(self, node: fx.Node) -> Any:
        path = str(node.target)
        target: Any = path if node.op == "call_method" else node.target
        if node.op in ("call_module", "get_attr"):
            target = self._modules.get(path, self.state.get(path, node))
        return node.op, *map(self.value, (target, node.args, node.kwargs)), self._node(node.name)

    def _segment(self, segment: SegmentCode) -> Any:
        return (
            [self._node(name) for name in segment.inputs],
            [self._node(name) for name in segment.outputs],
            sorted(self._node(name) for name in segment.released),
            [self.value(self.state[name]) for name in segment.written],
            (segment.recompute, segment.offload, segment.overlapped),
        )

    def value(self, value: Any) -> Any:
        """What ``value`` is. A tensor or module has a number too: is it one that was met before?"""
        if isinstance(value, fx.Node):
            return fx.Node, self._node(value.name)
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, tuple | list | set | frozenset):
            return type(value), [self.value(each) for each in value]
        if isinstance(value, dict):
            return type(value), [(self.value(k), self.value(v)) for k, v in value.items()]
        if isinstance(value, slice):
            return slice, self.value((value.start, value.stop, value.step))
        if not isinstance(value, Tensor | nn.Module):
            return id(value)
        known = id(value) in self._objects
        number = self._objects.setdefault(id(value), len(self._objects))
        if isinstance(value, nn.Module):
            return number, type(value), None if known else self.value(vars(value))
        strides = value.stride() if value.layout == torch.strided else id(value)
        return number, type(value), value.shape, value.dtype, strides, value.requires_grad

    def order(
        self, order: Sequence[Action], messages: Sequence[Message], assignment: RankAssignment
    ) -> Any:
        """The rank's actions and messages; of their positions only the order counts."""
        me, stages = assignment.device_index, assignment.stage_indices
        actions = [
            (position, a.kind, stages.index(a.stage_index), a.microbatch_index)
            for position, a in enumerate(order)
            if a.stage_index in stages
        ]
        own = [m for m in messages if me in (m.sender, m.receiver)]
        used = {p for m in own for p in (m.sent_after, m.needed_before)}
        at = {p: number for number, p in enumerate(sorted(used.union(a[0] for a in actions)))}
        return (
            [(at[position], *action) for position, *action in actions],
            [
                (
                    *(m.kind, self._node(m.name), m.microbatch_index, m.sender == me),
                    self._peer(m.receiver if m.sender == me else m.sender),
                    *(at[m.sent_after], at[m.needed_before]),
                )
                for m in own
            ],
        )

    def _peer(self, device: int) -> int:
        return self._peers.setdefault(device, len(self._peers))

    def crossings(self, crossings: Crossings, assignment: RankAssignment) -> Any:
        """The values that the rank makes for others or reads from them."""
        own, device_of = assignment.stage_indices, assignment.device_of

        def who(stages: Iterable[int]) -> Any:
            """The rank's own stages among ``stages``, and the peers that run the others."""
            return sorted(
                (s in own, own.index(s) if s in own else self._peer(device_of[s])) for s in stages
            )

        return [
            (
                self._node(each.name),
                [who(stages) for stages in ((each.maker,), each.readers, *each.gradient_readers)],
                (
                    each.spec,
                    [x if isinstance(x, TensorSpec) else self.value(x) for x in each.leaves],
                ),
            )
            for each in crossings.values.values()
            if {each.maker, *each.readers}.intersection(own)
        ]


def _hashable(value: Any) -> Hashable:
    """``value`` with tuples for lists."""
    return tuple(map(_hashable, value)) if isinstance(value, tuple | list) else value
