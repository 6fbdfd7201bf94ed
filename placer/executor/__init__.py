"""Executor: emitted stages and placed weights in, an ``nn.Module`` that trains out.

=====================  ===========================================================================
module                 `PlacedModule`: cuts a batch (`scatter`) and runs it on every replica
programs               which stages serve a call: the captured ones, or those of another mode or size
execute                runs micro-batches by a table of actions; `split_backward` has both halves of one
replica                one replica's stages and weights; `segments` runs a stage, `offload` what waits
                       on the host, `side_stream` copies beside the kernels
place, device_map      where things are, and which torch device stands for that on this machine
transfer               how values get from place to place, and gradients back
parameter_copies       weights on places other than their home
tree                   the modules as a stage sees them
attribution            which node runs now, for the ledger of `placer.simulation` and for errors
loss                   how a loss combines the rows of a batch
distributed            the same with a process per device, under torchrun
=====================  ===========================================================================
"""
