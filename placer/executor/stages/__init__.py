"""Runs one stage, and all stages of a replica, on their places.

===================  ==========================================================================
replica              the stages and weights of one replica
segments             a stage, segment by segment: some are recomputed, or keep saved activations
                     on the host (`offload`); `segment_state` is what a second run needs
split_backward       a backward in two halves (zero bubble)
statistics           running statistics once per batch
tree, compiled       the module tree that a stage's code reads; the code by ``torch.compile``
attribution          finds the node that is running, for dry runs and for error messages
===================  ==========================================================================
"""
