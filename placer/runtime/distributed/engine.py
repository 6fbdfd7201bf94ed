"""Drives this rank's stages by a schedule of ``torch.distributed.pipelining``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from placer.errors import PlacerError
from placer.runtime.distributed.boundary import Crossings, Wire
from placer.runtime.distributed.faults import LocatedStage
from placer.runtime.distributed.stage import Run, StageModule
from placer.runtime.replica import Replica

Widths = tuple[tuple[Wire, ...], ...]  # per boundary: the largest of each wire so far


def schedule_class(name: str, num_stages: int, num_devices: int, num_microbatches: int) -> Any:
    """Torch's class for schedule ``name``.

    With several stages per device GPipe's order is that of ``ScheduleLoopedBFS`` and 1F1B's that of
    ``ScheduleInterleaved1F1B``; with fewer micro-batches than stages 1F1B is GPipe.
    """
    if num_stages > num_devices:
        name = {"GPipe": "LoopedBFS", "1F1B": "Interleaved1F1B"}.get(name, name)
    elif name == "1F1B" and num_microbatches < num_stages:
        name = "GPipe"
    return getattr(pipelining, f"Schedule{name}")


class Engine:
    """This rank's stages under one schedule; rebuilt when a batch needs wider wires.

    Every replica has an engine of its own per rank; all its ranks are called alike.
    """

    def __init__(
        self,
        replica: Replica,
        part: nn.Module,
        *,
        schedule: str,
        microbatches: int,
        stage_indices: tuple[int, ...],
        group: dist.ProcessGroup,
        device: torch.device,
        stage_class: Any = LocatedStage,
    ) -> None:
        self._replica = replica
        self._stage_class = stage_class
        self._part = part
        self._schedule_name = schedule
        self._microbatches = microbatches
        self._stage_indices = stage_indices
        self._group = group
        self._device = device
        # By whether there is a backward, and by what kinds of tensors cross:
        self._schedules: dict[Any, Any] = {}
        self._widths: dict[Any, Widths] = {}
        self._stages: dict[Any, list[StageModule]] = {}
        self._pipeline_stages: list[Any] = []

    @property
    def splits_backward(self) -> bool:
        """Whether weights get their gradients outside of autograd's accumulation."""
        return self._schedule_name == "InterleavedZeroBubble"

    def execute(self, run: Run, largest: Crossings) -> None:
        """Run the batch through the pipeline, with its backward when ``run`` has a loss.

        ``largest`` is what crosses for the largest micro-batch of any rank of this replica.
        """
        training = run.loss_of is not None
        key = self._widen(
            training, [largest, *(m.crossings for m in run.microbatches if m.crossings)]
        )
        for stage in self._stages[key]:
            stage.run = run
        count = self._microbatches
        try:
            with _without_schedule_dump():
                self._schedules[key].step(
                    arg_mbs=[() for _ in range(count)],
                    kwarg_mbs=[{"microbatch": index} for index in range(count)],
                    target_mbs=[None] * count if training else None,
                    return_outputs=False,
                )
        finally:
            for stage in self._stages[key]:
                stage.run = None
            for pipeline_stage in self._pipeline_stages:
                pipeline_stage.clear_runtime_states()

    def _widen(self, training: bool, crossings: Sequence[Crossings]) -> Any:
        """Make the wires wide enough; returns the key of the schedule to use."""
        needed = [_widths(c) for c in {id(c): c for c in crossings}.values()]
        kinds = [_kinds(widths) for widths in needed]
        if any(kind != kinds[0] for kind in kinds):
            raise PlacerError(
                "micro-batches",
                "of this batch run different programs, which hand on different values",
                "give a batch that divides evenly, or another number of micro-batches",
            )
        key = (training, kinds[0])
        known = [self._widths[key]] if key in self._widths else []
        widest = _widest([*known, *needed])
        if [widest] != known:
            self._widths[key] = widest
            self._build(key, widest)
        return key

    def _build(self, key: Any, widths: Widths) -> None:
        training = key[0]
        num_stages = len(self._replica.staged.stages)
        modules, stages = [], []
        for index in self._stage_indices:
            before = widths[index - 1] if index else ()
            after = widths[index] if index < num_stages - 1 else None
            module = StageModule(index, self._replica, self._part, after)
            result = (torch.empty((), device="meta"),)
            stages.append(
                self._stage_class(
                    module,
                    index,
                    num_stages,
                    self._device,
                    input_args=_examples(before),
                    output_args=result if after is None else _examples(after),
                    group=self._group,
                )
            )
            modules.append(module)
        num_devices = dist.get_world_size(self._group)
        kind = schedule_class(self._schedule_name, num_stages, num_devices, self._microbatches)
        if not training:  # the same for every schedule: forwards in order
            kind = pipelining.ScheduleGPipe if len(stages) == 1 else pipelining.ScheduleLoopedBFS
        single = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
        try:
            self._schedules[key] = kind(
                stages[0] if single else stages,
                self._microbatches,
                loss_fn=_own_loss if training else None,
                scale_grads=False,
            )
        except ValueError as error:
            raise PlacerError(
                f"schedule {self._schedule_name}",
                f"torch refuses {self._microbatches} micro-batches over {num_stages} stages: {error}",
                "choose another number of micro-batches, or GPipe",
            ) from error
        self._stages[key] = modules
        self._pipeline_stages += stages


@contextmanager
def _without_schedule_dump() -> Iterator[None]:
    """Torch logs its whole schedule when a stage fails, on every rank; the error itself says more."""
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _own_loss(output: Tensor, _: Any) -> Tensor:
    """The last stage returns the loss already."""
    return output


def _examples(wires: tuple[Wire, ...]) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(wire.numel, dtype=wire.dtype, device="meta", requires_grad=wire.requires_grad)
        for wire in wires
    )


def _widths(crossings: Crossings) -> Widths:
    return tuple(
        tuple(Wire((w.numel,), w.dtype, w.requires_grad) for w in wires)
        for wires in crossings.wires
    )


def _kinds(widths: Widths) -> Any:
    return tuple(tuple((wire.dtype, wire.requires_grad) for wire in row) for row in widths)


def _widest(all_widths: Sequence[Widths]) -> Widths:
    """Per wire the largest."""
    return tuple(
        tuple(max(column, key=lambda wire: wire.numel) for column in zip(*rows, strict=True))
        for rows in zip(*all_widths, strict=True)
    )
