"""Runs this rank's actions of the schedule, with messages to and from the other ranks of its replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from placer.emit import StagedModel
from placer.executor.distributed.failures.layer_failure import anomalies_kept, explain_failure
from placer.executor.distributed.messages.crossings import Crossings, TensorSpec
from placer.executor.distributed.messages.transport import Channel, MessageTransport, compare_tensor
from placer.executor.execute import MicrobatchRun, PlacedMicrobatch, ScheduleRun
from placer.executor.slice_store import stored_for_slice
from placer.executor.stages.replica import Replica
from placer.executor.stages.tree import renew_buffers
from placer.program import unflatten_output
from placer.schedule import Action, Message, find_messages, linearize, schedule_on

LossOf = Callable[[PlacedMicrobatch, Any, Sequence[Any]], Tensor]
LossOfBatch = Callable[[Sequence[MicrobatchRun]], list[Tensor]]


@dataclass(slots=True)
class Results:
    """Results on the rank that runs the last stage: losses, or in inference result leaves."""

    losses: list[Tensor] = field(default_factory=list)
    leaves: dict[int, list[Any]] = field(default_factory=dict)


class Pipeline:
    """Runs this rank's stages under one schedule; all ranks of a replica must call it alike.

    ``part`` has the rank's modules; ``rank_of`` has for each stage the rank of the replica that runs it.
    ``layer_of`` has the layer of each node of the model, for errors.
    """

    def __init__(
        self,
        replica: Replica,
        part: nn.Module,
        *,
        schedule: str,
        microbatches: int,
        rank: int,
        rank_of: Sequence[int],
        channel: Channel,
        layer_of: Mapping[str, str] | None = None,
    ) -> None:
        self._layer_of = layer_of or {}
        self._replica = replica
        self._part = part
        self._rank = rank
        self._rank_of = tuple(rank_of)
        self._channel = channel
        forward_only = linearize(schedule_on("GPipe", rank_of, microbatches))
        self._order = linearize(schedule_on(schedule, rank_of, microbatches))
        self._order_of_inference = [a for a in forward_only if a.kind == "F"]
        self._known: dict[Any, tuple[list[Crossings], list[Action], tuple[Message, ...]]] = {}

    def place(
        self, staged: StagedModel, inputs: Mapping[str, Any], *, are_here: bool, **given: Any
    ) -> PlacedMicrobatch:
        """A micro-batch for this rank's stages of ``staged``, which read ``inputs``; the rest is ``given``.

        ``are_here``: the inputs are on the rank's device already.
        """
        replica = self._replica.with_program(staged)
        replica.follow_attributes(self._part)
        # A stage that writes to an input gets a copy; the caller's tensor is written at the end.
        read = [name for name in inputs if are_here and name not in staged.written_inputs]
        return PlacedMicrobatch(
            replica=replica,
            trees=[[self._part]] * len(staged.stages),
            inputs=inputs,
            input_places=dict.fromkeys(read, replica.places[0]),
            **given,
        )

    def run(
        self,
        microbatches: Sequence[PlacedMicrobatch],
        crossings: Sequence[Crossings],
        loss_of: LossOf | None,
        *,
        loss_of_batch: LossOfBatch | None = None,
        ready: Callable[[], object] = lambda: None,
        scale: float = 1.0,
    ) -> Results:
        """Run the micro-batches through the pipeline, with backward if a loss is given.

        ``crossings`` has the values between stages of each.
        ``loss_of(microbatch, output, stored leaves)`` returns a micro-batch's weighted loss; backward
        starts from ``scale`` times that. Or ``loss_of_batch(runs)`` is called where the last stage runs,
        between all forwards and all backwards: it returns the loss of the whole batch on one of the ranks,
        and has given the runs' results their gradients. ``ready()`` is called before anything is sent.
        """
        results = Results()
        training = loss_of is not None or loss_of_batch is not None

        def finish(index: int, leaves: list[Any]) -> Tensor | None:
            given = microbatches[index]
            if loss_of is None:
                for found, expected in zip(leaves, crossings[index].result, strict=True):
                    if isinstance(expected, TensorSpec):
                        compare_tensor(found, expected)
                results.leaves[index] = leaves
                return None
            staged = given.replica.staged
            output = unflatten_output(staged.call, leaves)
            if not staged.stored:
                return loss_of(given, output, ())
            results.leaves[index] = tree_map_only(Tensor, Tensor.detach, leaves)
            with stored_for_slice(staged, leaves, self._part):
                return loss_of(given, output, staged.stored_leaves(leaves))

        def explain(action: Action, run: MicrobatchRun, error: Exception) -> Exception:
            staged = microbatches[action.microbatch_index].replica.staged
            code = staged.stages[action.stage_index]
            return explain_failure(code, run.phase, error, self._layer_of, anomalies)

        order, messages = self._plan(crossings, training=training)
        staged_models = [given.replica.staged for given in microbatches]
        renew_buffers(self._part, {name for each in staged_models for name in each.replaced})
        with anomalies_kept() as anomalies:
            run = ScheduleRun(
                dict(enumerate(microbatches)),
                [action for action in order if self._rank_of[action.stage_index] == self._rank],
                None if loss_of_batch is not None else finish,
                transport=MessageTransport(
                    messages,
                    dict(enumerate(crossings)),
                    order,
                    self._rank_of,
                    rank=self._rank,
                    place=self._replica.places[0],
                    channel=self._channel,
                    ready=ready,
                ),
                explain=explain,
                scale=scale,
            )
            if loss_of_batch is None:
                run.do()
                results.losses = run.finish()
                return results
            run.do("F")
            if self._rank_of[-1] == self._rank:
                for index, each in run.runs.items():
                    if staged_models[index].stored:
                        results.leaves[index] = tree_map_only(Tensor, Tensor.detach, each.result)
                results.losses = loss_of_batch(list(run.runs.values()))
            run.do("B")
            run.finish()
        return results

    def _plan(
        self, crossings: Sequence[Crossings], *, training: bool
    ) -> tuple[list[Action], tuple[Message, ...]]:
        """The actions of all ranks for micro-batches with these values, and the messages between ranks."""
        key = (training, *map(id, crossings))
        if key not in self._known:
            every = self._order if training else self._order_of_inference
            order = [action for action in every if action.microbatch_index < len(crossings)]
            messages = find_messages(order, lambda m: crossings[m].flows, self._rank_of)
            # Keeps ``crossings``, and so their ids.
            self._known[key] = list(crossings), order, messages
        _, order, messages = self._known[key]
        return order, messages
