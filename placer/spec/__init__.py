"""The placement spec: reads a JSON file and checks it, without importing torch."""

from placer.spec.layers import layer_problems, match_paths, resolve_layers, resolve_patterns
from placer.spec.load import load_spec
from placer.spec.loss import LossSpec
from placer.spec.schema import schema_text, spec_schema
from placer.spec.types import DeviceSpec, OptimizerBytes, PlacementSpec

__all__ = [
    "DeviceSpec",
    "LossSpec",
    "OptimizerBytes",
    "PlacementSpec",
    "layer_problems",
    "load_spec",
    "match_paths",
    "resolve_layers",
    "resolve_patterns",
    "schema_text",
    "spec_schema",
]
