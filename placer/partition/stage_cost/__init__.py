"""Estimates what a stage costs: its peak memory, its seconds, and the bytes that cross its boundaries.

=====================  ===========================================================================
score                  the formula for peaks, and the seconds of stages
tables                 the terms of the formula, for all stages along an order at once
order_bytes            the parts of these terms, independent of where stages begin and end
state                  parameters, buffers and optimizer state, summed for stages and for units
optimizer              what an optimizer needs
pending_gradients      gradients of skip connections that have been computed and not used yet
received               how long copies of values from other stages are needed
region_liveness        values that recomputed or offloaded regions keep alive
overlap                seconds of a pass whose copies to the host overlap with computation
shared                 the peaks of devices with several stages
cache                  a cache of tables
=====================  ===========================================================================
"""
