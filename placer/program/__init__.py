"""Capture: run a model once on fake tensors and record its operations as an ``fx`` graph.

Start reading at `capture`, which records the model and checks the graph.

=========================  =======================================================================
record, recorder, writer   run the model once, intercept every call, write the graph
watch, sizes,              intercept what torch's own hooks miss: module calls, arithmetic on sizes
size_recorder
whole, leaves,             modules (or a whole model) that become a single node
single_node
encoder                    what torch's ``TransformerEncoder`` does without gradients
checks                     what a capture refuses
fake, fake_mode, shapes,   fake tensors; kernels and shape rules that are faster than torch's
packed                     (`packed`: packed sequences)
constants                  values that the model's code may read although its tensors are fake
objects, reachable,        what a model and its code hold; caches that a run must not fill
caches
alias                      find nodes that share memory, write to state or draw random numbers
call, result, marks        flatten arguments and results to lists of tensors, and rebuild them
batch, rows                which inputs have a row per sample, and how values depend on the rows
forward, reached,          one run of forward, and what it leaves behind: found, written to the graph,
leaving, stored, watched   and stored by a call of the placed model
guards, variable_guards    attributes and variables that forward read; the graph is valid while they are
                           unchanged
moves                      devices that the model's own code names
targets                    callables of graph nodes for which torch has no function
fingerprint, validity      identify a graph; check whether it is valid for other sizes and modes
lower                      make the program of what was captured, and rewrite it
blocks                     leave out most of the blocks that repeat, to find costs
restore, copying,          leave the model as it was; what parts of a copy are copies of
originals
state                      names of parameters and buffers
python_random, failure     random numbers that are not torch's; why and where recording failed
random_layers              layers that draw random numbers of torch
=========================  =======================================================================
"""

from placer.program.batch import BatchDim, SplitRules
from placer.program.call import (
    BoundCall,
    bind_arguments,
    call_difference,
    call_tensors,
    changed_numbers,
    flatten_call,
    placeholder_names,
    rebuild_arguments,
    rebuild_call,
    strides_of_copy,
    unflatten_output,
)
from placer.program.copying import copy_module, tensors_of
from placer.program.failure import MethodNotCaptured
from placer.program.fake import FakeConverter
from placer.program.guards import (
    AttributeGuard,
    copy_guarded_attributes,
    failed_guard,
    find_tensor,
    guarded_attributes_restored,
)
from placer.program.leaves import (
    hook_count,
    is_inside,
    is_torch_leaf,
    must_stay_whole,
    without_hooks,
)
from placer.program.lower import lower, register_rewrite, rewritten, with_graph
from placer.program.marks import Batched, Box, Whole, is_mark, marked_dims, unmarked
from placer.program.moves import IgnoreDeviceMoves
from placer.program.objects import Path
from placer.program.packed import unflatten
from placer.program.record import refuse_attributes
from placer.program.result import flatten_result, result_tensors
from placer.program.rows import Rows
from placer.program.state import first_names, named_state
from placer.program.stored import StateInput, Stored, Target, set_flags, store
from placer.program.targets import SELECTS
from placer.program.types import (
    TENSOR,
    Answers,
    AnyNumber,
    CallFormat,
    Conditions,
    Program,
    WholeModule,
    example_numbers,
    read_state,
    rows_of,
    training_flags,
)
from placer.program.validity import SameProgram, condition_key, row_counts, same_program
from placer.program.variable_guards import SettingsGuard, VariableGuard
