"""What a stage costs: its peak memory in bytes, its seconds, and the bytes that cross its boundaries.

=====================  ===========================================================================
score                  the formula for peaks, and seconds
tables                 the terms of the formula, for all stages along an order at once
order_bytes            what they are sums of: bytes along an order, wherever stages begin and end
rectangles             such sums
pending_gradients      gradients of skip connections, from when they are computed until they are used
received               how long copies of values from other stages are needed
region_liveness        what regions that are recomputed or offloaded keep, and when
shared, live_through   devices with several stages: their peaks, and values that pass through
cache                  tables that were built before
=====================  ===========================================================================
"""
