"""Peak bytes of a real training step on the CPU, from the events of torch's own allocator.

``torch.profiler`` reports every block that is allocated and freed, with the operators around it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType

import placer
from placer.executor.places.place import HOST, Place, on
from placer.executor.stages import offload
from placer.simulation.optimizers import make_optimizer

# Operators that oneDNN runs: convolutions, LSTMs, and products of matrices in half precision.
_ONEDNN = {
    *(f"aten::{name}" for name in ("convolution", "convolution_backward")),
    *(f"aten::{name}" for name in ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")),
    *(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorPeaks:
    """Peak bytes in a step; ``tensors`` leaves out what oneDNN allocates and frees within a call."""

    tensors: int
    everything: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    time: int
    address: int
    nbytes: int  # negative when it is given back
    call: int | None  # the outermost call of oneDNN's that it happened in
    on_host: bool


def allocator_peaks(
    model: nn.Module,
    plan: placer.Plan,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[[Any], Tensor],
) -> AllocatorPeaks:
    """Most bytes in the second step of ``plan`` on the CPU, with weights and optimizer state.

    A step of training with the plan's optimizer, or a call. The inputs are the caller's and do not
    count, nor do activations that wait on the host.
    """
    placed = placer.compile(model, plan, args, kwargs, run_on="cpu")
    optimizer = make_optimizer(plan.optimizer, [p for p in placed.parameters() if p.requires_grad])

    def step() -> None:
        if not plan.training:
            with torch.no_grad():
                placed(*args, **kwargs or {})
            return
        placed.step(*args, loss_fn=loss_fn, reduction="mean", **kwargs or {})
        optimizer.step()
        optimizer.zero_grad()

    with mock.patch.object(offload, "on", _labelled):
        step()
        state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        before = sum(t.nbytes for t in (*placed.parameters(), *placed.buffers(), *state))
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            step()
    events: list[_Event] = []
    for root in profile.profiler.kineto_results.experimental_event_tree():
        _collect(root, None, False, events)
    events.sort(key=lambda event: event.time)
    tensors, everything = _changes(events)
    return AllocatorPeaks(
        tensors=before + max(itertools.accumulate(tensors), default=0),
        everything=before + max(itertools.accumulate(everything), default=0),
    )


@contextlib.contextmanager
def _labelled(place: Place) -> Iterator[None]:
    """`on`, with a profiler event that marks allocations on the host."""
    with on(place), torch.profiler.record_function(f"on {place.name}"):
        yield


def _collect(event: Any, call: int | None, on_host: bool, events: list[_Event]) -> None:
    """The allocator's events below ``event``."""
    if event.tag == _EventType.Allocation:
        fields = event.extra_fields
        events.append(
            _Event(
                time=event.start_time_ns,
                address=fields.ptr,
                nbytes=fields.alloc_size,
                call=call,
                on_host=on_host,
            )
        )
    if call is None and event.name in _ONEDNN:
        call = event.id
    on_host = on_host or event.name == f"on {HOST.name}"
    for child in event.children:
        _collect(child, call, on_host, events)


def _changes(events: Sequence[_Event]) -> tuple[list[int], list[int]]:
    """Changes of live bytes: without blocks that a oneDNN call allocates and frees itself, and with them."""
    made_by: dict[int, int] = {}
    inside: set[int] = set()
    counted: list[int] = []
    for index, event in enumerate(events):
        if event.nbytes > 0:
            made_by[event.address] = index
            if not event.on_host:
                counted.append(index)
        elif event.address in made_by:
            made = made_by.pop(event.address)
            if not events[made].on_host:
                counted.append(index)
            if event.call is not None and events[made].call == event.call:
                inside |= {made, index}
    tensors = [events[i].nbytes for i in counted if i not in inside]
    return tensors, [events[i].nbytes for i in counted]
