"""Capture: a model as a graph on fake tensors."""

from placer.capture.call import (
    BoundCall,
    bind_arguments,
    call_difference,
    call_tensors,
    flatten_call,
    rebuild_arguments,
    rebuild_call,
    unflatten_output,
)
from placer.capture.capture import capture_model
from placer.capture.fake import FakeWorld
from placer.capture.leaves import hooks_set_aside, is_kept_whole, is_torch_leaf
from placer.capture.state import first_names, named_state
from placer.capture.types import (
    TENSOR,
    CallFormat,
    Capture,
    Conditions,
    WholeModule,
    training_flags,
)
from placer.capture.validity import (
    captured_key,
    condition_key,
    find_difference,
)

__all__ = [
    "TENSOR",
    "BoundCall",
    "CallFormat",
    "Capture",
    "Conditions",
    "FakeWorld",
    "WholeModule",
    "bind_arguments",
    "call_difference",
    "call_tensors",
    "capture_model",
    "captured_key",
    "condition_key",
    "find_difference",
    "first_names",
    "flatten_call",
    "hooks_set_aside",
    "is_kept_whole",
    "is_torch_leaf",
    "named_state",
    "rebuild_arguments",
    "rebuild_call",
    "training_flags",
    "unflatten_output",
]
