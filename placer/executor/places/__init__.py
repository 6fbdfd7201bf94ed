"""The devices that a plan names, the torch devices that stand for them, and copies between them.

===================  ==========================================================================
place, device_map    the plan's devices, and the torch device that runs each on this machine
transfer             differentiable copies between places
parameter_copies     copies of weights on places that only read them
exchange             copies between the shards in space that one process runs
side_stream          copies between a device and the host while kernels run
cuda_allocator       torch's CUDA allocator, configured as the plan assumes
===================  ==========================================================================
"""
