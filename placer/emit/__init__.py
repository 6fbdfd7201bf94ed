"""Emit: a capture and the plan's stages in, one function per stage and placed weights out."""

from placer.emit.lines import node_lines
from placer.emit.materialize import materialize
from placer.emit.stages import emit_stages
from placer.emit.types import SegmentCode, StageCode, StagedModel

__all__ = ["SegmentCode", "StageCode", "StagedModel", "emit_stages", "materialize", "node_lines"]
