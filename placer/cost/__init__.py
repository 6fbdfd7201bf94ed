"""Cost: a program in, a table of bytes and FLOPs per node out; nothing is allocated.

`estimate` makes the table from one run on fake tensors (`record`), which notes every storage
(`storages`) and whose backward runs (`owners`); `gradients` says what of a backward waits for what.
`operations` says of which class each operation is, and `work` how long all of them take on a device.
`kernels` and `autocast` have that run save what a CUDA device would; `workspaces` and
`cuda_workspaces` say what a CPU's and a GPU's kernels take besides; `devices` says what kind a device
is (`placer.catalogue`).
"""

from placer.cost.cuda_workspaces import BLAS_NBYTES, cuda_workspaces, uses_blas
from placer.cost.devices import device_kind, device_type, updates_together
from placer.cost.estimate import CostEstimates, GuessedCosts, estimate_costs
from placer.cost.kernels import device_kernels
from placer.cost.record import stand_in_loss
from placer.cost.regions import with_regions
from placer.cost.rows import with_fewer_rows
from placer.cost.types import AddedGradient, CostTable, NodeCost, PendingGradient, StoredValue
from placer.cost.work import Work
from placer.cost.workspaces import cpu_result, workspace_nbytes

__all__ = [
    "BLAS_NBYTES",
    "AddedGradient",
    "CostEstimates",
    "CostTable",
    "GuessedCosts",
    "NodeCost",
    "PendingGradient",
    "StoredValue",
    "Work",
    "cpu_result",
    "cuda_workspaces",
    "device_kernels",
    "device_kind",
    "device_type",
    "estimate_costs",
    "stand_in_loss",
    "updates_together",
    "uses_blas",
    "with_fewer_rows",
    "with_regions",
    "workspace_nbytes",
]
