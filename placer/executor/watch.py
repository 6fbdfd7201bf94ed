"""Measures a step: when each action runs, waits and sends, and the memory of devices; beside the plan."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from placer._torch import is_profiling
from placer.plan.step_spans import step_spans
from placer.plan.types import Plan
from placer.quantities import format_bytes, format_seconds
from placer.schedule import Action
from placer.timeline import Span, Task

Kind = Literal["forward", "backward", "waiting", "sending"]
_UNPREDICTED = ("waiting", "sending")
_watches: list[StepWatch] = []


class Seconds(NamedTuple):
    """Seconds of a stage in a step; ``bubble`` is when its device computes neither this nor another one.

    ``waiting`` for messages and ``sending`` them (without what goes on in the meantime) are parts of the
    bubble, and are not predicted by stage.
    """

    forward: float = 0.0
    backward: float = 0.0
    waiting: float = 0.0
    sending: float = 0.0
    bubble: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """A stage of a replica in a measured step, on ``rank``, beside what the plan predicts.

    ``predicted`` is None if times are not known. ``peak`` and ``reserved`` are bytes of torch's allocator on
    the device, with all its stages; None on a CPU, where they are not measured.
    """

    rank: int
    replica: int
    stage: int
    device: str  # of the plan
    ran_on: str
    seconds: Seconds
    predicted: Seconds | None
    peak: int | None
    reserved: int | None
    predicted_peak: int
    predicted_reserved: int | None

    @property
    def _place(self) -> str:
        """The device, and which one stood for it, as in a trial on the CPU."""
        stood_for = self.ran_on.partition(":")[0] != self.device.partition(":")[0]
        return f"{self.ran_on} for {self.device}" if stood_for else self.device


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """A measured step of all ranks. ``spans`` are in seconds from each rank's own beginning of the step."""

    step_seconds: float
    predicted_seconds: float | None
    stages: tuple[StageReport, ...]
    spans: tuple[Span, ...]

    @property
    def slowest(self) -> StageReport:
        """A stage of the device that computes longest, the longest of them."""
        busy: dict[tuple[int, str], float] = {}
        for each in self.stages:
            key = each.rank, each.device
            busy[key] = busy.get(key, 0.0) + each.seconds.forward + each.seconds.backward
        return max(self.stages, key=lambda s: (busy[s.rank, s.device], sum(s.seconds[:2])))

    def __str__(self) -> str:
        last = self.slowest
        lines = [
            f"step {_beside(self.step_seconds, self.predicted_seconds)}; slowest: rank {last.rank}, "
            f"stage {last.stage} on {last._place}"
        ]
        for each in self.stages:
            predicted = {} if each.predicted is None else each.predicted._asdict()
            parts = [
                f"{name} {_beside(seconds, None if name in _UNPREDICTED else predicted.get(name))}"
                for name, seconds in each.seconds._asdict().items()
            ]
            peaks = zip(
                ("peak", "reserved"),
                (each.peak, each.reserved),
                (each.predicted_peak, each.predicted_reserved),
                strict=True,
            )
            parts += [
                f"{name} {format_bytes(found)}" + (f" ({format_bytes(wanted)})" if wanted else "")
                for name, found, wanted in peaks
                if found is not None
            ]
            at = f"rank {each.rank}, replica {each.replica}, stage {each.stage} on {each._place}"
            lines += [f"{at}:", *_wrapped(parts)]
        times = self.predicted_seconds is not None
        known = times or any(each.peak is not None for each in self.stages)
        return "\n".join([*lines, *["(in brackets: predicted)"] * known])


def _wrapped(parts: Iterable[str]) -> list[str]:
    """Indented lines of at most 80 columns with ``parts``, none of which is broken."""
    unbroken = ", ".join(part.replace(" ", "\xa0") for part in parts)
    lines = textwrap.wrap(unbroken, 80, initial_indent="  ", subsequent_indent="  ")
    return [line.replace("\xa0", " ") for line in lines]


def _beside(found: float, predicted: float | None) -> str:
    also = "" if predicted is None else f" ({format_seconds(predicted)})"
    return format_seconds(found) + also


class _Interval(NamedTuple):
    kind: Kind
    task: Task
    device: torch.device
    start: torch.cuda.Event | float
    end: torch.cuda.Event | float


class StepWatch:
    """Measures a step that this process runs on ``devices``, from its construction on.

    On a GPU, times are those of events on its current stream, so the step is not slowed down by waiting.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._gpus = sorted({d for d in devices if d.type == "cuda"}, key=str)
        for device in self._gpus:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        self._begin = {device: _mark(device) for device in self._gpus}
        self._began = time.perf_counter()
        self._intervals: list[_Interval] = []

    @contextmanager
    def timed(self, kind: Kind, task: Task, device: torch.device) -> Iterator[None]:
        """Measure the block."""
        start = _mark(device)
        yield
        self._intervals.append(_Interval(kind, task, device, start, _mark(device)))

    def report(self, plan: Plan, *, rank: int = 0) -> StepReport:
        """The report of the step that ends now, of this process."""
        for device in self._gpus:
            torch.cuda.synchronize(device)
        step = time.perf_counter() - self._began
        spans, totals, devices = [], dict[tuple[int, int], Seconds](), {}
        for kind, task, device, start, end in self._intervals:
            action, at = task.action, task.replica
            assert action is not None
            key = at, action.stage_index
            name = plan.devices_of(plan.stages[action.stage_index], at)[0]
            devices[key] = name, device
            first, last = (self._seconds(device, mark) for mark in (start, end))
            before = totals.get(key, Seconds())
            totals[key] = before._replace(**{kind: getattr(before, kind) + last - first})
            computes = kind in ("forward", "backward")
            spans.append(
                Span(
                    "compute" if computes else "transfer",
                    str(action) if computes else f"{kind}: {action}",
                    (name,) if computes else (f"{name}, {kind}",),
                    first,
                    last,
                    task=task if computes else None,
                )
            )
        peaks = {device.device: device for device in plan.devices}
        predicted, predicted_step = _predict(plan)
        stages = []
        names = {key: name for key, (name, _) in devices.items()}
        for key, seconds in sorted(_with_bubbles(totals, names, step).items()):
            name, device = devices[key]
            gpu = device if device.type == "cuda" else None
            stages.append(
                StageReport(
                    rank=rank,
                    replica=key[0],
                    stage=key[1],
                    device=name,
                    ran_on=str(device),
                    seconds=seconds,
                    predicted=predicted.get(key),
                    peak=None if gpu is None else torch.cuda.max_memory_allocated(gpu),
                    reserved=None if gpu is None else torch.cuda.max_memory_reserved(gpu),
                    predicted_peak=peaks[name].peak,
                    predicted_reserved=peaks[name].reserved,
                )
            )
        return StepReport(
            step_seconds=step,
            predicted_seconds=predicted_step,
            stages=tuple(stages),
            spans=tuple(spans),
        )

    def _seconds(self, device: torch.device, mark: torch.cuda.Event | float) -> float:
        """The seconds from the beginning of the step to ``mark``."""
        if isinstance(mark, float):
            return mark - self._began
        begin = self._begin[device]
        assert not isinstance(begin, float)
        return float(begin.elapsed_time(mark)) / 1e3


def joined(reports: Sequence[StepReport]) -> StepReport:
    """The report of all ranks, from one of each."""
    return replace(
        max(reports, key=lambda report: report.step_seconds),
        stages=tuple(stage for report in reports for stage in report.stages),
        spans=tuple(span for report in reports for span in report.spans),
    )


@contextmanager
def watching(watch: StepWatch) -> Iterator[None]:
    """In this block, `timed` measures for ``watch``."""
    _watches.append(watch)
    try:
        yield
    finally:
        _watches.pop()


@contextmanager
def timed(kind: Kind, task: Task, device: torch.device) -> Iterator[None]:
    """Measures the block for a watch, if there is one; torch's profiler, if it runs, shows its name."""
    named: AbstractContextManager[object] = nullcontext()
    action = task.action
    if is_profiling() and action is not None and kind in ("forward", "backward"):
        where = f"replica {task.replica} stage {action.stage_index}"
        name = f"{where} {action.kind}{action.microbatch_index}"
        named = torch.profiler.record_function(name)
    with named, _watches[-1].timed(kind, task, device) if _watches else nullcontext():
        yield


def is_measured() -> bool:
    """Is there a watch now?"""
    return bool(_watches)


def kind_of(action: Action) -> Kind:
    """Whether ``action`` is part of the forward or of the backward."""
    return "forward" if action.kind == "F" else "backward"


def _mark(device: torch.device) -> torch.cuda.Event | float:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _with_bubbles(
    totals: dict[tuple[int, int], Seconds], devices: dict[tuple[int, int], str], step: float
) -> dict[tuple[int, int], Seconds]:
    busy: dict[str, float] = {}
    for key, found in totals.items():
        busy[devices[key]] = busy.get(devices[key], 0.0) + found.forward + found.backward
    return {
        key: found._replace(bubble=max(0.0, step - busy[devices[key]]))
        for key, found in totals.items()
    }


def _predict(plan: Plan) -> tuple[dict[tuple[int, int], Seconds], float | None]:
    """The predicted seconds of each stage of each replica, and of the step without the optimizer."""
    spans = [span for span in step_spans(plan) if span.kind != "optimizer"]
    if not spans:
        return {}, None
    totals: dict[tuple[int, int], Seconds] = {}
    devices = {}
    for span in spans:
        if span.task is None or span.task.action is None:
            continue
        key = span.task.replica, span.task.action.stage_index
        kind, before = kind_of(span.task.action), totals.get(key, Seconds())
        totals[key] = before._replace(**{kind: getattr(before, kind) + span.end - span.start})
        devices[key] = span.on[0]
    step = max(span.end for span in spans)
    return _with_bubbles(totals, devices, step), step
