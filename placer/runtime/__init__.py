"""Runtime: emitted stages and placed weights in, an ``nn.Module`` that trains out.

=====================  ===========================================================================
module                 `PlacedModule`: cuts a batch (`scatter`) and runs it on every replica
programs               which stages serve a call: the captured ones, or those of another mode or size
replica                one replica's stages, forward or under a schedule; `pieces` runs a stage,
                       `offload` what waits on the host
place, places          where things are, and which torch device stands for that on this machine
transfer, mirror       how values get from place to place, and weights to other replicas' places
tree                   the modules as a stage sees them
attribution            which node runs now, for the ledger of `placer.simulation` and for errors
distributed            the same with a process per device, under torchrun
checkpoint             saved under one placement, loaded under any other
=====================  ===========================================================================
"""
