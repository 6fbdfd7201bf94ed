"""Check that a plan belongs to a model, and that it fits on its devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from placer.errors import BudgetError, PlacerError, PlanError
from placer.plan.summary import describe_host
from placer.plan.types import DevicePeak, Plan
from placer.program import Program
from placer.quantities import format_bytes

_SHOWN = 5


def check_plan(plan: Plan, program: Program) -> None:
    """Raise ``PlanError`` with a diff of the nodes if ``plan`` was made for another model.

    Also raises it if the stages are not valid for this model: with nodes missing or in another order,
    the placed model would compute something else.
    """
    # A pass may look at the model's modules, of which the fingerprint has only the paths.
    rewritten_alike = not plan.rewrites or plan.node_layers.keys() == program.nodes.keys()
    if plan.fingerprint != program.fingerprint or not rewritten_alike:
        raise _another_model(plan, program)
    problem = next(_wrong_stages(plan, program), None)
    if problem is not None:
        raise PlanError(
            "plan /stages", problem, "plan again: plans are made by placer, not by hand"
        )


def _wrong_stages(plan: Plan, program: Program) -> Iterator[str]:
    """Sentences on what is wrong with the nodes of the stages."""
    place = {name: (stage.index, i) for stage in plan.stages for i, name in enumerate(stage.nodes)}
    if place.keys() != set(program.order):
        odd = sorted(place.keys() ^ set(program.order))
        yield f"{odd[0]!r} is " + ("no node of the model" if odd[0] in place else "on no stage")
        return
    if sum(len(stage.nodes) for stage in plan.stages) > len(place):
        yield "a node is on more than one stage"
    for node in program.graph.nodes:
        for source in node.all_input_nodes:
            if node.name in place and place.get(source.name, (-1, 0)) > place[node.name]:
                yield f"{node.name!r} comes before {source.name!r}, which it reads"
    for group in program.colocated:
        if len({place[name][0] for name in group}) > 1:
            yield f"{', '.join(map(repr, sorted(group)))} must be on one stage: they share memory"
    for names, why in _in_order(program):
        for before, after in itertools.pairwise(names):
            if place[before] > place[after]:
                yield f"{after!r} comes before {before!r}: {why}"


def _in_order(program: Program) -> Iterator[tuple[list[str], str]]:
    """Lists of nodes that must run in the program's order, each with the reason."""
    position = {name: i for i, name in enumerate(program.order)}
    yield [n for n, each in program.nodes.items() if each.draws], "both draw random numbers"
    for group in program.colocated:
        yield sorted(group, key=position.__getitem__), "they share memory"


def _another_model(plan: Plan, program: Program) -> PlanError:
    gone = [name for name in plan.node_layers if name not in program.nodes]
    new = [name for name in program.order if name not in plan.node_layers]
    lines = [
        *(f"- {name} ({plan.node_layers[name] or 'the model'})" for name in gone[:_SHOWN]),
        *(f"+ {name} ({program.nodes[name].layer or 'the model'})" for name in new[:_SHOWN]),
    ]
    hidden = max(0, len(gone) - _SHOWN) + max(0, len(new) - _SHOWN)
    lines += [f"… and {hidden} more"] if hidden else []
    diff = "\n    ".join(lines)
    return PlanError(
        PlanError.UNNAMED,
        f"was made for another model (or other inputs):\n    {diff}"
        if diff
        else "was made for another model or other inputs: shapes, dtypes or arguments differ",
        "plan again with this model: placer.make_plan(model, spec, args). If it is the same, and was called "
        "in between, it keeps something of its first call: plan after that",
    )


def one_copy() -> PlacerError:
    """The error for sharded state where one process runs all devices."""
    return PlacerError(
        "/shard_state",
        "is for a process per device: one process has one copy of the optimizer's state anyway, and sums the "
        "gradients of all replicas into one",
        'start one process per device (torchrun; --processes for plans), or use "none"',
    )


def require_fit(plan: Plan, *, among_ranks: bool = False) -> None:
    """Raise ``BudgetError`` naming the device that overflows the most, if any does.

    ``among_ranks``: the plan was made for one process, but its peaks are those of a process per device.
    """
    if plan.overflow_bytes == 0:
        return
    if plan.fits_devices:
        raise host_error(plan)
    needs, remedy = "the plan needs", "plan again with its spec: what would fit is tried then"
    if among_ranks:
        needs = "the plan was made for one process; with a process per device it needs"
        remedy = "plan again for a process per device (placer plan --processes), or give the spec"
    raise BudgetError(
        f"device {plan.tightest.device}",
        f"{needs} {describe_overflow(plan.tightest)}",
        remedy,
        device=plan.tightest.device,
        missing_bytes=plan.overflow_bytes,
    )


def host_error(plan: Plan) -> BudgetError:
    """The error for offloaded activations that need more host memory than they may take."""
    assert plan.host is not None, "something is offloaded"
    return BudgetError(
        "/host_memory",
        f"offloaded activations take {describe_host(plan.host)}: "
        f"{format_bytes(plan.overflow_bytes)} more than its {format_bytes(plan.host.budget or 0)}",
        'give more "host_memory", or offload fewer layers: recompute others ("checkpoint")',
        device="host",
        missing_bytes=plan.overflow_bytes,
    )


def check_pinned(plan: Plan, memory: int) -> None:
    """Raise ``BudgetError`` if offloaded activations need more than the ``memory`` of this host, in bytes.

    The operating system cannot move pinned memory to a disk, so the step would fail.
    """
    if plan.host is not None and plan.host.needed > memory:
        raise BudgetError(
            "the host",
            f"offloaded activations take {describe_host(plan.host)}, and this machine has "
            f"{format_bytes(memory)}",
            'offload fewer layers: recompute others ("checkpoint"), or limit them with "host_memory"',
            device="host",
            missing_bytes=plan.host.needed - memory,
        )


def describe_overflow(device: DevicePeak) -> str:
    """The bytes that ``device`` needs, and how much more than its budget that is."""
    missing = -(device.headroom or 0)
    reserve = f" and {format_bytes(device.reserve)} kept free" if device.reserve else ""
    if (device.room or 0) <= 0:
        return f"{format_bytes(device.peak)}, and the context and the reserve leave no room for it"
    return (
        f"{format_bytes(device.needed)}{reserve}: "
        f"{format_bytes(missing)} more than its {format_bytes(device.budget or 0)}"
    )
