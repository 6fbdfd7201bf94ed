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
from placer.capture.copying import copy_module, tensors_of
from placer.capture.fake import FakeWorld
from placer.capture.leaves import hooks_set_aside, is_kept_whole, is_torch_leaf
from placer.capture.settings import (
    Setting,
    changed_setting,
    copy_settings,
    settings_restored,
)
from placer.capture.types import (
    TENSOR,
    CallFormat,
    Capture,
    Conditions,
    WholeModule,
    training_flags,
)
from placer.capture.validity import (
    SameProgram,
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
    "SameProgram",
    "Setting",
    "WholeModule",
    "bind_arguments",
    "call_difference",
    "call_tensors",
    "capture_model",
    "captured_key",
    "changed_setting",
    "condition_key",
    "copy_module",
    "copy_settings",
    "find_difference",
    "flatten_call",
    "hooks_set_aside",
    "is_kept_whole",
    "is_torch_leaf",
    "rebuild_arguments",
    "rebuild_call",
    "settings_restored",
    "tensors_of",
    "training_flags",
    "unflatten_output",
]
