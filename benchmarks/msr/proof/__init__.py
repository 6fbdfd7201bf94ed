"""Proves how good placements are: the best of all, by dynamic programs over every downset that could matter.

This is the referee of `benchmarks.quality` and `benchmarks.msr`. `placer.partition.solver` has the program,
and looks for placements among a few downsets only.

=====================  ===========================================================================
search                 the entry point: a lower bound that rises until it meets the best placement
conditions, surviving  conditions for downsets to be boundaries, and their enumeration
program                the program within limited work; it rules out downsets first
work                   a limit on the operations of a proof, so results do not depend on a clock
=====================  ===========================================================================
"""
