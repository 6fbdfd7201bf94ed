"""Runs a placed model with one process per device, as under ``torchrun``; see docs/torchrun.md.

Inside a job ``placer.compile(model, spec, args)`` returns a `DistributedModule` instead of a
`PlacedModule`, which builds only this rank's stages. A process is in a job if ``torchrun`` or another
launcher has set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or if the default process
group exists. Rank ``r * P + p`` is device ``p`` of replica ``r``, with ``P`` devices per replica.

Every rank runs its own actions of the schedule, with the same code as in one process
(`placer.executor.execute`). A value from another rank arrives as a message directly from the rank that
made it; its shape is found on fake tensors. The model's inputs are not sent, because every rank has
them. Gradients are summed over replicas in buckets while backward runs, those of tied weights also over
the stages that share them. If the spec limits memory, ``compile`` makes a dry run of each rank on fake
tensors, and raises ``BudgetError`` on all ranks if one does not fit.

============  =====================================================================================
folder
============  =====================================================================================
job           the ranks: which is what, which tensors it has, how they come together and agree on a call
messages      a rank's rows, its stages, and the messages to and from others
reduction     sums over ranks: gradients, losses, statistics; pieces of parameters for the optimizer
failures      tells all ranks why one failed, and finds ranks that hang
============  =====================================================================================
"""
