"""Makes a dry run of a plan's emitted module: a few training steps on fake tensors, with a `Ledger`."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from placer.cost import Loss
from placer.executor.places.place import HOST
from placer.plan.types import DevicePeak, Plan
from placer.program import Program
from placer.simulation.one_process import run_process
from placer.simulation.over_time import Curve, memory_over_time
from placer.simulation.ranks import run_ranks
from placer.simulation.steps import FakeCall
from placer.simulation.types import DeviceSimulation, SimulationReport
from placer.simulation.usage import DeviceTimeline, measure, measure_host, with_shared_usages
from placer.timeline import HostUsage, Moment, Timeline, host_usage

_LARGEST_SHOWN = 10


@dataclass(frozen=True, slots=True)
class DryRun:
    """The timeline of each of a plan's devices, None for one that did not run; and the host memory used."""

    found: Sequence[DeviceTimeline | None]
    host: HostUsage

    def __call__(self, devices: Sequence[DevicePeak]) -> tuple[DevicePeak, ...]:
        """``devices`` with the memory that they need in this dry run.

        Devices that did not run are taken to exceed their estimates by as many bytes of tensors as those that
        did, but not by what an allocator has cached.
        """
        known: dict[Hashable, DevicePeak] = {}
        measured: list[DevicePeak | None] = []
        for device, run in zip(devices, self.found, strict=True):
            if run is None:
                measured.append(None)
                continue
            key = id(run.timeline), replace(device, device=run.place)
            if key not in known:
                known[key] = measure(device, run)
            measured.append(replace(known[key], device=device.device))
        pairs = list(zip(devices, measured, strict=True))
        excess = max((found.peak - given.peak for given, found in pairs if found), default=0)
        return tuple(
            replace(given, peak=given.peak + max(0, excess)) if found is None else found
            for given, found in pairs
        )


def dry_run(
    program: Program,
    plan: Plan,
    inputs: Sequence[Tensor],
    loss: Loss | None = None,
    *,
    processes: bool = False,
    run_on: str | None = None,
    once: bool = True,
    only_fullest: bool = False,
) -> DryRun:
    """Run the plan's training step a few times on simulated devices.

    With ``processes`` each device has a process of its own, whose messages are not sent, and all replicas
    need what the first one needs. So that includes memory that estimates leave out: received values and
    their gradients, both halves of a split backward, and buckets in which replicas sum their gradients.

    Several steps are needed because the optimizer's state exists from the second step on, and torch's
    allocator then has a cache. Unless ``once`` is false, forward and backward are run only once, if
    possible, because later steps differ from the first only by the optimizer.

    With ``only_fullest``, only the process of the fullest device by the plan's estimates runs.

    ``inputs`` are the flattened tensors of the whole batch, on any device. ``loss`` (by default the one
    that the plan counts) runs for each micro-batch, with its slice of the target. Every stage runs the
    kernels of its device, or with ``run_on`` those of that device, as after
    ``placer.compile(…, run_on="cpu")``. Raises ``DeviceError`` if an operation would mix devices.
    """
    call = FakeCall(program, plan, inputs, loss, run_on=run_on, once=once)
    if processes:
        devices = plan.devices[: plan.num_devices]
        chosen = list(range(len(devices)))
        if only_fullest:
            chosen = [max(chosen, key=lambda at: devices[at].needed)]
        ranks = run_ranks(call, chosen)
        used = sum((host_usage(rank.timeline, HOST.name) for rank in ranks), HostUsage())
        host = HostUsage(plan.replicas * used.peak, plan.replicas * used.reserved)
        ran = dict(zip(chosen, with_shared_usages(ranks), strict=True))
        row = [ran.get(at) for at in range(len(devices))]
        return DryRun(list(itertools.islice(itertools.cycle(row), len(plan.devices))), host)
    timeline = run_process(call)
    of, none = timeline.by_device(), Timeline(blocks=(), events=())
    names = [device.device for device in plan.devices]
    found = [DeviceTimeline(of.get(name, none), name) for name in names]
    return DryRun(with_shared_usages(found), host_usage(timeline, HOST.name))


def simulate_plan(
    program: Program,
    plan: Plan,
    inputs: Sequence[Tensor],
    loss: Loss | None = None,
    *,
    processes: bool = False,
    run_on: str | None = None,
) -> SimulationReport:
    """The peak of every device in a `dry_run`; with ``processes``, of those of the first replica."""
    run = dry_run(program, plan, inputs, loss, processes=processes, run_on=run_on)
    return describe_run(plan, run, processes=processes, run_on=run_on)


def describe_run(
    plan: Plan, run: DryRun, *, processes: bool = False, run_on: str | None = None
) -> SimulationReport:
    """The report of a `dry_run` of ``plan``."""
    count = plan.num_devices if processes else len(plan.devices)
    ran = zip(plan.devices[:count], run.found[:count], strict=True)
    pairs = [(device, timeline) for device, timeline in ran if timeline is not None]
    found = [timeline for _, timeline in pairs]
    curves = memory_over_time(replace(plan, processes=processes), found)
    return SimulationReport(
        devices=tuple(
            _describe(*pair, curve, run_on=run_on)
            for pair, curve in zip(pairs, curves, strict=True)
        ),
        host=measure_host(plan.host, run.host),
        step_ok=True,
    )


def _describe(
    device: DevicePeak, run: DeviceTimeline, curve: Curve, *, run_on: str | None
) -> DeviceSimulation:
    """The result of the dry run ``run`` for ``device``, next to the plan's prediction.

    With ``run_on`` the kernels were those of another device, so this device's allocator does not count.
    """
    if run_on is not None:
        device = replace(device, allocator=None, context=0)
    moment = run.timeline.peaks().get(run.place, Moment())
    found = measure(device, run)
    return DeviceSimulation(
        device=device.device,
        peak=moment.nbytes,
        workspaces=found.workspaces,
        reserved=found.reserved,
        context=found.context,
        starved=found.starved,
        predicted=device.peak,
        phase=moment.where.phase,
        node=moment.where.node,
        layer=moment.where.layer,
        operation=moment.operation,
        largest=tuple(run.timeline.live(run.place, moment)[:_LARGEST_SHOWN]),
        memory_over_time=curve,
    )
