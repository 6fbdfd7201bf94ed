"""Capture: a model and one call of it in, its graph on fake tensors out.

Begin with `capture`, which records and checks.

=====================  ===========================================================================
record, recorder       one run of the model, heard of call by call; `watch` and `sizes` report what
and writer             torch does not, the writer has the graph
whole, leaves          what becomes a single node, and a model of which nothing else can be had
fake, packed           stand-ins without data; `constants`: those whose values may be looked at
caches, reach          what earlier calls left in caches and global variables stays out
alias                  which nodes share memory, write to state or draw random numbers
call, result           arguments to a flat list of tensors and back; `state`: names of the weights
settings               plain attributes that the forward read, under which the graph is right
moves                  devices that the model's own code names
targets                what a graph calls where there is no function for it
fingerprint, validity  is it the same graph; does it serve other sizes and modes too
restore, copying,      the model is left as it was; failures say module, reason and line
draws, failure
=====================  ===========================================================================
"""

from placer.program.call import (
    BoundCall,
    bind_arguments,
    call_difference,
    call_tensors,
    flatten_call,
    placeholder_names,
    rebuild_arguments,
    rebuild_call,
    unflatten_output,
)
from placer.program.capture import capture_model
from placer.program.copying import copy_module, tensors_of
from placer.program.fake import FakeConverter
from placer.program.guards import (
    AttributeGuard,
    TensorPath,
    copy_guarded_attributes,
    failed_guard,
    find_tensor,
    guarded_attributes_restored,
)
from placer.program.leaves import is_inside, is_torch_leaf, must_stay_whole, without_hooks
from placer.program.moves import IgnoreDeviceMoves
from placer.program.result import flatten_result, result_tensors
from placer.program.state import first_names, named_state
from placer.program.types import (
    TENSOR,
    CallFormat,
    Conditions,
    Program,
    WholeModule,
    training_flags,
)
from placer.program.validity import (
    SameProgram,
    captured_key,
    condition_key,
    find_difference,
)

__all__ = [
    "TENSOR",
    "AttributeGuard",
    "BoundCall",
    "CallFormat",
    "Conditions",
    "FakeConverter",
    "IgnoreDeviceMoves",
    "Program",
    "SameProgram",
    "TensorPath",
    "WholeModule",
    "bind_arguments",
    "call_difference",
    "call_tensors",
    "capture_model",
    "captured_key",
    "condition_key",
    "copy_guarded_attributes",
    "copy_module",
    "failed_guard",
    "find_difference",
    "find_tensor",
    "first_names",
    "flatten_call",
    "flatten_result",
    "guarded_attributes_restored",
    "is_inside",
    "is_torch_leaf",
    "must_stay_whole",
    "named_state",
    "placeholder_names",
    "rebuild_arguments",
    "rebuild_call",
    "result_tensors",
    "tensors_of",
    "training_flags",
    "unflatten_output",
    "without_hooks",
]
