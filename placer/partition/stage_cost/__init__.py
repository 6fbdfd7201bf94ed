"""What a stage costs: the peak of its memory in bytes, its seconds, what crosses its boundaries.

=====================  ===========================================================================
score                  the one formula
tables                 its terms for all stages of an order, from
waiting                gradients of skip connections, which wait where they are needed
received               copies of values that other stages made
held                   what regions that are recomputed or offloaded hold
shared, passed_on      a device with several stages: what these hold together, and for each other
=====================  ===========================================================================
"""
