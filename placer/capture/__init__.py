"""Capture: a model as a graph on fake tensors."""

from placer.capture.call import flatten_call, rebuild_call, unflatten_output
from placer.capture.capture import capture_model
from placer.capture.fake import FakeWorld
from placer.capture.types import TENSOR, CallFormat, Capture, WholeModule

__all__ = [
    "TENSOR",
    "CallFormat",
    "Capture",
    "FakeWorld",
    "WholeModule",
    "capture_model",
    "flatten_call",
    "rebuild_call",
    "unflatten_output",
]
