"""Cases whose ranks compare themselves with the plain model in the same process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import distributed_cases as cases
import loss_cases
import norm_cases
import pipeline_cases
import pytest
import sharded_cases
from distributed_cases import make_spec
from jobs import Job

import placer

SPLIT = "InterleavedZeroBubble"
FORWARDS = {"first": "cpu:0", "last": "cpu:1"}
BACKWARDS = {"first": "cpu:1", "last": "cpu:0"}
SAID = {"inputs": {"x": {"batch_dim": 0}}}
SHARDED = {"shard_state": "optimizer"}
DIVIDED = {"shard_state": "gradients"}
SYNC = {"batch_norm": "sync"}
SOME_SHARDS = {"shards": 2, "layers": ["encoder.**", "head"]}  # others run whole


def runs(case: Callable[..., Any], *variants: Any, ranks: int = 2) -> Iterator[Any]:
    """``case`` with its first variant's arguments; with ``--law``, with those of all."""
    for number, given in enumerate(variants or ((),)):
        args = given if isinstance(given, tuple) else (given,)
        for spec in args:
            if isinstance(spec, placer.PlacementSpec):
                ranks = len(spec.devices) * spec.replicas
        marks = [pytest.mark.matrix(0)] if number else []
        yield pytest.param(case, ranks, args, id=f"{case.__name__}-{ranks}-{number}", marks=marks)


@pytest.mark.parametrize(
    ("case", "ranks", "args"),
    [
        # Models that look at values of tensors and attributes
        *runs(pipeline_cases.step_by_values),
        *runs(pipeline_cases.step_after_attributes_were_set),
        *runs(
            pipeline_cases.steps_with_sizes,
            make_spec(2, 1, 4, "1F1B", layers=FORWARDS),
            make_spec(2, 1, 1, layers=FORWARDS),
            make_spec(2, 1, 2, layers=BACKWARDS),
        ),
        *runs(pipeline_cases.steps_with_functions_in_attributes),
        *runs(pipeline_cases.a_number_of_the_data),
        *runs(pipeline_cases.step_with_an_object_as_result),
        *runs(
            pipeline_cases.share_what_forward_writes,
            (make_spec(1, 2, 1, **SAID), True),
            (make_spec(2, 2, 1, **SAID), True),
            (make_spec(2, 2, 1, **SAID), False),
        ),
        *runs(
            pipeline_cases.step_with_conjugated_tensors,
            make_spec(2, 1, 2, layers={"first": "cpu:1", "second": "cpu:0"}),
            make_spec(2, 1, 2, layers={"first": "cpu:0", "second": "cpu:1"}),
            make_spec(1, 2, 1),
        ),
        *runs(
            pipeline_cases.infer_where_stages_pass_parameters,
            make_spec(2, 1, 2, layers=BACKWARDS),
            make_spec(2, 1, 2, layers=FORWARDS),
        ),
        *runs(
            pipeline_cases.step_where_hooks_are_removed,
            make_spec(2, 1, 1, layers={"0": "cpu:0", "1": "cpu:1", "2": "cpu:1"}),
            make_spec(2, 1, 1, layers={"0": "cpu:0", "1": "cpu:0", "2": "cpu:1"}),
        ),
        *runs(
            pipeline_cases.leave_values,
            make_spec(2, 1, 1, layers=FORWARDS),
            make_spec(2, 2, 2, layers=FORWARDS),
            make_spec(1, 2, 2),
        ),
        *runs(pipeline_cases.step_with_written_inputs),
        # What a training script does besides steps
        *runs(cases.accumulate_and_clip, make_spec(2, 1, 2, "1F1B"), make_spec(2, 2, 2, "1F1B")),
        *runs(cases.hook_gradients, make_spec(1, 2, 2, "1F1B"), make_spec(2, 2, 2, "1F1B")),
        *runs(cases.load_tied_weights, make_spec(2, 1, 1)),
        *runs(cases.step_on_own_rows, make_spec(1, 2, 2), make_spec(2, 2, 2)),
        *runs(
            cases.train_bf16,
            make_spec(2, 1, 4, "1F1B", precision="bf16"),
            make_spec(2, 2, 2, "1F1B", precision="bf16"),
        ),
        *runs(cases.step_in_and_out_of_autocast, make_spec(2, 1, 2), make_spec(2, 2, 2, "1F1B")),
        *runs(cases.materialise_from_meta, make_spec(2, 1, 1), make_spec(1, 2, 1)),
        *runs(
            cases.use_other_modes_and_sizes,
            make_spec(2, 1, 2, "1F1B"),
            make_spec(2, 2, 2, "1F1B"),
        ),
        *runs(cases.make_other_calls, make_spec(2, 1, 2, "1F1B"), make_spec(2, 2, 2, "1F1B")),
        *runs(
            cases.train_with_synchronised_norms,
            (make_spec(1, 2, 1, **SYNC), True),
            make_spec(2, 2, 1, **SYNC, space=SOME_SHARDS),
            make_spec(2, 2, 1, **SYNC),
        ),
        *runs(
            norm_cases.train_with_deferred_statistics,
            *((name, 2, 2) for name in ("batch", "shared", "cumulative", "acting", "instance")),
            ("shared", 2, 2, {"space": 2}),
            ranks=4,
        ),
        # Gradients of split backwards
        *runs(pipeline_cases.share_buffers_of_all_kinds),
        *runs(pipeline_cases.step_where_outputs_depend_on_nothing_received, SPLIT, ranks=4),
        *runs(pipeline_cases.step_where_own_inputs_are_used_twice, SPLIT, ranks=4),
        *runs(pipeline_cases.step_with_hooks_on_results, SPLIT, "1F1B"),
        *runs(pipeline_cases.step_with_a_loss_of_one_result, SPLIT, "GPipe", "1F1B", ranks=3),
        *runs(
            pipeline_cases.take_gradients_of_inputs,
            make_spec(1, 2, 2),
            make_spec(2, 2, 2, "1F1B"),
            make_spec(4, 1, 2, SPLIT),
        ),
        *runs(pipeline_cases.sum_gradients_where_they_are, SPLIT, "GPipe", ranks=4),
        # Losses of the whole batch and of own rows
        *runs(
            loss_cases.step_with_losses,
            (make_spec(1, 2, 2, "1F1B"), 5),
            (make_spec(2, 2, 2, "1F1B"), 5),
            (make_spec(2, 1, 2, "1F1B"), 8),
        ),
        *runs(loss_cases.train_a_target, make_spec(1, 1, 2)),
        *runs(loss_cases.add_a_penalty, make_spec(1, 2, 2), make_spec(2, 1, 2)),
        *runs(loss_cases.clip_a_whole_model),
        *runs(loss_cases.step_over_whole_batches, (2, 2, 2), ranks=4),
        # Sharded optimizer state
        *runs(
            sharded_cases.step_with_hooks_and_a_closure,
            make_spec(1, 2, 2, **SHARDED),
            make_spec(1, 2, 2, **DIVIDED),
        ),
        *runs(
            sharded_cases.step_with_a_scaler,
            (make_spec(1, 2, 2, **DIVIDED), False),
            (make_spec(1, 2, 2, **DIVIDED), True),
        ),
        *runs(
            sharded_cases.train_odd_parameters,
            (make_spec(1, 2, 1, **SHARDED), "adam"),
            (make_spec(1, 2, 1, **SHARDED), "adagrad"),
            (make_spec(1, 2, 2, **DIVIDED), "adam"),
            (make_spec(1, 2, 2, **DIVIDED), "adagrad"),
        ),
    ],
)
def test_ranks_compute_what_the_plain_model_does(
    job_of: Callable[[int], Job], case: Callable[..., Any], ranks: int, args: tuple[Any, ...]
) -> None:
    job_of(ranks).run(case, *args)
