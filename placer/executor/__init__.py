"""Runs a placed model: turns the emitted stages and their weights into an ``nn.Module`` that trains.

=====================  ===========================================================================
module                 `PlacedModule`, the result: an instance of the model's own class
runtime                runs it: splits a batch (`scatter`), runs it on every replica, joins the results
programs, numbers      finds the stages for a call; captures the model anew for other modes and sizes
state, slice_store     tensors and numbers that calls keep; what forward stores, for a slice's loss
execute                runs micro-batches by a schedule's actions; `split_backward` runs a backward in
                       two halves
replica                the stages and weights of one replica; `segments` runs a stage, `offload` keeps
                       saved activations on the host, `side_stream` copies while kernels run
place, device_map      the plan's devices, and the torch device that stands for each on this machine
transfer               differentiable copies between places
parameter_copies       copies of weights on places that only read them
tree                   the module tree that a stage's code reads
gradient_hooks         hooks on gradients run once per step; `caller_graph` keeps the caller's own graph
attribution            finds the node that is running, for `placer.simulation` and for error messages
loss                   the loss of a batch from the losses of its slices
distributed            the same with one process per device, under ``torchrun``
=====================  ===========================================================================
"""
