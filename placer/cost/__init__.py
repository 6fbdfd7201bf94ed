"""Cost: a table of bytes and FLOPs per node of a program, estimated without allocating tensors.

`record` runs the program once on fake tensors and records a timeline (`timeline_mode`), what nodes do with
every storage (`storages`), and which node's backward is running (`attribution`). `lifetimes` derives from it
when each storage is alive, `gradients` which gradients are pending for which node, and `estimate` makes the
table. Of blocks that repeat only a few are run, and `expand` tells from them what the others cost.
`operations` classifies operations, and `work` computes how long they take on a device. `kernels` and
`autocast` make the run save the tensors that a CUDA device would save, `cpu_results` those that a CPU would.
`cuda_workspaces` has the memory that kernels allocate internally.
"""

from placer.cost.adjust import (
    with_added_rows,
    with_divided_gradients,
    with_fewer_rows,
    with_regions,
)
from placer.cost.cpu_results import cpu_result
from placer.cost.cuda_workspaces import BLAS_NBYTES, cuda_workspaces, uses_blas
from placer.cost.estimate import CostEstimates, Estimate, batch_rows, estimate_costs
from placer.cost.kernels import device_kernels
from placer.cost.loss import Loss, find_loss, loss_of, mean_square
from placer.cost.timeline_mode import TimelineMode, nbytes_of_storage
from placer.cost.types import (
    AddedGradient,
    CostTable,
    NodeCost,
    PendingGradient,
    StateTensor,
    StoredValue,
)
from placer.cost.work import Work
