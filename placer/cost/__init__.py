"""Cost: a table of bytes and FLOPs per node of a program, estimated without allocating tensors.

`record` runs the program once on fake tensors and records a timeline (`timeline_mode`), what nodes do with
every storage (`storages`), and which node's backward is running (`attribution`). `lifetimes` derives from it
when each storage is alive, `gradients` which gradients are pending for which node, and `estimate` makes the
table. `operations` classifies operations, and `work` computes how long they take on a device. `kernels` and
`autocast` make the run save the tensors that a CUDA device would save. `workspaces` and `cuda_workspaces`
have the memory that kernels allocate internally. `devices` finds the kind of a device (`placer.catalogue`).
"""

from placer.cost.cuda_workspaces import BLAS_NBYTES, cuda_workspaces, uses_blas
from placer.cost.devices import device_kind, device_type, is_kind_known, updates_together
from placer.cost.estimate import CostEstimates, Estimate, estimate_costs
from placer.cost.kernels import device_kernels
from placer.cost.record import stand_in_loss
from placer.cost.regions import with_regions
from placer.cost.rows import with_fewer_rows
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
from placer.cost.workspaces import cpu_result, workspace_nbytes

__all__ = [
    "BLAS_NBYTES",
    "AddedGradient",
    "CostEstimates",
    "CostTable",
    "Estimate",
    "NodeCost",
    "PendingGradient",
    "StateTensor",
    "StoredValue",
    "TimelineMode",
    "Work",
    "cpu_result",
    "cuda_workspaces",
    "device_kernels",
    "device_kind",
    "device_type",
    "estimate_costs",
    "is_kind_known",
    "nbytes_of_storage",
    "stand_in_loss",
    "updates_together",
    "uses_blas",
    "with_fewer_rows",
    "with_regions",
    "workspace_nbytes",
]
