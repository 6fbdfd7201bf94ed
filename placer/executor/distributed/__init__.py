"""Runs a placed model with one process per device, as under ``torchrun``.

Inside a job ``placer.compile(model, spec, args)`` returns a `DistributedModule` instead of a
`PlacedModule`, which builds only this rank's stages. A process is in a job if ``torchrun`` or another
launcher has set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or if the default process
group exists. The part of the table above the line works in both, so one script can serve both.

==================================================  ==============================================
``placed.step(x, target=t, loss_fn=f)``             forward and backward under the plan's schedule,
                                                    gradients reduced; the loss on every rank
``placed.step(x, …, own_rows=True)``                the same for only this replica's rows in ``x``, ``t``
``placed.step(x, …, scaler=scaler)``                the loss is scaled for fp16
``placed(x)``                                       inference: the result on every rank
``placed.parameters()``, ``placed.state_dict()``    this rank's part, under the original names
``placed.clip_grad_norm_(max_norm)``                clips by the norm over all ranks and returns it
``placed.grad_scaler()``                            a ``GradScaler``; all ranks skip the same steps
``placed.sampler(dataset, batch_size, shuffle=…)``  all stages of a replica see the same rows
``placed.plan``                                     the whole plan, the same on every rank
--------------------------------------------------  ----------------------------------------------
``placed.mesh``                                     ``DeviceMesh`` of dims ``("dp", "pp")``, and "sp" in space
``placed.replica_index``, ``placed.num_replicas``   the row of the mesh, and the number of rows
``placed.stage_indices``, ``placed.device``         the stages of this rank, and its device
``placed.tensor_names``                             local name -> the first of the tensor's names
``placed.owned_names``                              the tensors that this rank saves, by the first of
                                                    their names; each has one owner in the job
==================================================  ==============================================

All ranks call ``placer.save(placed, optimizer, path)`` and ``placer.load(…)``. A job of another shape,
a single process and the plain model can load what a job has saved (`placer.checkpoint`).

If a rank fails, the others end too. The rank whose stage raised gets a ``StageError``, with the layer of a
forward, and with ``PLACER_ANOMALY=1`` in the environment, which is slow, that of a backward. The others get
a ``PeerError`` as soon as its connections close. If a rank hangs, the others end after the process group's
timeout, with a ``PeerError`` that names the rank that was not waiting. The timeout is half an hour by
default; call ``init_process_group(timeout=…)`` before ``compile`` to set another.

In ``compile`` the ranks first join the default process group, which is made if there is none. After half a
minute they warn which ranks are missing. A rank that cannot compile the model tells the others why, even if
its program continues. (A rank that ended before ``compile`` cannot; ``torchrun`` then ends the others.) If
rank 0 hosts the store, as in a job without ``torchrun``, it stays for up to half a minute after a failure so
that the others can read the reason.

``torchrun --max-restarts`` restarts all processes; a program that loads its last checkpoint continues
from there.

Rank ``r * P + p`` is device ``p`` of replica ``r``, with ``P`` devices per replica. With an interleaved
schedule, stage ``s`` runs on device ``s % P``. All ranks must make the same calls of the table in the
same order, after ``compile``. They compare a digest of each call, which is
on its way while the first forward runs, and before anything else is sent: if a rank makes another call, or
has other options, another number of rows or other shapes, or if a replica would compute with rows of
different batches, all ranks raise the same error. After a refused step or inference the module's
connections are closed. (A rank that is alone in ``compile``, in a call of another placed module, or in a
collective of the program itself waits for the others, as it would with torch.) Without ``own_rows``
every rank gets the whole batch and uses its own rows. The weights are those of rank 0's model.

How it works: every rank runs its own actions of the schedule, with the same code as in one process
(`placer.executor.execute`). A value from another rank arrives as a message directly from the rank that
made it; its shape is found on fake tensors. The model's inputs are not sent, because every rank has
them. Gradients are summed over replicas in buckets while backward runs, those of tied weights also over
the stages that share them. ``placer.make_plan(model, spec, args, processes=True)`` computes the memory
of each rank: its peaks are those of a dry run of each rank on fake tensors
(``placer.simulate(…, processes=True)``). If the spec limits memory, ``compile`` makes this dry run in
the job, also for a plan that was made for one process, and raises ``BudgetError`` on all ranks if one
does not fit.

The following work as in one process. Inputs of other sizes, and other modes, after ``compile``. Hooks,
also those on the whole module; its forward hooks run in a step on the rank of the last stage, for each
micro-batch. Inputs that require gradients get them in ``placed.step`` on every rank; they must require
them on all ranks or on none, else every rank raises ``PlacerError``. Full backward hooks on the whole
module are refused in a step.

With ``"shard_state": "optimizer"`` an optimizer's step updates pieces of parameters, one on each rank that
has them, and all ranks make that step together (`placer.executor.distributed.reduction.pieces`).

These differ:

 * ``placed(x)`` returns results without a graph. In train mode with gradients enabled it is an error.
 * A call with other arguments than ``compile`` was given, such as an optional tensor, is captured as in one
   process. If a stage then reads a weight that its rank does not have, that is an error.
 * ``loss_fn`` is called on the rank of the last stage, for each micro-batch; metrics that it collects are
   there only. It may depend on parameters only through the model's output, otherwise it is an error:
   other parameters of the model are on other ranks, and parameters of the loss itself would be trained
   on one rank only. For a penalty on weights let every rank call
   ``penalty(placed.parameters()).backward()`` after the step; make parameters of the loss a layer of the
   model. A target that requires gradients is the same error, unless the job has only one rank.
 * A rank has only its part of the parameters. ``placed.parameters()`` is never empty, as optimizers
   require. A selection of parameters may be empty; pass it as a group: ``Adam([{"params": selected}])``.
   An optimizer that computes with all parameters together (LBFGS) is an error if a replica has several
   ranks.
 * ``nn.utils.clip_grad_norm_`` and a plain ``GradScaler`` would see only this rank's gradients, so they are
   errors if a replica has several ranks; use ``placed.clip_grad_norm_`` and ``placed.grad_scaler``. A norm
   of this rank's gradients that the program computes itself is not detected.
 * ``DistributedDataParallel(placed)`` is an error: the spec says how many replicas there are.
 * ``requires_grad`` of parameters is fixed at ``compile``, so freeze before. To freeze in the middle of
   training save, freeze, compile and load.
 * ``placed.load_state_dict`` accepts the state of the whole model, or of this rank's part.
 * ``deepcopy`` and pickling are errors. ``placer.save`` saves the whole model; compute a moving average of
   the weights from ``placed.named_parameters()``.
 * ``placed.state_dict()`` warns once that it lacks the tensors of other ranks.
 * Every ``compile`` makes process groups that stay until the job ends, even if the module is deleted (with
   gloo about 9 file descriptors and 6 threads each time).
 * Every rank has its own random numbers, for dropout; they are the same when the program is run again.
 * ``batch_norm: "sync"`` works here, with one micro-batch and at least one row per replica. ``"deferred"``
   works as in one process: at the end of a step the replicas exchange the moments of their rows in one
   message. Which norms update running statistics must not depend on the data.
"""
