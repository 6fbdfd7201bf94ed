"""Runs a placed model: turns the emitted stages and their weights into an ``nn.Module`` that trains.

=====================  ===========================================================================
module                 `PlacedModule`, the result: an instance of the model's own class
place_model            makes one of a plan, in one process; `pickled` saves and restores it
runtime                runs it: splits a batch (`scatter`), runs it on every replica, joins the results
calls                  finds the stages for a call, and captures the model for new kinds of calls
execute                runs micro-batches by a schedule's actions; `task` is the present one
stages                 run on the devices of a replica
places                 the plan's devices on this machine, and copies between them
loss                   the loss of a batch from the losses of its slices
slice_store,           what forward stores, for a slice's loss; a loss over all results together
whole_batch
hooks, gradient_hooks  the module's hooks in `step`; hooks on gradients, once per step
caller_graph, boxes,   inputs: in the caller's own graph, with one's own part only, and the rows that a
sampler                replica loads
watch, unplaced        measures a step; warns of an optimizer that trains nothing
distributed            the same with one process per device, under ``torchrun``
=====================  ===========================================================================
"""
