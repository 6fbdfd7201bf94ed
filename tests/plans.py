"""Plans written by hand, for tests that need no model."""

from __future__ import annotations

import dataclasses

from placer.plan.types import DevicePeak, Optimality, Plan, StageMemory, StagePlan, Transfer

GIB = 2**30


def stage_memory(**known: int) -> StageMemory:
    """The bytes of a stage; 0 for everything that is not ``known``."""
    kinds = dict.fromkeys((field.name for field in dataclasses.fields(StageMemory)), 0)
    return StageMemory(**{**kinds, **known})


def make_plan(*, budget: int | None = 16 * GIB) -> Plan:
    """Two stages whose boundary goes through ``dec``."""
    nodes = {
        "enc_0": "enc.0", "enc_1": "enc.1", "enc_2": "enc.2", "up": "dec.up",
        "cat": "dec", "conv": "dec.conv", "head": "head",
    }  # fmt: skip
    peaks = (13 * GIB, 5 * GIB)
    parts = (("enc_0", "enc_1", "enc_2", "up"), ("cat", "conv", "head"))
    stages = tuple(
        StagePlan(
            index=i,
            devices=(f"cuda:{i}",),
            layers=tuple(dict.fromkeys(nodes[n] for n in parts[i])),
            nodes=parts[i],
            memory=stage_memory(
                parameters=GIB, gradients=GIB, saved=peaks[i] - 2 * GIB, peak=peaks[i]
            ),
            budget=budget,
            reserve=GIB if budget else 0,
            forward_seconds=1.0,
            backward_seconds=2.0,
        )
        for i in range(2)
    )
    devices = tuple(
        DevicePeak(device=s.devices[0], peak=s.memory.peak, budget=s.budget, reserve=s.reserve)
        for s in stages
    )
    return Plan(
        fits=all(d.fits for d in devices),
        objective="memory",
        replicas=1,
        microbatches=1,
        shards=1,
        schedule="GPipe",
        precision="fp32",
        batch_norm="per_microbatch",
        optimizer="adam",
        training=True,
        step_seconds=6.0,
        fingerprint="abc",
        stages=stages,
        devices=devices,
        transfers=(
            Transfer(value="up", source=0, target=1, nbytes=2**20),
            Transfer(value="enc_0", source=0, target=1, nbytes=3 * 2**20),
        ),
        notes=("BatchNorm <takes> its statistics per micro-batch",),
        node_layers=nodes,
        processes=False,
        checkpoint=(),
        offload=(),
        optimality=Optimality(criterion="bytes", value=max(peaks), lower_bound=0.0),
        extra_seconds=0.0,
        boundaries=(),
    )
