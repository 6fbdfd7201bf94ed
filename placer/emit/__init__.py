"""Generate a Python function for each stage of a plan, and copy the weights to the stage's devices."""

from placer.emit.boxed import node_lines
from placer.emit.materialize import materialize
from placer.emit.stages import emit_stages
from placer.emit.types import SegmentCode, StageCode, StagedModel
