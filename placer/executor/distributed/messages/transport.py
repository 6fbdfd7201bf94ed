"""Sends values and gradients between ranks as point-to-point messages of ``torch.distributed``.

Each message goes directly from the rank that made it to the rank that needs it, even if there are other
stages between them. All ranks know all messages of a step in advance, in one order
(`placer.schedule.messages`) and with the shapes of their tensors. So messages need no headers, and no
wait is circular.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from placer.executor.distributed.job.groups import sendable, wait_function
from placer.executor.distributed.messages.crossings import NUMBERS, Crossings, TensorSpec
from placer.executor.execute import MicrobatchRun
from placer.executor.places.place import Place
from placer.schedule import Action, Message, take_due_receives


class Channel(Protocol):
    """Sends and receives tensors.

    The calls of all ranks must agree with one order of all messages: a channel may let a call wait until
    every earlier call of its rank has been met by that of the other rank.
    """

    def send(self, tensor: Tensor, rank: int) -> Wait:
        """Start to send ``tensor``; do not change it until the returned function has been called."""

    def receive(self, tensor: Tensor, rank: int) -> Wait:
        """Start to receive into ``tensor``; it is complete when the returned function has been called."""


Wait = Callable[[], object]


class GroupChannel:
    """Point-to-point messages of a process group; ranks are those of the group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def send(self, tensor: Tensor, rank: int) -> Wait:
        if not tensor.numel():
            return _do_nothing
        return wait_function(dist.isend(tensor, group=self._group, group_dst=rank))

    def receive(self, tensor: Tensor, rank: int) -> Wait:
        if not tensor.numel():
            return _do_nothing
        return wait_function(dist.irecv(tensor, group=self._group, group_src=rank))


class NoChannel:
    """Sends nothing and receives nothing, for a dry run of a single rank on fake tensors."""

    def send(self, tensor: Tensor, rank: int) -> Wait:
        return _do_nothing

    def receive(self, tensor: Tensor, rank: int) -> Wait:
        return _do_nothing


def _do_nothing() -> None:
    pass


@dataclass(slots=True)
class _Sent:
    """A message that is being sent; its tensors must stay alive and unchanged until it has arrived."""

    message: Message
    tensors: list[Tensor]
    waits: list[Wait]


@dataclass(slots=True)
class _Awaited:
    """A message whose receives have been started; ``tensors`` are keyed by leaf index of the value."""

    message: Message
    tensors: Mapping[int, Tensor]
    waits: list[Wait]
    present: Tensor | None = None  # a flag per gradient, if some may be missing


class MessageTransport:
    """The `Transport` of one rank for one run of a batch.

    ``order`` has the actions and ``messages`` the messages of all ranks. ``crossings`` has the contents
    of messages for each micro-batch, ``rank_of`` for each stage the rank of the replica that runs it.
    ``ready()`` is called before a message is sent or waited for, and before a backward, in which
    gradients are sent.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        crossings: Mapping[int, Crossings],
        order: Sequence[Action],
        rank_of: Sequence[int],
        *,
        rank: int,
        place: Place,
        channel: Channel,
        ready: Callable[[], object] = lambda: None,
    ) -> None:
        self._ready = ready
        self._crossings = crossings
        self._rank_of = rank_of
        self._rank = rank
        self._place = place
        self._channel = channel
        # Ranks that send something to this one; their messages show how far they have got.
        self._answering = {message.sender for message in messages if message.receiver == rank}
        self._at = {action: position for position, action in enumerate(order)}
        own = [action for action in order if rank_of[action.stage_index] == rank]
        # For each action of this rank the position of its next one, whose receives are started early.
        self._next = {a: self._at[b] for a, b in itertools.pairwise(own)}
        self._upcoming: deque[Message] = deque()  # that have not been started
        self._sent: dict[int, deque[_Sent]] = {}  # for each other rank, what is being sent to it
        self._needed: dict[int, list[Message]] = {}
        self._made: dict[int, list[Message]] = {}
        for message in messages:
            if rank not in (message.sender, message.receiver):
                continue
            self._upcoming.append(message)
            if message.receiver == rank:
                self._needed.setdefault(message.needed_before, []).append(message)
            else:
                self._made.setdefault(message.sent_after, []).append(message)
        self._awaited: dict[Message, _Awaited] = {}

    def receive(self, action: Action, run: MicrobatchRun) -> None:
        position = self._at[action]
        if action.kind != "F" or position in self._needed:
            self._ready()
        if action.kind == "F":
            for value in self._crossings[action.microbatch_index].known:
                made_here = self._rank_of[value.maker] == self._rank
                if action.stage_index in value.readers and not made_here:
                    run.put(value.name, value.rebuild({}), self._place)
        following = self._next.get(action, position)
        due = take_due_receives(self._upcoming, self._rank, position=position, following=following)
        self._awaited.update((message, self._start(message)) for message in due)
        for peer in self._sent.keys() - self._answering:
            self._release(peer, position)
        for message in self._needed.pop(position, ()):
            awaited = self._awaited.pop(message)
            for wait in awaited.waits:
                wait()
            self._hand_over(awaited, run)
            self._release(message.sender, message.sent_after)

    def check(self, action: Action, run: MicrobatchRun) -> None:
        if action.kind != "F":
            return
        values = self._crossings[action.microbatch_index].values
        for name, made in run.outputs.items():
            for found, expected in zip(tree_leaves(made), values[name].leaves, strict=True):
                compare_leaf(found, expected)

    def send(self, action: Action, run: MicrobatchRun) -> None:
        for message in self._made.pop(self._at[action], ()):
            assert self._upcoming[0] is message, "a message is sent out of its turn"
            self._upcoming.popleft()
            self._ready()
            tensors = self._tensors_of(message, run)
            waits = [self._channel.send(tensor, message.receiver) for tensor in tensors]
            sent = self._sent.setdefault(message.receiver, deque())
            sent.append(_Sent(message, tensors, waits))

    def finish(self) -> None:
        self._ready()
        for sent in self._sent.values():
            while sent:
                self._wait_for(sent.popleft())

    def _start(self, message: Message) -> _Awaited:
        specs = self._specs(message)
        device = self._place.device
        tensors = {
            position: torch.empty(spec.shape, dtype=spec.dtype, device=device)
            for position, spec in specs.items()
        }
        present = None
        if self._has_presence_flags(message):
            present = torch.ones(len(specs), dtype=torch.int8, device=device)
        told = [present] if present is not None else []
        waits = [
            self._channel.receive(tensor, message.sender) for tensor in (*told, *tensors.values())
        ]
        return _Awaited(message, tensors, waits, present)

    def _hand_over(self, awaited: _Awaited, run: MicrobatchRun) -> None:
        message = awaited.message
        value = self._crossings[message.microbatch_index].values[message.name]
        if message.kind == "value":
            for position, spec in value.tensors.items():
                if spec.requires_grad:
                    awaited.tensors[position].requires_grad_()
            leaves = {p: _as_sent(t, value.tensors[p]) for p, t in awaited.tensors.items()}
            run.put(message.name, value.rebuild(leaves), self._place)
            return
        there = (
            [True] * len(awaited.tensors) if awaited.present is None else awaited.present.tolist()
        )
        for (position, gradient), present in zip(awaited.tensors.items(), there, strict=True):
            if present:
                run.add_gradient((message.name, position), gradient, self._place)

    def _tensors_of(self, message: Message, run: MicrobatchRun) -> list[Tensor]:
        """The tensors of ``message``, contiguous; a missing gradient is sent as zeros."""
        if message.kind == "value":
            leaves = tree_leaves(run.outputs[message.name])
            positions = self._crossings[message.microbatch_index].values[message.name].tensors
            return [self._sendable(leaves[position]) for position in positions]
        specs = self._specs(message)
        found = {p: run.take_gradient((message.name, p)) for p in specs}
        tensors = [
            torch.zeros(spec.shape, dtype=spec.dtype, device=self._place.device)
            if found[position] is None
            else sendable(_dense(found[position]))
            for position, spec in specs.items()
        ]
        if self._has_presence_flags(message):
            present = torch.tensor([g is not None for g in found.values()], dtype=torch.int8)
            tensors.insert(0, present.to(self._place.device))
        return tensors

    def _sendable(self, leaf: Any) -> Tensor:
        if isinstance(leaf, Tensor):
            return sendable(leaf)
        return torch.tensor(leaf, dtype=NUMBERS[type(leaf)], device=self._place.device)

    def _specs(self, message: Message) -> Mapping[int, TensorSpec]:
        """The tensors of ``message``, keyed by their index among the leaves of its value."""
        value = self._crossings[message.microbatch_index].values[message.name]
        if message.kind == "value":
            return value.tensors
        return {
            position: spec
            for position, spec in value.tensors.items()
            if any(self._rank_of[r] == message.sender for r in value.gradient_readers[position])
        }

    def _has_presence_flags(self, message: Message) -> bool:
        """Whether ``message`` begins with a flag per gradient that says if it exists."""
        return (
            message.kind == "gradient"
            and self._crossings[message.microbatch_index].gradients_may_lack
        )

    def _release(self, peer: int, position: int) -> None:
        """Free the sent messages that ``peer`` needs up to ``position``, after waiting for their arrival.

        The wait is not circular: everything that ``peer`` needs before them comes earlier in the order
        and has been sent.
        """
        sent = self._sent.get(peer, deque())
        while sent and sent[0].message.needed_before <= position:
            self._wait_for(sent.popleft())

    def _wait_for(self, sent: _Sent) -> None:
        for wait in sent.waits:
            wait()


def _as_sent(tensor: Tensor, spec: TensorSpec) -> Any:
    """``tensor``, or the number that it holds; in a dry run that of ``spec``."""
    if spec.number is None:
        return tensor
    return spec.number if isinstance(tensor, FakeTensor) else type(spec.number)(tensor.item())


def compare_leaf(found: Any, expected: Any) -> None:
    """Raise ``ValueError`` if ``found``, a tensor or a number, is not what other ranks expect."""
    if isinstance(expected, TensorSpec) and type(found) is type(expected.number):
        return
    if isinstance(expected, TensorSpec):
        compare_tensor(found, expected)
    elif isinstance(expected, int | float) and found != expected:
        raise ValueError(
            f"passes on the number {found} instead of {expected}, so it depends on the data; place "
            "the layers that make it, and all after them, on the last device"
        )


def compare_tensor(found: Any, expected: TensorSpec) -> None:
    """Raise ``ValueError`` if ``found`` does not have the metadata that other ranks expect."""
    if not isinstance(found, Tensor):
        raise ValueError(f"passes on a {type(found).__name__}, but other ranks expect a tensor")
    if tuple(found.shape) != expected.shape:
        raise ValueError(
            f"passes on a tensor of shape {list(found.shape)}, but other ranks expect "
            f"{list(expected.shape)}: a hook changed it, or it depends on the data; remove the hook, or "
            "place the layers that make it, and all after them, on the last device"
        )
    if found.dtype != expected.dtype:
        raise ValueError(
            f"passes on a tensor of {found.dtype}, but other ranks expect {expected.dtype}: a hook "
            "changed it; convert it in the model, before placer.compile"
        )
    if found.requires_grad != expected.requires_grad:
        wants, expects = found.requires_grad, expected.requires_grad
        raise ValueError(
            f"passes on a tensor with requires_grad={wants}, but other ranks expect {expects}: a hook "
            "changed it; do that in the model, before placer.compile"
        )


def _dense(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.to_dense() if gradient.layout != torch.strided else gradient
