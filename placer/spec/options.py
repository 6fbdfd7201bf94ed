"""The fields of a spec as keyword arguments of Python functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

Auto = Literal["auto"]


class SpecFields(TypedDict, total=False):
    """The fields of a `PlacementSpec` other than its devices and loss, as `auto_plan` takes them."""

    version: Literal[1]
    machine: str
    stages: int | Auto
    layers: Mapping[str, str]
    inputs: Mapping[str, Any]
    stored: Mapping[str, Any]
    batch: int | Auto
    replicas: int | Auto
    replica_devices: Sequence[Sequence[str]]
    microbatches: int | Auto
    schedule: str
    precision: Literal["fp32", "bf16", "fp16"]
    checkpoint: Sequence[str] | Auto
    offload: Sequence[str] | Auto
    chunks: int | Auto
    space: int | Auto | Mapping[str, Any]
    offload_overlap: bool
    batch_norm: Literal["per_microbatch", "deferred", "sync"]
    optimizer: str | Mapping[str, int]
    shard_state: Literal["none", "optimizer", "gradients"] | Auto
    shard_over: int | Auto
    node_layout: Literal["stages", "replicas"] | Auto
    compile: bool
    training: bool
    reserve: int | str
    context: int | str
    host_memory: int | str
    objective: Literal["throughput", "memory", "latency", "bottleneck", "devices"]
