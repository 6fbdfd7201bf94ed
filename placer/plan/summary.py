"""Describe a plan, a stage or the use of host memory in a line or two."""

from __future__ import annotations

from placer.plan.types import HostPeak, Plan, PlannedLoss, StagePlan
from placer.quantities import format_bytes, format_count, format_seconds

_STAGES_SHOWN = 8


def summarize_plan(plan: Plan) -> str:
    """A line about the plan, and a line per stage, up to a limit."""
    fits = "fits" if plan.fits else f"does not fit by {format_bytes(plan.overflow_bytes)}"
    if plan.fits and all(device.budget is None for device in plan.devices):
        fits = "unknown whether it fits"
    lines = [f"Plan({', '.join([fits, *plan_facts(plan)])})"]
    lines += [f"  {summarize_stage(stage)}" for stage in plan.stages[:_STAGES_SHOWN]]
    if (more := len(plan.stages) - _STAGES_SHOWN) > 0:
        lines.append(f"  … and {format_count(more, 'more stage')}")
    return "\n".join(lines)


def plan_facts(plan: Plan) -> list[str]:
    """What holds for the whole plan, in a few words each."""
    optimizer = plan.optimizer if isinstance(plan.optimizer, str) else "an optimizer of its own"
    if (ranks := plan.state_layout.optimizer) > 1:
        what = "its state and gradients" if plan.state_layout.gradients > 1 else "its state"
        optimizer += f", {what} over {ranks} ranks"
    shards = f" of {format_count(plan.shards, 'shard')}" if plan.shards > 1 else ""
    return [
        format_count(len(plan.stages), "stage") + shards,
        format_count(plan.replicas, "replica"),
        f"{format_count(plan.microbatches, 'micro-batch', 'micro-batches')} ({plan.schedule})",
        plan.precision,
        *(["compiled"] if plan.compile else []),
        f"training with {optimizer}" if plan.training else "inference",
        f"estimated step {describe_step(plan)}",
        *([runtime] if (runtime := describe_runtime(plan)) else []),
        *(
            ["replicas of a stage next to each other"]
            if plan.processes and plan.replicas > 1 and plan.grid.stride < plan.grid.devices
            else []
        ),
    ]


def describe_runtime(plan: Plan) -> str:
    """For which runtime ``plan`` was judged; "" if it has one device, where both are one process."""
    if len(plan.devices) == 1:
        return ""
    return "with a process per device (torchrun)" if plan.processes else "in one process"


def summarize_stage(stage: StagePlan) -> str:
    """A line about the stage: its device, its layers, its peak."""
    first, *others = stage.layers or ("the model's own code",)
    layers = f"{first} … {others[-1]}" if others else first
    device, *replicas = stage.devices
    also = f" (and {', '.join(replicas[:3])}{' …' * (len(replicas) > 3)})" if replicas else ""
    budget = "" if stage.budget is None else f" of {format_bytes(stage.budget)}"
    return (
        f"stage {stage.index} on {device}{also}: {layers} "
        f"({format_count(len(stage.layers), 'layer')}, {format_count(len(stage.nodes), 'node')}), "
        f"peak {format_bytes(stage.memory.peak)}{budget}"
    )


def describe_step(plan: Plan) -> str:
    """The estimated seconds of a step, and the samples per second; it takes longer if kernels are starved."""
    if plan.step_seconds is None:
        return "not known"
    if plan.starved or plan.rows is None:
        return f"{'at least' if plan.starved else '~'} {format_seconds(plan.step_seconds)}"
    speed = plan.rows / plan.step_seconds
    rate = f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"
    return f"~ {format_seconds(plan.step_seconds)} ({rate} samples/s)"


def describe_host(host: HostPeak) -> str:
    """The host memory that is taken, and from how many bytes that was rounded up."""
    text = f"{format_bytes(host.needed)} of the host"
    if host.needed == host.peak:
        return text
    return f"{text} in pinned memory (torch rounds each of {format_bytes(host.peak)} up to a power of two)"


def describe_loss(loss: PlannedLoss, device: str) -> str:
    """A sentence on the loss that a plan counts, whose last stage is on ``device``."""
    if loss.whole_batch:
        return f"The loss {loss.function} is computed once, over the whole batch, on {device}."
    takes = f"takes {format_bytes(loss.nbytes)} on {device} per micro-batch"
    if loss.assumed:
        return (
            f"The loss is assumed to be {loss.function}, which {takes}. Name yours: --loss, "
            '"loss" in the spec, or loss_fn=.'
        )
    return f"The loss {loss.function} {takes}." if loss.nbytes else f"The loss is {loss.function}."
