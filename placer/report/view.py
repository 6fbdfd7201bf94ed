"""What a report shows of a plan, as plain data: every form of the report is written from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from placer.errors import Tried
from placer.plan.step_spans import step_spans
from placer.plan.summary import describe_step, plan_facts
from placer.plan.types import DevicePeak, HostPeak, Plan, StageMemory, Transfer, everything_fits
from placer.quantities import format_seconds
from placer.report.layers import stage_layers
from placer.report.verdict import host_text, memory_rule, verdict
from placer.timeline import MEMORY_KINDS, Span, end_of, idle_share

if TYPE_CHECKING:
    from placer.simulation import SimulationReport
    from placer.simulation.over_time import MemoryPoint

_SIMULATED = ("peak", "workspaces", "reserved", "context", "starved")
_PASSES = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
# Of the dry run's moment of a peak, as `simulate --json` prints it.
_AT_PEAK = ("phase", "node", "layer", "largest")


class Lane(NamedTuple):
    """What a device does in a step, and the share of the step in which it computes."""

    spans: Sequence[Span]
    busy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """Devices that run the same stages, in other replicas or for other shards, and need the same bytes.

    ``needs`` are the bytes of one of them, by the simulation if there is one; ``predicted`` is the plan's
    peak. ``parts`` has bytes by kind, which add up to ``needs.needed``. The lane and the memory over time,
    which are empty if they are not known, are those of the first device. ``at_peak`` says what ran at the
    peak in the simulation, and which tensors were the largest.
    """

    devices: Sequence[str]
    stages: Sequence[int]
    needs: DevicePeak
    predicted: int
    parts: Mapping[str, int]
    lane: Lane
    memory: Sequence[MemoryPoint]
    at_peak: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the first device."""
        return self.devices[0]

    @property
    def peak(self) -> MemoryPoint | None:
        """The first of the points in time with the most bytes; None if they are not known."""
        return max(self.memory, key=lambda point: point.nbytes, default=None)


class Skip(NamedTuple):
    """What a stage sends past others, and the number of a lane in which it meets no other skip."""

    source: int
    target: int
    values: Sequence[str]
    nbytes: int
    lane: int


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a report shows of a plan, and of a simulation of it if there is one.

    ``plan`` has the needs that the simulation found. ``headline`` says in a few words each what holds for the
    whole plan, also the seconds of a ``step`` (as text) and the ``idle`` share of them, in which devices wait
    (None if times are not known). ``transfers`` are `Plan.sent`, the largest first. ``end`` is the end of the
    step in seconds, or of the simulation in tasks, 0 without both. ``remedies`` are changes that were tried
    because the plan does not fit.
    """

    plan: Plan
    verdict: Sequence[str]
    state: Literal["good", "slow", "bad"]
    headline: Sequence[str]
    step: str
    idle: float | None
    layers: Sequence[Sequence[str]]  # of each stage, the outermost ones that it has whole
    devices: Sequence[DeviceGroup]
    transfers: Sequence[Transfer]
    skips: Sequence[Skip]
    notes: Sequence[str]
    simulated: bool
    end: float
    remedies: Sequence[Tried] = ()


def view(
    plan: Plan,
    simulation: SimulationReport | Mapping[str, Any] | None = None,
    *,
    remedies: Sequence[Tried] = (),
) -> View:
    """What there is to show of ``plan``; ``simulation`` is a report, or what ``simulate --json`` prints.

    Raises ``KeyError``, ``TypeError`` or ``AttributeError`` if ``simulation`` is something else.
    """
    judged = with_simulation(plan, simulation)
    spans = shown_spans(plan)
    idle = idle_share(spans) if spans else None
    state: Literal["good", "slow", "bad"] = "slow" if judged.starved else "good"
    devices = _devices(plan, judged, simulation, spans)
    transfers = sorted(plan.sent, key=lambda t: (-t.nbytes, t.source, t.target, t.value))
    return View(
        plan=judged,
        verdict=verdict(judged),
        state=state if judged.fits else "bad",
        headline=[*plan_facts(plan), *([] if idle is None else [f"bubble {idle:.0%}"])],
        step=describe_step(judged),
        idle=idle,
        layers=stage_layers(plan),
        devices=devices,
        transfers=transfers,
        skips=_skips(transfers),
        notes=[
            *plan.notes,
            *filter(None, (_launching(plan), memory_rule(judged), host_text(judged.host))),
        ],
        simulated=simulation is not None,
        end=end_of(spans) or max((p.seconds for d in devices for p in d.memory[-1:]), default=0.0),
        remedies=remedies,
    )


def _launching(plan: Plan) -> str:
    """A note, if the host takes longer to launch the operations of a micro-batch than devices to run them."""
    running = sum((s.forward_seconds or 0) + (s.backward_seconds or 0) for s in plan.stages)
    launching = sum(
        (s.forward_launch_seconds or 0) + (s.backward_launch_seconds or 0) for s in plan.stages
    )
    if plan.step_seconds is None or launching <= running:
        return ""
    return (
        f"Devices run the operations of a micro-batch in {format_seconds(running)}, but launching them takes "
        f"{format_seconds(launching)}, which decides how long they take. Larger micro-batches cost no "
        "more to launch."
    )


def _as_json(simulation: SimulationReport | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The report as ``simulate --json`` prints it."""
    if simulation is None:
        return {"devices": {}}
    return simulation if isinstance(simulation, Mapping) else simulation.to_json()


def with_simulation(plan: Plan, simulation: SimulationReport | Mapping[str, Any] | None) -> Plan:
    """``plan`` with what devices and host need in the simulation, if there is one; see `view`."""
    data = _as_json(simulation)
    devices = []
    for number, device in enumerate(plan.devices):
        found = data["devices"].get(_runs_as(plan, number), {})
        devices.append(replace(device, **{k: found[k] for k in _SIMULATED if k in found}))
    host = HostPeak(**data["host"]) if "host" in data else plan.host
    fits = everything_fits(devices, host)
    return replace(plan, devices=tuple(devices), host=host, fits=fits)


def _runs_as(plan: Plan, number: int) -> str:
    """The device whose simulation and spans are those of the device with this number.

    With a process per device, all replicas do what the first one does.
    """
    return plan.devices[number % plan.num_devices if plan.processes else number].device


def shown_spans(plan: Plan) -> tuple[Span, ...]:
    """The spans of a step; with a process per device those of one replica, since all do the same."""
    return step_spans(_one_replica(plan) if plan.processes else plan)


def _one_replica(plan: Plan) -> Plan:
    stages = tuple(replace(stage, devices=plan.devices_of(stage, 0)) for stage in plan.stages)
    # State stays divided between as many ranks.
    over = plan.shard_over or plan.replicas
    return replace(plan, replicas=1, shard_over=over, stages=stages)


def _devices(
    plan: Plan,
    judged: Plan,
    simulation: SimulationReport | Mapping[str, Any] | None,
    spans: Sequence[Span],
) -> list[DeviceGroup]:
    """Groups of devices, in the order of their first ones."""
    data = _as_json(simulation)["devices"]
    reports = () if simulation is None or isinstance(simulation, Mapping) else simulation.devices
    curves = {device.device: device.memory_over_time for device in reports}
    stages_of: dict[str, tuple[int, ...]] = {}
    for stage in plan.stages:
        for name in stage.devices:
            stages_of[name] = (*stages_of.get(name, ()), stage.index)
    groups: dict[tuple[tuple[int, ...], DevicePeak, int], list[int]] = {}
    for number, (predicted, device) in enumerate(zip(plan.devices, judged.devices, strict=True)):
        key = stages_of.get(device.device, ()), replace(device, device=""), predicted.peak
        groups.setdefault(key, []).append(number)
    homes = {plan.devices_of(stage, 0)[0] for stage in plan.stages}
    found = []
    for (stages, _, predicted_peak), numbers in groups.items():
        name, needs = _runs_as(plan, numbers[0]), judged.devices[numbers[0]]
        memory = curves.get(name, ())
        memories = [plan.stages[stage].memory for stage in stages]
        kinds: Mapping[str, int] = _stage_kinds(memories, is_home=plan.processes or name in homes)
        if memory:
            kinds = max(memory, key=lambda point: point.nbytes).kinds
        found.append(
            DeviceGroup(
                devices=[plan.devices[number].device for number in numbers],
                stages=stages,
                needs=needs,
                predicted=predicted_peak,
                parts=_parts(kinds, needs),
                lane=_lane(name, spans),
                memory=memory,
                at_peak={k: data[name][k] for k in _AT_PEAK}
                if "largest" in data.get(name, {})
                else {},
            )
        )
    return found


def _stage_kinds(stages: Sequence[StageMemory], *, is_home: bool) -> dict[str, int]:
    """The bytes of stages by kind; they are not all alive at the peak.

    In one process, the first shard of the first replica is the home of weights and optimizer state; the
    others receive weights for a step.
    """
    total = {f.name: sum(getattr(each, f.name) for each in stages) for f in fields(StageMemory)}
    weights = total["parameters"] + total["buffers"]
    return {
        "weights": weights if is_home else 0,
        "optimizer": total["optimizer"] if is_home else 0,
        "activations": total["saved"],
        "gradients": total["gradients"],
        "received": total["boundary"] + (0 if is_home else weights),
        "temporary": total["transient"],
    }


def _parts(kinds: Mapping[str, int], needs: DevicePeak) -> dict[str, int]:
    """What the device needs, by kind: ``kinds`` of tensors up to the peak, and what comes on top of that."""
    rest = 0 if needs.reserved is None else max(0, needs.reserved - needs.peak)
    workspaces = min(needs.workspaces, rest)
    return {
        **memory_parts(kinds, needs.peak),
        "workspaces": workspaces,
        "rounding": rest - workspaces,
        "context": needs.context,
    }


def memory_parts(kinds: Mapping[str, int], peak: int) -> dict[str, int]:
    """Bytes by kind that add up to the peak, in the order of `MEMORY_KINDS`.

    If the kinds add up to more than the peak, because not all of them are alive at that moment, the
    last ones are reduced.

    >>> memory_parts({"weights": 4, "activations": 5, "temporary": 3}, 10)["temporary"]
    1
    """
    left, parts = peak, {}
    for kind in MEMORY_KINDS:
        parts[kind] = min(kinds.get(kind, 0), left)
        left -= parts[kind]
    parts["temporary"] += left
    return parts


def _lane(device: str, spans: Sequence[Span]) -> Lane:
    """What the device computes, and the transfers to and from it."""
    mine = [s for s in spans if s.end > s.start and any(device in on.split(" to ") for on in s.on)]
    busy = sum(span.end - span.start for span in mine if span.kind not in ("transfer", "sum"))
    return Lane(mine, busy / end_of(spans) if mine else 0.0)


def _skips(transfers: Sequence[Transfer]) -> list[Skip]:
    """The transfers past other stages, one for each pair of stages, the largest first."""
    between: dict[tuple[int, int], list[Transfer]] = {}
    for transfer in transfers:
        if transfer.target - transfer.source > 1:
            between.setdefault((transfer.source, transfer.target), []).append(transfer)
    found: list[Skip] = []
    totals = {pair: sum(t.nbytes for t in each) for pair, each in between.items()}
    for source, target in sorted(between, key=lambda pair: (-totals[pair], pair)):
        taken = {s.lane for s in found if s.source < target and source < s.target}
        lane = next(lane for lane in range(len(found) + 1) if lane not in taken)
        values = [transfer.value for transfer in between[source, target]]
        found.append(Skip(source, target, values, totals[source, target], lane))
    return found


def relative_difference(predicted: int, simulated: int) -> str:
    """The error of the prediction relative to the simulated bytes, as a percentage.

    >>> relative_difference(99, 100), relative_difference(99999, 100000)
    ('-1.0%', '0.0%')
    """
    if not simulated:
        return ""
    tenths = round(1000 * (predicted - simulated) / simulated)
    return f"{tenths / 10:+.1f}%" if tenths else "0.0%"


def span_style(span: Span) -> str:
    """What the span is to a reader: forward, backward, transfer or optimizer."""
    if span.kind != "compute":
        return span.kind
    return _PASSES[span.name.lstrip("0123456789")[0]]
