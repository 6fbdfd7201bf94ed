"""Capture: run a model once on fake tensors and record its operations as an ``fx`` graph.

Start reading at `capture`, which records the model and checks the graph.

=========================  =======================================================================
capture, whole            record a model; make modules, or all of it, single nodes where it must be
checks, row_check         what a capture refuses; how the recording depends on the rows of the batch
recording                 one run on fake tensors, written down as a graph
types, lower              what is captured, and the program that is made of it and rewritten
call, result, stored      arguments, results and what forward leaves behind, as lists of tensors
guards, variable_guards   attributes and variables that forward read; the graph is valid while they are
                          unchanged
validity, size_log        whether it is valid for other sizes and modes
blocks                    leave out most of the blocks that repeat, to find costs
leaves, targets, graphs   layers that are a single node; callables of nodes; how nodes are made
alias, fingerprint        nodes that share memory or draw random numbers; a hash of the graph
rows                      how values depend on the rows of the batch
fake                      what stands for tensors and numbers while a model runs without its data
objects                   what a model and its code hold: searched, copied, restored
constants, state          values that code may read although its tensors are fake; names of parameters
moves, split_by_hand      devices that the model's own code names
failure                   why and where recording failed
=========================  =======================================================================
"""

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
from placer.program.checks import refuse_global_hooks
from placer.program.failure import MethodNotCaptured
from placer.program.fake.converter import FakeConverter
from placer.program.fake.packed import unflatten
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
    own_hooks,
    without_hooks,
)
from placer.program.lower import lower, register_rewrite, rewritten, with_graph
from placer.program.moves import IgnoreDeviceMoves
from placer.program.objects.copying import Held, copy_module
from placer.program.objects.paths import Path
from placer.program.recording.record import refuse_attributes
from placer.program.result import flatten_result, result_tensors
from placer.program.rows.batch import BatchDim, SplitRules
from placer.program.rows.dependence import Rows
from placer.program.rows.marks import Batched, Box, Whole, is_mark, marked_dims, unmarked
from placer.program.state import first_names, named_state
from placer.program.stored import StateInput, Stored, Target, is_there, set_flags, store
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
