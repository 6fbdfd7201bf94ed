"""Makes a dry run of all devices of a plan in one process, on fake tensors."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from placer.executor.module import runtime_of
from placer.executor.place_model import place_model
from placer.executor.places.place import CALLER, HOST, Place, on, recording
from placer.executor.stages.attribution import Attribution
from placer.machine.devices import device_type
from placer.operands import tensors_of_tree
from placer.program.call import placeholder_names
from placer.simulation.ledger import Ledger
from placer.simulation.steps import FakeCall, Process
from placer.timeline import Timeline


def run_process(call: FakeCall) -> Timeline:
    """The timeline of the plan's steps on all its devices."""
    plan, program, cpu = call.plan, call.program, torch.device("cpu")
    rows = [
        [[Place(name, cpu) for name in plan.devices_of(stage, r)] for stage in plan.stages]
        for r in range(plan.replicas)
    ]
    with call.running():
        placed = place_model(call.model, program, replace(plan, compile=False), rows)
        runtime = runtime_of(placed)
        home = {name: rows[0][stage][0] for name, stage in runtime.staged.state_stage.items()}
        attribution = Attribution(runtime.staged.layers)
        ledger = Ledger(attribution.where, kernels=lambda place: device_type(call.run_on or place))
        for kind, named in (
            ("parameter", placed.named_parameters(remove_duplicate=False)),
            ("buffer", placed.named_buffers(remove_duplicate=False)),
        ):
            for name, tensor in named:
                ledger.add(tensor, home[name], kind=kind, name=name)
        for leaf, name in zip(call.leaves, placeholder_names(program.call), strict=True):
            ledger.add(leaf, CALLER, kind="input", name=name, layer="")
        for leaf in tensors_of_tree(call.target):
            ledger.add(leaf, CALLER, kind="input", name="target", layer="")
        trained: dict[str, list[nn.Parameter]] = {}
        for name, parameter in placed.named_parameters():
            if parameter.requires_grad:
                trained.setdefault(call.run_on or home[name].name, []).append(parameter)
        process = Process(
            ledger=ledger,
            infer=partial(runtime.call_leaves, call.leaves),
            train=partial(
                runtime.step_leaves,
                call.leaves,
                loss_fn=call.loss_fn,
                target=call.target,
                whole_batch=call.whole_batch,
            ),
            trained=trained,
            # Adam's step counts are there; other state is made from tensors on a device.
            updating=partial(on, HOST),
        )
        with recording(ledger.place_of):
            return call.record(process, call.run_on)
