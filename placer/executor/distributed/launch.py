"""Builds this rank's `DistributedModule` from a plan, after all ranks have joined and compared plans."""

from __future__ import annotations

import hashlib
import itertools
import uuid
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from placer._torch import default_timeout
from placer.emit import emit_stages
from placer.errors import PlacerError, PlanError
from placer.executor.calls.state import refuse_kept_on_some_ranks
from placer.executor.distributed.failures.broadcast import FailureBroadcast
from placer.executor.distributed.job.assignment import Job, assign_rank, choose_device
from placer.executor.distributed.job.join import join_job, name_ranks
from placer.executor.distributed.job.ownership import broadcast_weights, build_part, find_ownership
from placer.executor.distributed.module import DistributedModule, make_distributed
from placer.executor.distributed.runtime import DistributedRuntime
from placer.executor.module import check_names
from placer.executor.places.cuda_allocator import prepare_allocator
from placer.executor.places.place import Place
from placer.plan.store import plan_text
from placer.plan.types import Plan
from placer.program import Program, named_state
from placer.versions import require_torch

_compiled = itertools.count()  # numbers the calls of ``compile``, the same on every rank


def launch(
    model: nn.Module,
    make: Callable[[], tuple[Program, Plan]],
    job: Job,
    *,
    weights: Path | None = None,
    initialize: Callable[[nn.Module], None] | None = None,
    run_on: str | None = None,
) -> DistributedModule:
    """This rank's part of ``model`` under the plan that ``make`` makes; all ranks call it together.

    Weights that are not read from a file are those of rank 0's model.

    The ranks join first, so that each learns of one that fails or is killed. Raises ``VersionError`` if
    torch is too old. Before anything is built, raises ``PlacerError`` if the job does not have one process
    per device of the plan, ``PlanError`` if ranks have different models or plans, and ``PeerError`` if
    another rank has failed.
    """
    require_torch()
    join_job(job)
    failures = FailureBroadcast(job.rank, job.world_size, f"compile {next(_compiled)}")
    with failures.told_to_all():
        program, plan = make()
        check_names(model, DistributedModule)
        _check_norms(model, plan)
        assignment = assign_rank(plan, job)
        device = choose_device(plan, job, run_on)
        # Before ranks talk to each other: a process group with only NCCL does that in the GPU's memory.
        row = plan.devices_of(plan.stages[assignment.stage_indices[0]], assignment.replica_index)
        own = row[assignment.shard_index]
        prepare_allocator(plan, [Place(own, device)])
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index)
        failures.limit = default_timeout(device)
        name = compare_plans(plan, model, failures)
        staged = emit_stages(program, plan, together=False)
        if plan.num_devices > 1 or plan.replicas > 1:
            refuse_kept_on_some_ranks(staged)
        ownership = find_ownership(model, staged, assignment.device_of)
        part = build_part(
            model,
            staged,
            ownership,
            assignment.device_index,
            device,
            weights=weights,
            initialize=initialize,
        )
        failures.gather("built")  # or why not, on a rank
    with failures.lost_peers():
        if weights is None:
            broadcast_weights(model, part, ownership, device)
        runtime = DistributedRuntime(
            part,
            program=program,
            plan=plan,
            staged=staged,
            ownership=ownership,
            assignment=assignment,
            device=device,
            name=name,
        )
        return make_distributed(runtime)


def _check_norms(model: nn.Module, plan: Plan) -> None:
    """Raise ``PlacerError`` for a SyncBatchNorm layer in a plan with deferred statistics."""
    if plan.batch_norm != "deferred":
        return
    for path, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise PlacerError(
                path,
                "is a SyncBatchNorm, which updates its statistics from all processes at every "
                "micro-batch, but 'deferred' updates them once per step",
                "use BatchNorm layers, or \"batch_norm\": 'sync'",
            )


def compare_plans(plan: Plan, model: nn.Module, failures: FailureBroadcast) -> str:
    """Check that all ranks have the same plan and model; returns a unique name, the same on all ranks.

    Raises ``PlanError`` on every rank otherwise, which names the ranks that differ from rank 0.
    """
    without_data = sorted(name for name, tensor in named_state(model) if tensor.is_meta)
    mine = _digest(plan.fingerprint, *without_data), _digest(plan_text(plan)), uuid.uuid4().hex
    first, *_ = everyone = [each.split() for each in failures.gather("plan", " ".join(mine))]
    models = [r for r, found in enumerate(everyone) if found[0] != first[0]]
    plans = [r for r, found in enumerate(everyone) if found[1] != first[1]]
    if models:
        raise PlanError(
            f"rank {dist.get_rank()}",
            f"the model (or its inputs) of {name_ranks(models)} differs from that of rank 0",
            "give every rank the same model (on meta on all of them, or on none), arguments and code",
        )
    if plans:
        raise PlanError(
            f"rank {dist.get_rank()}",
            f"the plan of {name_ranks(plans)} differs from that of rank 0",
            "give every rank the same spec and example inputs of the same shapes, or load one plan on "
            "all of them (placer plan -o plan.json, placer.load_plan)",
        )
    return first[2]


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
