"""Dry-run the emitted module on fake tensors: two training steps, watched by the ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from placer.capture import Capture, FakeWorld
from placer.cost import stand_in_loss
from placer.emit import emit_stages, materialize
from placer.plan.types import Plan
from placer.runtime.module import PlacedModule
from placer.runtime.place import Place
from placer.simulation.ledger import HOST, Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSimulation:
    """One device's simulated peak beside the plan's prediction, in bytes, and when it is reached."""

    device: str
    peak: int
    predicted: int
    phase: str
    operation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """Per device the peak of a step; ``step_ok`` says that the step ran to its end."""

    devices: tuple[DeviceSimulation, ...]
    step_ok: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "devices": {
                d.device: {
                    "peak": d.peak,
                    "predicted": d.predicted,
                    "phase": d.phase,
                    "operation": d.operation,
                }
                for d in self.devices
            },
            "step_ok": self.step_ok,
        }


def simulate_plan(
    capture: Capture,
    plan: Plan,
    inputs: Sequence[Tensor],
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
) -> SimulationReport:
    """Run the plan's training step twice on simulated devices and report every device's peak.

    ``inputs`` are the tensors of the whole batch, flattened as the capture has them, on any device.
    The second step is the steady state: the optimizer's state exists. ``loss_fn(output)`` gives the
    loss of one micro-batch; by default a stand-in that needs gradients of the size of the outputs.
    Raises ``DeviceError`` when an operation would mix devices.
    """
    world = FakeWorld()
    fake_model = world.module(capture.model)
    leaves = [world.tensor(t) for t in inputs]
    cpu = torch.device("cpu")
    rows = [
        [Place(stage.devices[r], cpu) for stage in plan.stages] for r in range(plan.replicas)
    ]
    staged = emit_stages(capture, [stage.nodes for stage in plan.stages])
    ledger = Ledger()
    with world.mode:
        names = {name: cpu for name in staged.state_stage}
        model = materialize(fake_model, names)
        placed = PlacedModule(model, plan=plan, staged=staged, places=rows)
        for name, tensor in (
            *placed.named_parameters(remove_duplicate=False),
            *placed.named_buffers(remove_duplicate=False),
        ):
            ledger.add(tensor, rows[0][staged.state_stage[name]])
        for leaf in leaves:
            ledger.add(leaf, HOST)
        with ledger:
            if plan.training:
                _train(placed, leaves, ledger, plan, loss_fn)
            else:
                ledger.phase = "forward"
                with torch.no_grad():
                    placed.run_leaves(leaves)
    predicted = {device.device: device.peak for device in plan.devices}
    return SimulationReport(
        devices=tuple(
            DeviceSimulation(
                device=name,
                peak=ledger.peaks[name].nbytes if name in ledger.peaks else 0,
                predicted=predicted[name],
                phase=ledger.peaks[name].phase if name in ledger.peaks else "",
                operation=ledger.peaks[name].operation if name in ledger.peaks else "",
            )
            for name in predicted
        ),
        step_ok=True,
    )


def _train(
    placed: PlacedModule,
    leaves: list[Tensor],
    ledger: Ledger,
    plan: Plan,
    loss_fn: Callable[[Any], Tensor] | None,
) -> None:
    trained = [p for p in placed.parameters() if p.requires_grad]
    optimizer = _optimizer(plan.optimizer, trained)
    loss_of = loss_fn or (lambda output: stand_in_loss(tree_leaves(output)))
    for _ in range(2):
        ledger.phase = "forward and backward"
        placed.step_leaves(leaves, loss_fn=loss_of)
        ledger.phase = "optimizer"
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


class _SizedState(torch.optim.Optimizer):
    """An optimizer that only holds state: so many bytes for every parameter."""

    def __init__(self, parameters: list[nn.Parameter], bytes_per_parameter: int) -> None:
        super().__init__(parameters, {"bytes_per_parameter": bytes_per_parameter})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and not self.state[p]:
                    size = p.numel() * group["bytes_per_parameter"]
                    self.state[p]["held"] = p.new_empty(size, dtype=torch.uint8)


def _optimizer(
    wanted: str | Mapping[str, int], parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    if not parameters:
        return torch.optim.SGD([torch.zeros(0, requires_grad=True)])
    if not isinstance(wanted, str):
        return _SizedState(parameters, wanted["bytes_per_parameter"])
    if wanted == "adam":
        return torch.optim.Adam(parameters, foreach=False)
    if wanted == "adamw":
        return torch.optim.AdamW(parameters, foreach=False)
    momentum = 0.9 if wanted == "sgd_momentum" else 0.0
    return torch.optim.SGD(parameters, lr=1e-3, momentum=momentum, foreach=False)
