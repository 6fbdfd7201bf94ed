"""The same spec under ``torchrun``: one process per device, by point-to-point messages.

Inside a job (``torchrun``, or a launcher that sets the same RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT, or the default process group exists already) ``placer.compile(model, spec, args)`` returns a
`DistributedModule` instead of a `PlacedModule`; it builds only this rank's stages. What is above the
line works in both, so that one script serves both.

==================================================  ==============================================
``placed.step(x, target=t, loss_fn=f)``             forward and backward under the plan's schedule,
                                                    gradients reduced; the loss on every rank
``placed.step(x, …, own_rows=True)``                ``x`` and ``t`` are this replica's rows only
``placed.step(x, …, scaler=scaler)``                the loss is scaled for fp16
``placed(x)``                                       inference: the result on every rank
``placed.parameters()``, ``placed.state_dict()``    this rank's part, under the original names
``placed.clip_grad_norm_(max_norm)``                by the norm over all ranks; returns that norm
``placed.grad_scaler()``                            a ``GradScaler`` whose ranks agree
``placed.sampler(dataset, batch_size, shuffle=…)``  all stages of a replica see the same rows
``placed.plan``                                     the whole plan, the same on every rank
--------------------------------------------------  ----------------------------------------------
``placed.mesh``                                     ``DeviceMesh`` of dims ``("dp", "pp")``
``placed.replica_index``, ``placed.num_replicas``   the row of the mesh, and how many there are
``placed.stage_indices``, ``placed.device``         what this rank runs, and where
``placed.tensor_names``                             local name -> the first of the tensor's names
``placed.owned_names``                              what this rank saves: each tensor on one rank of
                                                    the job, by the first of its names
==================================================  ==============================================

``placer.save(placed, optimizer, path)`` and ``placer.load(…)`` are called by all ranks; what one job
saved, a job of another shape, one process, or the plain model loads (`placer.checkpoint`).

A rank that fails ends the others: ``StageError`` on the rank where a stage raised, ``PeerError`` on
those that lost it, as soon as its connections close. A rank that hangs ends them after the process
group's timeout (half an hour by default; ``init_process_group(timeout=…)`` before ``compile`` for
another): ``PeerError`` names it, as the one that was not waiting.

In ``compile`` the ranks wait for each other before anything is sent, as long as that timeout says. After
half a minute they warn which ranks are missing. One that cannot compile the model tells the others why,
also when its program goes on. (One that has ended before it came to ``compile`` cannot; ``torchrun``
then ends the others by itself.) Where rank 0 hosts the store, as in a job without ``torchrun``, it stays
for up to five seconds when it fails, so that the others can read why.

``torchrun --max-restarts`` starts all anew; a program that loads its last checkpoint goes on there.

Rank ``r * P + p`` is device ``p`` of replica ``r``; ``P`` devices per replica. With an interleaved
schedule, stage ``s`` runs on device ``s % P``. All ranks of a job make the calls of the table alike,
and ``compile`` before them. They tell each other so before a step, an inference, clipping, saving and
loading: a rank that is elsewhere, or given other options, another number of rows or other shapes, is an
error on all, and the job can go on. (A rank that is alone in ``compile``, in a call of another placed
module, or in a message of the program's own, cannot be told: it waits for the others, as with torch. One
that was refused a call by itself tells the others at its next.) Without ``own_rows`` every rank is given the
whole batch and uses its rows. The weights are those of rank 0's model.

How it is done: every rank runs its own actions of the schedule, with the code that runs them all in one
process (`placer.executor.execute`). What another rank made comes as a message straight from there;
its shape is found on fake tensors. Every rank has the model's own inputs, they do not travel.
Gradients are summed over replicas in buckets while backward runs, those of tied weights over their
stages too.
``placer.make_plan(model, spec, args, processes=True)`` says what each rank will hold: its peaks are
those of a dry run of each rank on fake tensors (``placer.simulate(…, processes=True)``). Inside a job
``compile`` makes that dry run where the spec limits memory, and raises ``BudgetError`` on all ranks
when one does not fit; also for a plan that was made for one process.

As in one process: inputs of other sizes and modes after ``compile``; hooks, those on the whole module
too (forward hooks in a step run where the last stage is, for each micro-batch); inputs that require
gradients get theirs in ``placed.step``, on every rank (all ranks' must require them, or none's: else
every rank raises ``PlacerError``); full backward hooks on the whole module are refused in a step.

What differs:

 * ``placed(x)`` gives results without a graph. In train mode with gradients enabled that is an error.
 * ``loss_fn`` is called where the last stage is, for each micro-batch: what it collects for metrics is
   on those ranks only. It may read no parameters but through the model's output: those of the model are
   on other ranks too (a penalty is added after the step, by every rank for its own parameters:
   ``penalty(placed.parameters()).backward()``), and those of the loss itself would be trained on one rank
   alone (make them a layer of the model). Both are errors.
 * A rank has its part of the parameters. ``placed.parameters()`` always has one for the optimizer; a
   selection of them may have none, which goes as a group: ``Adam([{"params": selected}])``. An optimizer
   that computes with all parameters together (LBFGS) is an error where a replica has several ranks.
 * ``nn.utils.clip_grad_norm_`` would see this rank's gradients only, and so would a plain ``GradScaler``:
   errors where a replica has several ranks. ``placed`` has its own of both. A norm that the program
   itself computes of this rank's gradients is not noticed.
 * ``DistributedDataParallel(placed)`` is an error: replicas are in the spec.
 * ``requires_grad`` of parameters is fixed at ``compile``: freeze before; in the middle of training save,
   freeze, compile and load.
 * ``placed.load_state_dict`` takes the state of the whole model, or of this part.
 * No ``deepcopy``, no pickling: ``placer.save`` has the whole; a moving average of the weights is one of
   ``placed.state_dict()``, by name.
 * Every ``compile`` makes process groups, which stay until the job ends (gloo: some 9 file descriptors and
   6 threads each time), also where the module goes.
 * Dropout: every rank has random numbers of its own, the same again when the program is run again.
 * ``batch_norm: "sync"`` works here (one micro-batch, every replica needs a row). ``"deferred"`` is as in
   one process: the moments of every replica's rows go to all of them, in a message at the end of the
   step. What norms update running statistics is known from shapes; it may not depend on the data.
"""
